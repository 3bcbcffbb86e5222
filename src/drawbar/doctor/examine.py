"""The whole examination: asks, collects, and puts the findings in order."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from drawbar.config.deepspeed.deepspeed_json import check_deepspeed
from drawbar.config.deepspeed.zero_settings import is_deepspeed, zero_stage
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema.run_config import RunConfig
from drawbar.config.strategies import AUTO
from drawbar.doctor.environment import LAUNCH, check_hub, check_launcher, check_slurm_gpus, is_offline
from drawbar.doctor.finding import Finding, Findings, Fix, Level, problem_of
from drawbar.doctor.host import check_compiler, check_host, collect_compiler, collect_host
from drawbar.doctor.libraries import check_libraries, collect_libraries
from drawbar.doctor.network import check_network, collect_network, has_other_hosts, is_this_host
from drawbar.doctor.probe_process import ProbeProcess, check_device, check_rendezvous, driver_version, start_probe
from drawbar.doctor.storage import check_folder
from drawbar.errors import UserError
from drawbar.launch.folder_facts import GIB, collect_folder
from drawbar.models.folder import run_reference
from drawbar.runtime.hub import hub_answers

CONFIG = "Configuration"


def examine(loaded: LoadedConfig, given: bool, count: Callable[[int], int]) -> Findings:
    """Look at this machine, and at what this configuration would do on it. Takes a few seconds.

    Args:
        loaded: the configuration.
        given: whether the user gave one; if not, neither hub names nor settings are checked.
        count: from the number of GPUs to the number of processes that `drawbar train` would start.
    """
    config = loaded.config
    rendezvous = start_probe("rendezvous")  # runs beside the other probe: each imports torch
    expected = 1 if config.launch.nproc == "auto" else config.launch.nproc
    facts = start_probe("device", config.device, config.precision, str(expected)).result()
    gpus = len(facts.get("gpus", []))
    processes = _processes_here(count(gpus))
    return Findings(list(_findings(loaded, given, facts, rendezvous, processes)))


def _findings(
    loaded: LoadedConfig, given: bool, facts: Mapping[str, Any], rendezvous: ProbeProcess, processes: int
) -> Iterator[Finding]:
    config, environ = loaded.config, os.environ
    device = facts.get("device", "cpu")
    yield from check_host(collect_host(), processes)
    yield check_compiler(collect_compiler(), config.parallel.compile, device == "cuda")
    yield from check_libraries(collect_libraries(), _needed(config))
    yield from check_device(facts, driver_version(), config.device, config.precision)
    yield from check_slurm_gpus(environ, len(facts.get("gpus", [])))
    network = collect_network()
    listens = environ.get("RANK") == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in environ
    is_first_node = is_this_host(network.first_node_address, network.interfaces)
    yield from check_network(network, has_other_hosts(), listens and is_first_node and "MASTER_PORT" in environ)
    yield check_rendezvous(rendezvous.result())
    wanted = {name: _is_cached(name) for name in hub_names(config)} if given else {}
    yield from _folders(config, downloads=not all(wanted.values()))
    yield from _hub(wanted)
    if told := facts.get("errors", {}).get("launcher"):
        yield problem_of(LAUNCH, "ranks", UserError(told[0], where=told[1], remedy=told[2]))
    yield from check_launcher(environ, processes, _why_processes(config))
    if given:
        yield from _configuration(loaded, device, processes)


def _processes_here(to_start: int) -> int:
    """Processes on this machine: those that a launcher has started; without a launcher, ``to_start``."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return int(local) if local.isdigit() and int(local) > 0 else to_start


def _why_processes(config: RunConfig) -> str:
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return f"WORLD_SIZE={os.environ.get('WORLD_SIZE', 'not set')}, from the launcher"
    if config.launch.nproc != "auto":
        return f"launch.nproc={config.launch.nproc}"
    return "launch.nproc=auto: one for each GPU, or one"


def _needed(config: RunConfig) -> dict[str, str]:
    """The extras that this configuration needs, and why."""
    needed = {"deepspeed": "parallel.strategy=deepspeed"} if is_deepspeed(config) else {}
    if config.parallel.fp8 is not None:
        needed["fp8"] = "parallel.fp8"
    if (config.checkpoint.remote or "").startswith(("s3://", "s3a://")):
        needed["object-store"] = "checkpoint.remote"
    return needed | ({"lora": "the section lora"} if config.lora is not None else {})


