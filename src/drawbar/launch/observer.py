"""Watches the ranks of this launcher from outside, and ends one that is stuck, after noting where.

A rank that waits for others is not at fault. Which ranks wait is told by their pulses, and by their stacks: the
innermost call of a rank that waits in a collective is in torch or drawbar.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from drawbar.config.schema.run_config import LimitsSection
from drawbar.distributed.pulse import DUMP_SIGNAL, Kind, Pulse, limit_of, stacks_beside
from drawbar.errors import ExitCode, UserError
from drawbar.launch.process_tree import signal_main_thread, state_and_parent
from drawbar.launch.stacks import Frame, place, thread_stacks

_PERIOD = 0.5
_DUMP_SECONDS = 2.0
"""The longest time that ranks get to write their stacks."""
_OTHER_NODES_SECONDS = 10.0
"""How long to wait for another node to name a rank of its own before naming one that may only wait for that."""
_TIMES_LONGEST = 10
"""A rank may take this many times as long as the longest activity of that kind so far."""
_VERDICT = "drawbar/verdict"
QUIET_CODES = (ExitCode.REQUEUE, ExitCode.INTERRUPTED)
"""Exit codes of ranks that have saved after a signal."""


@dataclass
class WatchedRank:
    """A rank, seen from its launcher."""

    rank: int
    pid: int
    file: Path
    errors: Path
    """What it leaves if it fails: see ``report_failure``."""
    pulse: Pulse = field(default_factory=Pulse)
    seconds: float = 0.0
    """Time since its pulse last changed."""
    end: str = ""
    """How it ended; empty while it runs."""
    stacks: list[list[Frame]] = field(default_factory=list)
    """Of its threads, the main one first, once they have been asked for or the rank has crashed."""

    def look(self, seconds: float) -> tuple[Kind, float] | None:
        """Read the pulse, some seconds after the last time. Returns which activity has ended, and how long it took."""
        self.seconds += seconds
        read = Pulse.read(self.file)
        if read is None or read == self.pulse:
            return None
        ended = self.pulse.kind, self.seconds
        self.pulse, self.seconds = read, 0.0
        return ended

    @property
    def runs(self) -> bool:
        return not self.end

    def exit_code(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs. It is not reaped."""
        with suppress(ChildProcessError):
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return None

    @property
    def gave_up(self) -> bool:
        """Whether it failed because it had waited for another rank in vain."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            return bool(json.loads(self.errors.read_bytes())["message"]["extraInfo"]["lost_peer"])
        return False

    @property
    def state(self) -> str:
        """The letter of its state in ``/proc``; empty if that is unknown."""
        with suppress(OSError):
            return state_and_parent(self.pid)[0]
        return ""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def is_at_fault(self) -> bool:
        """Whether it cannot be waiting for another rank."""
        inside_other_code = bool(self.stacks and self.stacks[0]) and not self.stacks[0][0].may_wait
        return inside_other_code or self.is_stopped or self.state == "D"

    def send(self, number: int, send: Callable[[int, int], object] = os.kill) -> None:
        """Send a signal to it, unless it has been reaped: its process id may be another's then."""
        with suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            send(self.pid, number)

    def kill(self) -> None:
        """Kill it and what it has started."""
        self.end = "ended by the launcher"
        self.send(signal.SIGKILL, os.killpg)

    def dumped(self) -> str:
        """All that ``faulthandler`` has written for it."""
        with suppress(OSError):
            return stacks_beside(self.file).read_text(errors="replace")
        return ""


def dump_stacks(ranks: Sequence[WatchedRank]) -> None:
    """Let these ranks write their stacks; a stopped one does so when it continues."""
    if DUMP_SIGNAL is not None:
        for rank in ranks:
            if Pulse.read(rank.file) is not None:  # else it may not know the signal
                rank.send(DUMP_SIGNAL, signal_main_thread)
    read_stacks(ranks)


