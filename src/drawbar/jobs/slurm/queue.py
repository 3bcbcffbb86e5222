"""Queries and changes Slurm's queue: ``squeue`` and ``scancel``.

``squeue`` is asked for columns of fixed width: its JSON differs between versions, and words of other people, such as
the names of their jobs, cannot shift a column.
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
"""What each of Slurm's commands says last where it finds no ``slurm.conf``, or none that names a cluster."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States that a job stays in. All others, such as COMPLETING, lead to one of them, or back into the queue."""
_SECONDS = 60
"""How long Slurm's commands may take; its own timeout is shorter."""


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
    """``scancel``, of none or several. That a job has ended meanwhile is no error.

    Raises:
        UserError: Slurm refuses.
    """
    if not numbers:
        return
    done = run("scancel", *options, *numbers)
    trouble = [line for line in done.stderr.splitlines() if "already completing or completed" not in line.lower()]
    if done.returncode and trouble:
        _check(done)


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    """One of Slurm's commands.

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
            timeout=_SECONDS,
        )
    except FileNotFoundError as error:
        raise UserError(
            f"there is no Slurm here: the command {command[0]} is not installed",
            remedy="ask on a login node of the cluster; `drawbar status FOLDER` reads what the run itself has written",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"Slurm does not answer: {command[0]} took longer than {_SECONDS}s",
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
