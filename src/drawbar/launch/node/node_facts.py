"""The facts that a node reports in the node check, and the judgement of all nodes' facts."""

import hashlib
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

CLOCK_SECONDS = 5.0
"""Clocks that differ by more are told of: times in logs and files then mislead, but nothing breaks."""
USED_SHARE, FULL_SHARE = 0.05, 0.9
"""Shares of a GPU's memory in use by other processes: from the first on a warning, from the second on an error."""
_PATIENCE = 20
"""Seconds for nvidia-smi, which hangs where the driver does."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this job may use."""

    index: int
    total: int
    """MiB. So is ``used``: the memory that all processes take before this run begins."""
    used: int
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """The facts that one node reports."""

    name: str
    versions: Mapping[str, str]
    config: str
    """Digest of the whole configuration."""
    processes: int
    gpu_count: int
    """That torch sees; 0 where the run does not use them."""
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    trouble: str = ""
    """Why nothing is known of the GPUs."""
    time: float = 0.0
    """Seconds since 1970, when it was said."""

    @staticmethod
    def from_json(values: Mapping) -> "NodeFacts":
        gpus = tuple(Gpu(**{**gpu, "processes": tuple(gpu["processes"])}) for gpu in values["gpus"])
        return NodeFacts(**{**values, "gpus": gpus})


@dataclass
class NodeCheckResult:
    """Result of the node check."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """What is wrong with each bad node, by its name: the job could run with another node in its place."""


def collect_facts(name: str, config: str, processes: int, device: str) -> NodeFacts:
    """Collect the facts that this node reports in the node check.

    Args:
        config: the text of the configuration.
        device: the setting.
    """
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    gpus, driver, trouble = query_gpus(os.environ) if count and torch.version.cuda else ((), "", "")
    versions = {"drawbar": version("drawbar"), "torch": torch.__version__, "Python": platform.python_version()}
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    return NodeFacts(name, versions, digest, processes, count, gpus, driver, trouble)


def query_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str, str]:
    """The GPUs of this job, the driver's version, and why nothing is known of them.

    nvidia-smi is asked, as torch would take memory on every GPU to answer.
    """
    try:
        rows = _query("--query-gpu=index,uuid,memory.total,memory.used,driver_version")
        holders = _query("--query-compute-apps=gpu_uuid,pid")
        chosen = environ.get("CUDA_VISIBLE_DEVICES")
        wanted = None if chosen is None else [word.strip() for word in chosen.split(",")]
        gpus = []
        for index, uuid, total, used, _ in rows:
            if wanted is None or index in wanted or any(word and uuid.startswith(word) for word in wanted):
                pids = tuple(int(pid) for holder, pid in holders if holder == uuid)
                gpus.append(Gpu(int(index), int(total), int(used), pids))
        return tuple(gpus), rows[0][4] if rows else "", ""
    except FileNotFoundError:
        return (), "", ""  # in a container, say; torch will tell what does not work
    except subprocess.TimeoutExpired:
        return (), "", f"nvidia-smi gave no answer in {_PATIENCE} s"
    except subprocess.CalledProcessError as error:
        return (), "", f"nvidia-smi failed: {(error.stdout + error.stderr).strip()[:200]}"
    except ValueError as error:  # nvidia-smi prints [N/A] for a GPU that is cut into parts (MIG)
        return (), "", f"nvidia-smi does not tell: {error}"


def _query(question: str) -> list[list[str]]:
    done = subprocess.run(
        ["nvidia-smi", question, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=_PATIENCE, check=True,
    )  # fmt: skip
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def judge(nodes: Sequence[NodeFacts]) -> NodeCheckResult:
    """Check the facts of all nodes; clocks are checked separately, as that needs the times of arrival."""
    result = NodeCheckResult()
    _judge_versions(nodes, result)
    for node in nodes:
        _judge_gpus(node, max(other.gpu_count for other in nodes), result)
    return result


def _judge_versions(nodes: Sequence[NodeFacts], result: NodeCheckResult) -> None:
    """Compare versions, drivers and configurations."""
    for what in nodes[0].versions:
        told = result.warnings if what == "Python" else result.errors
        if difference := _differing_values(nodes, lambda node: node.versions[what]):  # noqa: B023 - it is called at once
            told.append(f"{what} is not the same on all nodes: {difference}")
    if difference := _differing_values(nodes, lambda node: node.driver):
        result.warnings.append(f"the NVIDIA driver is not the same on all nodes: {difference}")
    if _differing_values(nodes, lambda node: node.config):
        usual = _most_common([node.config for node in nodes])
        odd = [node.name for node in nodes if node.config != usual]
        result.errors.append(
            f"the configuration on {', '.join(odd)} is another one than on the other nodes: "
            "each must read the same files, and have the same environment variables if the files use any"
        )


def _judge_gpus(node: NodeFacts, most: int, result: NodeCheckResult) -> None:
    if node.gpu_count < most:
        result.bad[node.name] = f"torch sees {node.gpu_count} GPUs on {node.name}, and {most} on another node"
        result.errors.append(result.bad[node.name])
    if node.trouble:
        result.warnings.append(f"{node.name}: {node.trouble}")
    for gpu in node.gpus:
        if gpu.used < USED_SHARE * gpu.total:
            continue
        who = f" (processes {', '.join(map(str, gpu.processes))})" if gpu.processes else ""
        what = f"GPU {gpu.index} on {node.name} is in use: {gpu.used:,} of {gpu.total:,} MiB are taken{who}"
        if gpu.used < FULL_SHARE * gpu.total:
            result.warnings.append(what)
        else:
            result.bad[node.name] = what
            result.errors.append(what)


def judge_clocks(nodes: Sequence[NodeFacts], heard: Sequence[float]) -> list[str]:
    """Warnings of clocks that differ. ``heard``: when each answer came, by the first node's clock."""
    warnings = []
    for node, when in zip(nodes, heard, strict=True):
        if abs(node.time - when) > CLOCK_SECONDS:
            ahead = "ahead of" if node.time > when else "behind"
            warnings.append(
                f"the clock of {node.name} is {abs(node.time - when):.0f} s {ahead} that of {nodes[0].name}"
            )
    return warnings


def _differing_values(nodes: Sequence[NodeFacts], value: Callable[[NodeFacts], str]) -> str:
    """``2.13.0 on n1, n3; 2.12.1 on n2``, the usual value first; empty where all are equal."""
    holders: dict[str, list[str]] = {}
    for node in nodes:
        holders.setdefault(value(node), []).append(node.name)
    if len(holders) == 1:
        return ""
    usual_first = sorted(holders.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{held or 'unknown'} on {', '.join(names)}" for held, names in usual_first)


def _most_common(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0]