def read_stacks(ranks: Sequence[WatchedRank]) -> None:
    """Read the stacks that these ranks are writing, unless they end instead."""
    end = time.monotonic() + _DUMP_SECONDS
    before: list[str] = []
    while time.monotonic() < end:
        texts = [rank.dumped() for rank in ranks if rank.exit_code() is None]
        if texts == before and all(map(thread_stacks, texts)):
            break
        before = texts
        time.sleep(0.1)
    for rank in ranks:
        rank.stacks = thread_stacks(rank.dumped())


class Observer:
    """Watches ranks in a thread.

    Args:
        timeout: ``launch.timeout``: how long a rank waits in a collective before it fails.
        host: name of this node in messages; empty if it is the only one.
    """

    def __init__(self, limits: LimitsSection, timeout: float, host: str = "") -> None:
        self.ranks: list[WatchedRank] = []
        self.verdict: UserError | None = None
        """Which rank was stuck, and where."""
        self.guilty: WatchedRank | None = None
        self.found_stuck = False
        """Whether the verdict is that a rank was stuck."""
        """That rank, if it is one of this launcher's."""
        self._limits, self._timeout, self._host = limits, timeout, host
        self._longest: dict[Kind, float] = {}
        self._unclear = 0.0
        """How long this launcher has waited for a verdict of another node."""
        self._store: dist.TCPStore | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, rank: int, pid: int, file: Path, errors: Path) -> WatchedRank:
        """Watch another rank."""
        self.ranks.append(WatchedRank(rank, pid, file, errors))
        return self.ranks[-1]

    def share(self, host: str, port: int) -> None:
        """Share verdicts with the launchers of other nodes, through torch's store."""
        with suppress(dist.DistError, RuntimeError):
            self._store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=10))

    def start(self) -> None:
        threading.Thread(target=self._run, name="observer", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(_PERIOD):
            now = time.monotonic()
            for rank in self.ranks:
                if rank.runs and (code := rank.exit_code()) is not None:
                    self.note_end(rank, code)
            with self._lock:
                self.look(min(now - last, 2 * _PERIOD))  # if this process was suspended, so were the ranks
            last = now

    def look(self, seconds: float) -> None:
        """Read all pulses, some seconds after the last time, and end a rank that is stuck."""
        ended = [end for rank in self.ranks if (end := rank.look(seconds)) is not None]
        for kind, took in ended:
            # if another rank is still silent, this one may only have waited for it
            if all(rank.seconds < took / 2 for rank in self.ranks if rank.runs):
                self._longest[kind] = max(took, self._longest.get(kind, 0.0))
        over = [rank for rank in self.ranks if rank.runs and rank.seconds > self._allowed(rank)]
        if self.verdict is not None:
            for rank in over:  # the run has failed already
                rank.kill()
        elif over:
            if not self._unclear:
                dump_stacks([rank for rank in self.ranks if rank.runs])
            self._unclear += seconds
            self._judge(min(map(self._allowed, over)) / 2, self._unclear > _OTHER_NODES_SECONDS)
        else:
            self._unclear = 0.0

    def _allowed(self, rank: WatchedRank) -> float:
        """The seconds that this rank may go without progress: what is stopped does not wait, whatever it last said."""
        limit = self.limit(rank.pulse.kind)
        is_waiting = rank.pulse.kind is Kind.WAITING
        return self._timeout if is_waiting and rank.seconds > self._timeout and rank.is_stopped else limit

    def limit(self, kind: Kind) -> float:
        """The seconds that a rank may go without progress."""
        if kind is Kind.WAITING:
            return float("inf")
        return max(limit_of(kind, self._limits, self._timeout), _TIMES_LONGEST * self._longest.get(kind, 0.0))

    def note_end(self, rank: WatchedRank, code: int) -> None:
        """Note how a rank ended. If it gave up waiting for another one, find out for which."""
        with self._lock:
            if not rank.runs:
                return
            is_first = all(other.runs for other in self.ranks)
            rank.look(0.0)
            rank.end = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            rank.stacks = thread_stacks(rank.dumped())
            if is_first and self.verdict is None and code not in (ExitCode.DONE, *QUIET_CODES):
                dump_stacks([other for other in self.ranks if other.runs])
                # NCCL's watchdog aborts a rank that has waited for another one for too long
                if code == -signal.SIGABRT or rank.gave_up:
                    # before the first step, any rank may be waiting to meet one of another node
                    self._judge(self._timeout / 2, last_chance=rank.pulse.step > 0)

    def _judge(self, seconds: float, last_chance: bool) -> None:
        """Name and end the rank that is at fault, of those without progress for some seconds."""
        silent = [rank for rank in self.ranks if rank.runs and rank.seconds >= seconds]
        suspects = [rank for rank in silent if rank.pulse.kind is not Kind.WAITING or rank.is_stopped]
        suspects.sort(key=lambda rank: (not rank.is_at_fault, -rank.seconds))
        if told := self.told_by_another_node(wait=last_chance):
            self.verdict = told
        elif suspects and (suspects[0].is_at_fault or self._store is None or last_chance):
            self._condemn(suspects[0])

    def told_by_another_node(self, wait: bool) -> UserError | None:
        """The verdict of the launcher of another node, after waiting some seconds for it; None if there is none."""
        with suppress(dist.DistError, RuntimeError):
            if self._store is None:
                return None
            if wait:
                self._store.wait([_VERDICT], timedelta(seconds=_OTHER_NODES_SECONDS))
            if self._store.check([_VERDICT]):
                what, where, remedy = json.loads(self._store.get(_VERDICT))
                return UserError(what, where=where, remedy=remedy, exit_code=ExitCode.FAILED)
        return None

    def _condemn(self, guilty: WatchedRank) -> None:
        self.found_stuck = True
        how, remedy = f"has made no progress for {guilty.seconds:.0f} s", self._remedy(guilty)
        if guilty.is_stopped:
            guilty.send(signal.SIGCONT)  # it then writes its stacks, before anything else
            read_stacks([guilty])
            how = f"was stopped, as by SIGSTOP, and {how}"
            remedy = "find out what stops it, such as a debugger or the scheduler; the same command resumes"
        self.announce(guilty.rank, f"{self.name(guilty.rank)} {how}", remedy)
        guilty.kill()

    def announce(self, rank: int, what: str, remedy: str | None = None) -> UserError:
        """Make it the verdict that a rank of this launcher is at fault, and tell the other nodes. Returns it."""
        self.guilty = next((watched for watched in self.ranks if watched.rank == rank), None)
        line = None if self.guilty is None else place(self.guilty.stacks)
        where = None if line is None else str(line)
        self.verdict = UserError(what, where=where, remedy=remedy, exit_code=ExitCode.FAILED)
        if self._store is not None:
            with suppress(dist.DistError, RuntimeError):
                self._store.compare_set(_VERDICT, "", json.dumps([what, where, remedy]))
        return self.verdict

    def name(self, rank: int) -> str:
        """``rank 1 on node-b (step 5, forward)``"""
        host = f" on {self._host}" if self._host else ""
        doing = [f" ({watched.pulse})" for watched in self.ranks if watched.rank == rank]
        return f"rank {rank}{host}{''.join(doing)}"

    @property
    def has_other_nodes(self) -> bool:
        return bool(self._host)

    def _remedy(self, guilty: WatchedRank) -> str:
        kind = guilty.pulse.kind
        has_limit = kind in type(self._limits).model_fields and guilty.seconds > self.limit(kind)
        setting = f"launch.limits.{kind}" if has_limit else "launch.timeout"  # for which others have waited in vain
        return f"see what that line waits for; if it was at work, set {setting}=SECONDS above what it needs"
