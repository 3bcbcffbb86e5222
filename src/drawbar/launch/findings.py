"""Problems of GPUs and nodes, with remedies: facts, and pure functions from facts to findings; and the record of bad
nodes, which is read when the job is requeued.

The node check of a launch uses the findings on nodes that differ. Does not import torch.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from drawbar.errors import UserError
from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import LAUNCH_FOLDER

CLOCK_SECONDS = 5.0
"""Larger clock differences are reported: times in logs and files then mislead, but nothing breaks."""
USED_SHARE, FULL_SHARE = 0.05, 0.9
"""Shares of a GPU's memory that others use: from the first on, a warning; from the second on, a problem."""
_NVIDIA_SMI_SECONDS = 20
"""nvidia-smi hangs if the driver does."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run may be slow, or fail later."""
    PROBLEM = "problem"
    """A run fails."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    where: str
    """The setting, variable, folder, device or node; empty if no single one is at fault."""
    level: Level
    what: str
    """What was found; for a warning or a problem, what is wrong."""
    remedy: str = ""
    """The remedy: a command, or words."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Finding":
        return Finding(**{**values, "level": Level(values["level"])})

    @staticmethod
    def from_error(error: UserError, where: str) -> "Finding":
        """The problem that a run would be refused with this error. Args: where: used if the error has none."""
        return problem(error.where or where, error.what, error.remedy or "see docs/configuration.md")

    def error(self) -> UserError:
        return UserError(self.what, where=self.where, remedy=self.remedy)


def problem(where: str, what: str, remedy: str = "") -> Finding:
    return Finding(where, Level.PROBLEM, what, remedy)


@dataclass(frozen=True)
class Gpu:
    """A GPU that this job may use."""

    index: int
    total: int
    """In MiB, as is ``used``: the memory that all processes take before this run begins."""
    used: int
    processes: str = ""
    """The ids of the processes that use it: ``4711, 4712``."""


@dataclass(frozen=True)
class Gpus:
    """All GPUs that this job may use."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    """The version of the driver; empty if there is none."""
    trouble: str = ""
    """Why nothing is known about them."""


def look_at_gpus(environ: Mapping[str, str]) -> Gpus:
    """The GPUs of this job, from nvidia-smi, as torch would take memory on every GPU to answer."""
    try:
        rows = _query("--query-gpu=index,uuid,memory.total,memory.used,driver_version")
        holders = _query("--query-compute-apps=gpu_uuid,pid")
        chosen = environ.get("CUDA_VISIBLE_DEVICES")
        names = None if chosen is None else tuple(filter(None, map(str.strip, chosen.split(","))))
        gpus = []
        for index, uuid, total, used, _ in rows:
            is_ours = names is None or index in names or uuid.startswith(names)
            if is_ours and used.isdigit():  # [N/A] for a GPU that is cut into parts (MIG)
                processes = ", ".join(pid for holder, pid in holders if holder == uuid)
                gpus.append(Gpu(int(index), int(total), int(used), processes))
        return Gpus(tuple(gpus), rows[0][4] if rows else "")
    except FileNotFoundError:
        return Gpus()  # for example in a container; torch will report what does not work
    except subprocess.TimeoutExpired:
        return Gpus(trouble=f"nvidia-smi gave no answer in {_NVIDIA_SMI_SECONDS} s")
    except subprocess.CalledProcessError as error:
        return Gpus(trouble=f"nvidia-smi failed: {(error.stdout + error.stderr).strip()[:200]}")


def _query(question: str) -> list[list[str]]:
    done = subprocess.run(
        ["nvidia-smi", question, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True,
    )  # fmt: skip
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


@dataclass(frozen=True)
class NodeFacts:
    """What a node of a job reports about itself in the node check."""

    name: str
    versions: Mapping[str, str]
    config: str
    """Digest of the whole configuration."""
    gpu_count: int
    """Number of GPUs that torch sees; 0 if the run does not use them."""
    gpus: Gpus = Gpus()
    time: float = 0.0
    """When this was reported, in seconds since 1970."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "NodeFacts":
        gpus = tuple(Gpu(**gpu) for gpu in values["gpus"]["gpus"])
        return NodeFacts(**{**values, "gpus": Gpus(**{**values["gpus"], "gpus": gpus})})


