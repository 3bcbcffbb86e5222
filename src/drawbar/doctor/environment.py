"""Checks environment variables of launchers, schedulers and the user."""

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from drawbar.doctor.finding import Finding, Fix, Level

LAUNCH, HUB = "Launch", "Hugging Face Hub"
WHERE = "where there is a network, with the same HF_HOME"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
_SCHEMES = ("http", "https", "socks4", "socks5", "socks5h")
_TRUE = {"1", "on", "yes", "true"}


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Who started this process."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_SIZE" in environ:
        return "DeepSpeed's launcher"
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return "a launcher that set RANK or WORLD_SIZE"
    if "SLURM_JOB_ID" in environ:
        return "srun, in a Slurm job" if "SLURM_STEP_ID" in environ else "a Slurm job"
    return ""


def check_launcher(environ: Mapping[str, str], processes: int, why: str) -> Iterator[Finding]:
    """What started this process, and whether what it set is consistent. (``RankInfo`` checks that RANK is valid.)

    Args:
        processes: on this machine.
        why: the reason for that number.
    """
    started = launcher(environ)
    what = f"started by {started}" if started else "none: `drawbar train` starts what it needs"
    yield Finding(LAUNCH, "launcher", Level.OK, what)
    yield Finding(LAUNCH, "processes", Level.OK, f"{processes} on this machine", why)
    yield from _rank_variables(environ)
    if "SLURM_JOB_ID" in environ:
        yield from _slurm(environ)


def _rank_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the variables of ranks agree with one another, whoever has set them."""
    world, local = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    local_rank, nodes = _number(environ, "LOCAL_RANK"), _number(environ, "SLURM_JOB_NUM_NODES")
    fix = Fix(f"unset {' '.join(_RANK_VARIABLES)}", "or start every node by torchrun --nnodes N --nproc-per-node M")
    if world and local and world % local:
        what = f"WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={local}"
        yield Finding(LAUNCH, "WORLD_SIZE", Level.PROBLEM, what, "each machine must have equally many processes", fix)
    elif world and local and nodes and world != nodes * local:
        what = f"WORLD_SIZE={world}, but Slurm gave {nodes} nodes, and {local} processes are on this one"
        yield Finding(LAUNCH, "WORLD_SIZE", Level.WARNING, what, "some nodes would be left out", _submit(nodes))
    if local_rank is not None and local and local_rank >= local:
        what = f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local}"
        yield Finding(LAUNCH, "LOCAL_RANK", Level.PROBLEM, what, fix=fix)
    port = environ.get("MASTER_PORT")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        what = f"MASTER_PORT={port} is no port"
        yield Finding(LAUNCH, "MASTER_PORT", Level.PROBLEM, what, fix=Fix("export MASTER_PORT=29500", "1 to 65535"))


def _slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    nodes, names = environ.get("SLURM_JOB_NUM_NODES", "1"), environ.get("SLURM_JOB_NODELIST", "?")
    partition = environ.get("SLURM_JOB_PARTITION")
    where = f" in partition {partition}" if partition else ""
    yield Finding(LAUNCH, "Slurm", Level.OK, f"job {environ['SLURM_JOB_ID']}{where}: {nodes} × {names}")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") or 1
    if tasks > 1 and "RANK" not in environ:
        what = f"srun started {tasks} tasks, and none of them has a RANK"
        fix = _submit(_number(environ, "SLURM_JOB_NUM_NODES") or 1)
        yield Finding(LAUNCH, "srun", Level.PROBLEM, what, "each would train the whole run alone", fix)


def _submit(nodes: int) -> Fix:
    """What starts a run on all nodes of a job as it should be."""
    command = f"drawbar submit config.yaml --to slurm --nodes {nodes}"
    return Fix(command, "a job with one task a node, which starts that node's processes")


def check_slurm_gpus(environ: Mapping[str, str], gpus: int) -> Iterator[Finding]:
    """Whether the GPUs that Slurm gave are those that torch sees."""
    given = _number(environ, "SLURM_GPUS_ON_NODE")
    one_each = gpus == 1 and (_number(environ, "SLURM_STEP_NUM_TASKS") or 1) > 1  # --gpus-per-task
    if given is not None and given != gpus and not one_each:
        what = f"Slurm gave {given} on this node, and torch sees {gpus}"
        fix = Fix("nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES", "srun needs the same --gpus-per-node as the job")
        yield Finding("Device", "Slurm's GPUs", Level.WARNING, what, fix=fix)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def is_offline(environ: Mapping[str, str] = os.environ) -> str:
    """The variable that sets the offline mode, or an empty text."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(name, "").lower() in _TRUE:
            return name
    return ""


def check_hub(environ: Mapping[str, str], wanted: Mapping[str, bool], answers: bool | None) -> Iterator[Finding]:
    """Args:
    wanted: hub names of the configuration, and whether they are in the cache.
    answers: whether the hub was reached; None where it was not asked.
    """
    yield from _proxies(environ)
    variable = is_offline(environ)
    missing = [name for name, cached in wanted.items() if not cached]
    for name in wanted:
        if name not in missing:
            yield Finding(HUB, name, Level.OK, "in the cache")
    if variable:
        yield Finding(HUB, "mode", Level.NOTE, f"offline: {variable}={environ[variable]}", "only the cache is read")
    elif answers is not None:
        yield Finding(HUB, "mode", Level.OK, "online: it answers" if answers else "online, but it does not answer")
    else:
        yield Finding(HUB, "mode", Level.OK, "online", "not asked: nothing of it is needed")
    for name in missing:
        if variable:
            fix = Fix(f"{variable}=0 hf download {name}", f"{WHERE}; or set task.model to a folder")
            what = f"not in the cache, and {variable}={environ[variable]}"
            yield Finding(HUB, name, Level.PROBLEM, what, "a run could not load it", fix)
        elif answers:
            yield Finding(HUB, name, Level.OK, "on the hub; the run downloads it")
        else:
            what = "not in the cache, and the hub does not answer"
            fix = Fix(f"hf download {name}", f"{WHERE}; behind a proxy: export HTTPS_PROXY=http://HOST:PORT")
            yield Finding(HUB, name, Level.PROBLEM, what, "a run could not load it", fix)
    token = any(environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    if token:
        yield Finding(HUB, "token", Level.OK, "set in the environment", "its value is never shown")


def _proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    told = set()
    for name in _PROXIES:
        value = environ.get(name, "")
        if not value or (name.lower(), value) in told:
            continue
        told.add((name.lower(), value))
        try:
            parts = urlsplit(value)
            shown = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
            is_right = parts.scheme in _SCHEMES and bool(parts.hostname)
        except ValueError:
            is_right = False
        if is_right:
            secret = ", with a password that is not shown" if parts.password else ""
            yield Finding(HUB, name, Level.NOTE, f"{shown}{secret}", "downloads go through it, training does not")
        else:
            what = f"{name} is no address of a proxy"
            fix = Fix(f"export {name}=http://HOST:PORT", f"or: unset {name}")
            yield Finding(HUB, name, Level.WARNING, what, "downloads would fail", fix)
