"""Queries Slurm for partitions and nodes, by ``scontrol`` and ``sinfo``, which need no accounting."""

import re
import subprocess
from dataclasses import dataclass

from drawbar.jobs.slurm_time import parse_time

_PATIENCE = 20
"""Seconds. If Slurm's controller is down, Slurm's own commands wait for minutes."""
_AWAY = ("down", "drain", "fail", "maint", "no_respond", "unk", "future", "planned_maint")


@dataclass(frozen=True)
class Partition:
    name: str
    is_default: bool
    state: str
    """``UP``, or why no job starts: ``DOWN``, ``DRAIN`` (takes no new ones), ``INACTIVE``."""
    longest: int | None
    """Seconds that a job may have; None for no limit."""
    most_nodes: int | None
    most_cpus: int | None
    """On each node."""
    accounts: tuple[str, ...] | None
    """Who may use it; None for all."""
    refused_accounts: tuple[str, ...]


@dataclass(frozen=True)
class SlurmNode:
    name: str
    cpus: int
    resources: str
    """Its generic resources, as Slurm writes them: ``gpu:a100:4,nvme:1``."""
    state: str

    @property
    def gpus(self) -> int:
        return count_gpus(self.resources)

    @property
    def is_away(self) -> bool:
        """Whether the node is down, drained or in maintenance, so that no job can start there even if it is idle."""
        return self.state.endswith("*") or self.state.lower().startswith(_AWAY)


def read_partitions() -> list[Partition] | None:
    """All partitions; None where no Slurm answers."""
    text = slurm_output("scontrol", "show", "partition", "--oneliner")
    return None if text is None else [_partition(line) for line in text.splitlines() if line.strip()]


def read_nodes(partition: str) -> list[SlurmNode] | None:
    """The nodes of a partition; None where no Slurm answers."""
    text = slurm_output("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%c|%G|%T")
    return None if text is None else [_node(line) for line in text.splitlines() if line.strip()]


def slurm_output(*command: str) -> str | None:
    """What one of Slurm's commands prints; None where it is not there, fails, or does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def facts(line: str) -> dict[str, str]:
    """``Name=value …``, as ``--oneliner`` prints it: a value goes to the next word that has a ``=``."""
    return {name: value.strip() for name, value in re.findall(r"(\S+?)=(.*?)(?=\s+\S+?=|\s*$)", line)}


def _partition(line: str) -> Partition:
    said = facts(line)
    accounts = said.get("AllowAccounts", "ALL")
    return Partition(
        name=said["PartitionName"],
        is_default=said.get("Default") == "YES",
        state=said.get("State", "UP"),
        longest=parse_time(said.get("MaxTime", "UNLIMITED")),
        most_nodes=_number(said.get("MaxNodes", "UNLIMITED")),
        most_cpus=_number(said.get("MaxCPUsPerNode", "UNLIMITED")),
        accounts=None if accounts.upper() == "ALL" else tuple(accounts.split(",")),
        refused_accounts=tuple(filter(None, said.get("DenyAccounts", "").split(","))),
    )


def _node(line: str) -> SlurmNode:
    name, cpus, resources, state = line.split("|")
    return SlurmNode(name, int(cpus.rstrip("+")), resources, state)


def count_gpus(resources: str, kind: str | None = None) -> int:
    """``gpu:a100:4(S:0-1),gpu:2,nvme:1`` → 6; of the type ``a100``, 4"""
    found = re.findall(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)", re.sub(r"\([^)]*\)", "", resources))
    return sum(int(count) for its_kind, count in found if kind in (None, its_kind))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