def of_gpus(gpus: Gpus, node: str = "") -> Iterator[Finding]:
    """Findings on GPUs. Args: node: the node of the GPUs, if the findings are read on another one."""
    on = f" on {node}" if node else ""
    if gpus.trouble:
        what = f"{node}: {gpus.trouble}" if node else gpus.trouble
        remedy = "nvidia-smi must work; a driver just updated needs a reboot"
        yield Finding("NVIDIA driver", Level.WARNING, what, remedy)
    for gpu in gpus.gpus:
        if gpu.used < USED_SHARE * gpu.total:
            continue
        who = f" (processes {gpu.processes})" if gpu.processes else ""
        what = f"GPU {gpu.index}{on} is in use: {gpu.used:,} of {gpu.total:,} MiB are taken{who}"
        level = Level.WARNING if gpu.used < FULL_SHARE * gpu.total else Level.PROBLEM
        remedy = "end the processes that use it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield Finding(node or f"GPU {gpu.index}", level, what, remedy)


def of_nodes(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """How the nodes of a job differ, and what is wrong with their GPUs. ``where`` is a node that another one could
    replace."""
    same = "install the same versions on all nodes (cluster.python, cluster.setup)"
    for what in nodes[0].versions:
        holders = _holders({node.name: node.versions[what] for node in nodes})
        if len(holders) > 1:
            told = "; ".join(f"{held or 'unknown'} on {', '.join(names)}" for held, names in holders.items())
            level = Level.PROBLEM if what in ("drawbar", "torch") else Level.WARNING
            yield Finding("", level, f"{what} is not the same on all nodes: {told}", same)
    _, *odd = _holders({node.name: node.config for node in nodes}).values()
    if odd:
        what = f"the configuration on {', '.join(chain(*odd))} differs from that on the other nodes"
        files = "give all nodes the same files, and the same environment variables if the files use any"
        yield problem("", what, files)
    most = max(node.gpu_count for node in nodes)
    for node in nodes:
        if node.gpu_count < most:
            what = f"torch sees {node.gpu_count} GPUs on {node.name}, and {most} on another node"
            yield problem(node.name, what)
        yield from of_gpus(node.gpus, node.name)


def of_clocks(nodes: Sequence[NodeFacts], heard: Sequence[float]) -> Iterator[Finding]:
    """Clocks that differ. ``heard``: when each answer arrived, by the first node's clock."""
    for node, when in zip(nodes, heard, strict=True):
        if abs(node.time - when) > CLOCK_SECONDS:
            difference = f"{abs(node.time - when):.0f} s {'ahead of' if node.time > when else 'behind'}"
            what = f"the clock of {node.name} is {difference} that of {nodes[0].name}"
            yield Finding(node.name, Level.WARNING, what, "synchronize it with NTP")


def _holders(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Value → the nodes that have it, the most common value first. Args: values: by node."""
    holders: dict[str, list[str]] = {}
    for node, value in values.items():
        holders.setdefault(value, []).append(node)
    return dict(sorted(holders.items(), key=lambda item: -len(item[1])))


BAD_NODES_FILE = "bad-nodes.json"
"""In ``<run>/launch``: a list with one entry for each time that a job reported bad nodes."""
NODE_IS_LOST = "is lost"
"""Text in the reason for a node that was lost during the run: Slurm will soon notice that, too."""


def restart_number(environ: Mapping[str, str] = os.environ) -> int:
    """How many times the scheduler has started this job before."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def record_bad_nodes(run_dir: Path, launch_id: str, reasons: Mapping[str, str]) -> None:
    """Add an entry to the record of bad nodes; print a warning if that fails.

    Args:
        launch_id: see ``Rendezvous``.
        reasons: what is wrong with each node, by its name.
    """
    path = run_dir / LAUNCH_FOLDER / BAD_NODES_FILE
    entry = {"job": launch_id, "attempt": restart_number(), "time": round(time.time(), 3), "nodes": dict(reasons)}
    try:
        text = json.dumps([*_entries(run_dir), entry], indent=2, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode())
    except OSError as error:
        print(f"warning: cannot record the bad nodes: {error}", file=sys.stderr, flush=True)


def bad_nodes(run_dir: Path, launch_id: str, restart: int | None = None) -> dict[str, str]:
    """What is wrong with each node that the job has reported.

    Args:
        restart: only entries from the job's start with this ``restart_number`` (0: the first); None for all.
    """
    found: dict[str, str] = {}
    for entry in _entries(run_dir):
        if entry["job"] == launch_id and restart in (None, entry["attempt"]):
            found.update(entry["nodes"])
    return found


def _entries(run_dir: Path) -> list[dict]:
    path = run_dir / LAUNCH_FOLDER / BAD_NODES_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
