"""Slurm's commands: its queue (``squeue``, ``scancel``), its partitions and nodes (``scontrol`` and ``sinfo``, which
need no accounting), and times as it writes them: ``2-12:00:00``, ``12:00:00``, ``30:00`` (minutes and seconds) or
``90`` (minutes). Light, as a job's nodes also import this.

``squeue`` is asked for columns of fixed width: its JSON differs between versions, and other people's text, such as the
names of their jobs, cannot shift a column.
"""

import os
import re
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from drawbar.errors import ExitCode, UserError

COLUMNS = {
    "JobArrayID": 1024,
    "State": 24,
    "exit_code": 12,
    "RestartCnt": 12,
    "StartTime": 24,
    "TimeUsed": 20,
    "TimeLimit": 20,
    "Reason": 128,
    "NodeList": 512,
    "Name": 160,
}
"""Fields of ``squeue --Format``, and their widths; what others may have written comes last."""
_NOT_CONFIGURED = re.compile("Could not establish a configuration source|Unable to process configuration file")
"""The end of what each Slurm command prints if it finds no ``slurm.conf``, or none that names a cluster."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States that a job stays in. All others, such as COMPLETING, lead to one of them, or back into the queue."""
_SECONDS = 60
"""How long Slurm's commands may take; its own timeout is shorter."""
_PATIENCE = 20
"""The same in seconds for what ``slurm_output`` asks. If Slurm's controller is down, its own commands wait for
minutes."""


@dataclass(frozen=True)
class QueueEntry:
    """A job as Slurm knows it; it forgets those that ended some minutes ago (MinJobAge)."""

    number: str
    state: str
    status: int
    """As ``wait`` returns it: the exit code in the high byte, the signal below."""
    restarts: int
    start: str
    """When the job started; for a job that waits, when it may start, or ``N/A``."""
    used: str
    limit: str
    reason: str
    nodes: str
    name: str

    @property
    def is_active(self) -> bool:
        return self.state not in ENDED

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        return self.status >> 8 or (128 + (self.status & 0x7F) if self.status & 0x7F else 0)


def read_queue(numbers: Iterable[str]) -> dict[str, QueueEntry]:
    """What Slurm knows of jobs, elements of arrays one by one; those that it has forgotten are not there.

    Raises:
        UserError: there is no Slurm, or it does not answer.
    """
    jobs = sorted({number.partition("_")[0] for number in numbers}, key=int)
    if not jobs:
        return {}
    layout = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
    # an unknown number is an error where it is the only one
    done = run("squeue", "--noheader", "--array", "--states=all", f"--Format={layout}", f"--jobs={','.join(jobs)}")
    if done.returncode and "Invalid job id" in done.stderr:
        return {}
    _check(done)
    entries = (parse(line) for line in done.stdout.splitlines() if line.strip())
    return {number: replace(entry, number=number) for entry in entries for number in expand(entry.number)}


def parse(line: str) -> QueueEntry:
    """One line of ``squeue`` with ``COLUMNS``."""
    cells, begin = [], 0
    for width in COLUMNS.values():
        cells.append(line[begin : begin + width].strip())
        begin += width
    number, state, status, restarts, start, used, limit, reason, nodes, name = cells
    return QueueEntry(number, state, int(status), int(restarts), start, used, limit, reason, nodes, name)


def expand(number: str) -> list[str]:
    """``7_[0-2,5]`` → ``7_0``, ``7_1``, ``7_2``, ``7_5``: elements that ``squeue --array`` may list together."""
    array, bracket, tasks = number.partition("_[")
    if not bracket:
        return [number]
    found = []
    for first, last, step in re.findall(r"([0-9]+)(?:-([0-9]+))?(?::([0-9]+))?", tasks.partition("%")[0]):
        found += [f"{array}_{task}" for task in range(int(first), int(last or first) + 1, int(step or 1))]
    return found


def lost_nodes(nodes: str) -> list[str]:
    """Which of the nodes of a job do not answer."""
    done = run("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T")
    rows = [line.split() for line in done.stdout.splitlines()]
    return sorted({name for name, state, *_ in rows if state.startswith("down") or state.endswith("*")})