def _folders(config: RunConfig, downloads: bool) -> Iterator[Finding]:
    yield from check_folder(collect_folder("run.dir", config.run.dir, "set run.dir=ANOTHER_FOLDER"), 5 * GIB)
    if not config.cache_dir.absolute().is_relative_to(Path(config.run.dir).absolute()):
        yield from check_folder(collect_folder("data.cache", config.cache_dir, "set data.cache=ANOTHER_FOLDER"), GIB)
    home = collect_folder("HF_HOME", constants.HF_HOME, "export HF_HOME=ANOTHER_FOLDER")
    yield from check_folder(home, GIB, Level.PROBLEM if downloads else Level.WARNING)  # it may be shared, and read-only
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        fix = Fix("export TMPDIR=A_FOLDER_OF_YOURS")
        yield Finding("Storage", "temporary files", Level.PROBLEM, str(error), fix=fix)
        return
    yield from check_folder(collect_folder("temporary files", temporary, "export TMPDIR=ANOTHER_FOLDER"), GIB)


def hub_names(config: RunConfig) -> list[str]:
    """The model and the tokenizer that the configuration loads from the hub: names that are no folders here."""
    task = config.task
    model, tokenizer = getattr(task, "model", None), getattr(task, "tokenizer", None)
    names = [model] if getattr(task, "from_scratch", None) is None and run_reference(task) is None else []
    names.append(tokenizer)
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and not Path(name).expanduser().is_dir()]


def _hub(wanted: Mapping[str, bool]) -> Iterator[Finding]:
    """Args: wanted: names of the hub, and whether they are in the cache."""
    answers: bool | None = None
    missing = [name for name, cached in wanted.items() if not cached]
    if missing and not is_offline():
        try:
            answers = all(hub_answers(name) for name in missing)
        except UserError as error:
            yield problem_of("Hugging Face Hub", missing[0], error)
            return
    yield from check_hub(os.environ, wanted, answers)


def _is_cached(name: str) -> bool:
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
    except ValueError:  # it cannot be a name of the hub
        return False


def _configuration(loaded: LoadedConfig, device: str, processes: int) -> Iterator[Finding]:
    """The errors by which training would refuse these settings, and the strategy that the run would take."""
    config = loaded.config
    world = os.environ.get("WORLD_SIZE", "")
    ranks = int(world) if world.isdigit() and int(world) > 0 else processes
    wrong = False
    for name, check in (
        ("settings", lambda: check_rules(loaded, RULES + TRAIN_RULES)),
        ("batch and mesh", lambda: check_world(config, ranks)),
        ("DeepSpeed", lambda: check_deepspeed(loaded, ranks)),
    ):
        try:
            check()
        except UserError as error:
            wrong = True
            yield problem_of(CONFIG, name, error)
    if not wrong:
        source = loaded.path.name if loaded.path else "the command line"
        yield Finding(CONFIG, "settings", Level.OK, f"{source}: they combine, on {ranks} process{'es' * (ranks > 1)}")
    yield Finding(CONFIG, "strategy", Level.OK, *strategy(config, ranks))
    backend = ("nccl, and gloo for what is on the host", "CUDA") if device == "cuda" else ("gloo", "on the CPU")
    if ranks > 1:
        yield Finding(CONFIG, "backend", Level.OK, *backend)


def strategy(config: RunConfig, ranks: int) -> tuple[str, str]:
    """The strategy that ``ranks`` processes would take, and why."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in ("pipeline", "context", "tensor", "replicate")}
    composed = "".join(f" × {name} {degree}" for name, degree in degrees.items() if degree > 1)
    if is_deepspeed(config):
        why = "parallel.strategy" if parallel.features.is_deepspeed else "there is a section deepspeed"
        return f"deepspeed, ZeRO stage {zero_stage(config)}{composed}", why
    if parallel.strategy != AUTO:
        return f"{parallel.strategy}{composed}", "parallel.strategy"
    if ranks == 1:
        return f"single{composed}", "auto: one process"
    fits = f"ddp{composed}, or fsdp where the model's state does not fit into a rank's memory"
    return fits, f"auto: {ranks} processes; the first lines of `drawbar train` say which"
