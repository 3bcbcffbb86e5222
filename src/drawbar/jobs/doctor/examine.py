"""The whole examination: asks, collects, and puts the findings in order."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from drawbar.cli.train import processes_to_start
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.rules.rule_table import (
    PACKAGE_RULES,
    RULES,
    TRAIN_RULES,
    check_guests,
    check_rules,
    check_world,
)
from drawbar.config.schema.run_config import RunConfig
from drawbar.config.strategies import AUTO
from drawbar.distributed.rank_info import has_rank
from drawbar.errors import UserError
from drawbar.jobs.doctor import findings
from drawbar.jobs.doctor.findings import GIB, look_at_folder, look_at_machine
from drawbar.launch.findings import Finding, Level, look_at_gpus, of_gpus, problem
from drawbar.models.folder import run_reference
from drawbar.runtime.hub import hub_answers
from drawbar.util.versions import TESTED, installed, untested_versions

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TORCH_SECONDS = 180.0
"""For importing torch on a busy machine, and for what it is asked; both usually take 3."""


def examine(loaded: LoadedConfig, given: bool) -> dict[str, list[Finding]]:
    """Look at this machine, and at what this configuration would do on it. Takes a few seconds.

    Args:
        loaded: the configuration.
        given: whether the user gave one; if not, neither hub names nor settings are checked.

    Returns:
        The findings of each section.
    """
    config = loaded.config
    gpus = look_at_gpus(os.environ)  # before torch is asked, which takes memory on a GPU itself
    nproc = 1 if config.launch.nproc == "auto" else config.launch.nproc
    torch = ask_torch(config.device, config.precision, nproc)
    started = processes_to_start(config, lambda: int(torch.get("gpus", 0)))
    ranks = _number("WORLD_SIZE") or started
    processes = _number("LOCAL_WORLD_SIZE") or _number("LOCAL_SIZE") or _number("WORLD_SIZE") or started
    many_nodes = ranks > processes or os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    cached = {name: _is_cached(name) for name in hub_names(config)} if given else {}
    sections = {
        "Machine": findings.of_machine(look_at_machine(), os.environ, processes, many_nodes),
        "Libraries": _libraries(),
        "Device": (*findings.of_torch(torch, gpus, config.device), *of_gpus(gpus)),
        "Storage": _folders(config, downloads=not all(cached.values())),
        "Hugging Face Hub": _hub(cached),
        "Run": _run(loaded, torch, processes, ranks, given),
    }
    return {name: found for name, section in sections.items() if (found := list(section))}


def _number(variable: str) -> int:
    """The number that a launcher has set; 0 if it is not a number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def ask_torch(
    *question: object, environ: Mapping[str, str] = os.environ, timeout: float = TORCH_SECONDS
) -> dict[str, Any]:
    """What the probe answers to device, precision and number of processes; ``{"error": …}`` if it fails."""
    command = [sys.executable, "-m", "drawbar.jobs.doctor.probe", *map(str, question)]
    try:
        done = subprocess.run(command, env=dict(environ), timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {timeout:.0f} s"}
    with suppress(ValueError, IndexError):
        return dict(json.loads(done.stdout.splitlines()[-1]))
    code = done.returncode
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return {"error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else ended}


def _libraries() -> Iterator[Finding]:
    found = [f"{library} {installed(library)}" for library in ("drawbar", *TESTED) if installed(library)]
    yield Finding("versions", Level.OK, ", ".join(found))
    for untested in untested_versions():
        yield Finding("versions", Level.WARNING, untested, "should something fail, install a tested version")


def _folders(config: RunConfig, downloads: bool) -> Iterator[Finding]:
    run, cache = Path(config.run.dir).absolute(), config.cache_dir.absolute()
    yield from findings.of_folder(look_at_folder("run.dir", run), 5 * GIB)
    if not cache.is_relative_to(run):
        yield from findings.of_folder(look_at_folder("data.cache", cache), GIB)
    home = look_at_folder("HF_HOME", constants.HF_HOME)
    yield from findings.of_folder(home, GIB, needed=downloads)  # it may be shared, and read-only
    temporary = look_at_folder("TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    yield from findings.of_folder(temporary, GIB, builds=True)


def hub_names(config: RunConfig) -> list[str]:
    """The model and the tokenizer that the configuration loads from the Hub, and not from folders here."""
    task = config.task
    model, tokenizer = getattr(task, "model", None), getattr(task, "tokenizer", None)
    names = [model] if getattr(task, "from_scratch", None) is None and run_reference(task) is None else []
    given = [name for name in dict.fromkeys([*names, tokenizer]) if isinstance(name, str)]
    return [name for name in given if not Path(name).expanduser().is_dir()]


def _hub(cached: Mapping[str, bool]) -> Iterator[Finding]:
    missing = [name for name, is_cached in cached.items() if not is_cached]
    is_set = [name for name in OFFLINE if os.environ.get(name, "").lower() in ("1", "on", "yes", "true")]
    obstacle = f"{is_set[0]} is set" if is_set else ""
    try:
        if not is_set and not all(hub_answers(name) for name in missing):
            obstacle = "the Hugging Face Hub does not answer"
        yield from findings.of_hub(cached, obstacle)
    except UserError as error:
        yield Finding.from_error(error, missing[0])


def _is_cached(name: str) -> bool:
    files = ("config.json", "tokenizer.json")
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except ValueError:  # it cannot be a name of the hub
        return False


def _run(
    loaded: LoadedConfig,
    torch: Mapping[str, Any],
    processes: int,
    ranks: int,
    given: bool,
) -> Iterator[Finding]:
    """What a run would be here: processes, strategy, and the errors by which training would refuse it."""
    config = loaded.config
    if error := torch.get("errors", {}).get("launcher"):
        yield problem(error.get("where") or "launcher", error["what"], error["remedy"] or "")
    why = "as the launcher says" if has_rank() else f"launch.nproc={config.launch.nproc}"
    yield Finding("processes", Level.OK, f"{processes} on this machine ({why})")
    if not given:
        return
    for name, check in (
        ("settings", lambda: check_rules(loaded, [*RULES, *TRAIN_RULES, *PACKAGE_RULES])),
        ("processes", lambda: check_world(config, ranks)),
        ("sections of other packages", lambda: check_guests(loaded, ranks)),
    ):
        try:
            check()
        except UserError as error:
            yield Finding.from_error(error, name)
    yield Finding("strategy", Level.OK, strategy(config, ranks))
    if ranks > 1:
        backend = "nccl, and gloo on the host" if torch.get("device") == "cuda" else "gloo"
        yield Finding("backend", Level.OK, backend)


def strategy(config: RunConfig, ranks: int) -> str:
    """The strategy that ``ranks`` processes would take, and why."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in ("pipeline", "context", "tensor", "replicate")}
    composed = "".join(f" × {name} {degree}" for name, degree in degrees.items() if degree > 1)
    if config.strategy.name != AUTO:
        return f"{config.strategy.name}{composed}"
    rest = "" if ranks == 1 else ", or fsdp where the model's state does not fit into a rank's memory"
    return f"{'single' if ranks == 1 else 'ddp'}{composed}{rest} (auto)"