def scancel(numbers: Collection[str], *options: str) -> None:
    """``scancel``, of none or several. It is not an error if a job has already ended.

    Raises:
        UserError: Slurm refuses.
    """
    if not numbers:
        return
    done = run("scancel", *options, *numbers)
    trouble = [line for line in done.stderr.splitlines() if "already completing or completed" not in line.lower()]
    if done.returncode and trouble:
        _check(done)


def run(*command: str, seconds: float = _SECONDS) -> "subprocess.CompletedProcess[str]":
    """Run a Slurm command.

    Raises:
        UserError: it is not installed, or does not end.
    """
    try:
        return subprocess.run(
            command,
            env={**os.environ, "SLURM_BITSTR_LEN": "0"},  # or squeue would cut long lists of elements short
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except FileNotFoundError as error:
        raise UserError(
            f"there is no Slurm here: the command {command[0]} is not installed",
            remedy="ask on a login node of the cluster; `drawbar status FOLDER` reads what the run itself has written",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"Slurm does not answer: {command[0]} took longer than {seconds:.0f}s",
            remedy="try again; `scontrol ping` says whether the controller is up",
            exit_code=ExitCode.FAILED,
        ) from error


def check_configured(said: str) -> None:
    """Raise the error of a machine without a configuration of Slurm, if that is why a command failed.

    Args:
        said: what the command has written on stderr.

    Raises:
        UserError: this machine belongs to no cluster, though Slurm's commands are installed.
    """
    if _NOT_CONFIGURED.search(said):
        raise UserError(
            "Slurm is not configured on this machine: it has no slurm.conf that can be read, and finds no controller",
            remedy="work on a login node of the cluster; there, `sinfo` lists partitions",
        )


def _check(done: "subprocess.CompletedProcess[str]") -> None:
    if done.returncode:
        check_configured(done.stderr)
        said = "; ".join(line for line in done.stderr.strip().splitlines() if line) or "it does not say why"
        raise UserError(
            f"{done.args[0]} failed: {said}",
            remedy="try again; `scontrol ping` says whether the controller is up",
            exit_code=ExitCode.FAILED,
        )


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
    """All partitions; None if no Slurm answers."""
    text = slurm_output("scontrol", "show", "partition", "--oneliner")
    return None if text is None else [_partition(line) for line in text.splitlines() if line.strip()]


def read_nodes(partition: str) -> list[SlurmNode] | None:
    """The nodes of a partition; None if no Slurm answers."""
    text = slurm_output("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%c|%G|%T")
    return None if text is None else [_node(line) for line in text.splitlines() if line.strip()]


def slurm_output(*command: str) -> str | None:
    """What one of Slurm's commands prints; None if it is not installed, fails, or does not answer in time."""
    try:
        done = run(*command, seconds=_PATIENCE)
    except (OSError, UserError):
        return None
    return None if done.returncode else done.stdout


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


_SIXTY = "[0-5]?[0-9]"
_TIME = re.compile(rf"[0-9]+-(2[0-3]|[01]?[0-9])(:{_SIXTY}){{0,2}}|[0-9]+(:{_SIXTY}){{0,2}}")


def check_time(text: str) -> str:
    """The text. Raises ValueError if it is not a time, or one such as 99:99:99, which Slurm accepts and nobody
    means."""
    if not _TIME.fullmatch(text):
        raise ValueError(
            "expected a time such as 12:00:00 (hours, minutes, seconds), 2-12 (days, hours) or 90 (minutes), "
            f"with less than 60 minutes in an hour, and less than 24 hours in a day, got {text!r}"
        )
    return text


def parse_time(text: str) -> int | None:
    """A time in seconds; None for ``UNLIMITED`` and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *clock = match.groups()
    parts = [int(part) for part in clock if part is not None]
    if days is not None:
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:  # minutes, minutes:seconds
        parts = [0, *parts, *[0] * (2 - len(parts))]
    return ((int(days or 0) * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]


def write_time(seconds: int) -> str:
    """``2-12:00:00``, as Slurm writes it."""
    days, rest = divmod(seconds, 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
