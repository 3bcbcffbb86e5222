"""What each rank is doing, published in the store: so that waiting for a rank that works has no deadline,
and one that is gone or hangs is named.

A thread of each rank writes its entry. It sends heartbeats by itself only while the rank waits here, or says that it
is at work: a rank that hangs anywhere else, as in a collective of its engine, falls silent.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch.distributed as dist

from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger

TELL_SECONDS = 60.0
"""How often the log says which rank waits for which."""
_BEATS = 20
"""Heartbeats missed in a row after which a rank counts as silent."""
_LOOK_SECONDS = 1.0
"""Longest blocking wait between polls; Python handles signals in between."""
_NAMED = 4
"""Ranks that a message names."""


@dataclass(frozen=True)
class RankActivity:
    """What a rank tells the others."""

    entered: int = 0
    """How many operations it has come to: all ranks come to the same ones, in the same order."""
    signs: int = 0
    """Its notes and heartbeats so far, in one number: that it changes is a sign of life."""
    activity: str = "starting"


class Liveness:
    """This rank's entry, the entries last seen of its peers, and waits that depend on those.

    Args:
        store: where the ranks meet.
        timeout: seconds without a sign of life, after which nobody waits for a rank any longer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.timeout = timeout
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._activity = RankActivity.activity
        self._entered = 0
        self._notes = 0
        self._beats = 0
        """Written by the thread alone, and the three above it by the main thread alone."""
        self._is_working = False
        self._is_waiting = False
        self._told: RankActivity | None = None
        self._seen: dict[int, RankActivity] = {}
        self._over = threading.Event()

    def join(self) -> None:
        """Write the first entry."""
        self._tell()

    def start(self) -> None:
        """Begin, once the first entries of all ranks are in the store, to read and write them."""
        threading.Thread(target=self._run, name="signs of life", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def note(self, activity: str) -> None:
        """Say what this rank does from here on: a sign of life, which takes no time."""
        self._activity = activity
        self._notes += 1

    @contextmanager
    def working(self, activity: str) -> Iterator[None]:
        """Give signs of life until this is left."""
        before, outer = self._activity, self._is_working
        self.note(activity)
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = outer
            self.note(before)

    def wait(self, operation: dist.Work, what: str | None) -> None:
        """Wait for an operation that every rank comes to: for those that give signs of life, as long as it takes.

        Raises:
            UserError: a rank gave none for ``timeout`` seconds.
            RuntimeError: the connection to a rank is lost.
        """
        assert not self._is_working, f"{what}: a rank that waits while it says that it is at work may do so for ever"
        self._entered += 1
        self.note(what or self._activity)
        look = min(_LOOK_SECONDS, self.timeout / _BEATS)
        if _has_ended(operation, look):
            return
        self._is_waiting = True
        try:
            self._watch(operation, look)
        finally:
            self._is_waiting = False

    def _watch(self, operation: dist.Work, look: float) -> None:
        # counts polls instead of seconds, so that no rank counts as silent after a suspended job resumes
        looks = stuck = 0
        silent = dict.fromkeys(self._peers, 0)
        last = self._seen
        while not _has_ended(operation, look):
            seen = self._seen
            looks += 1
            for peer in self._peers:
                silent[peer] = silent[peer] + 1 if seen.get(peer) == last.get(peer) else 0
            last = seen
            missing = [peer for peer in self._peers if seen.get(peer, RankActivity()).entered < self._entered]
            stuck = 0 if missing else stuck + 1
            if lost := [peer for peer in self._peers if silent[peer] * look > self.timeout]:
                raise self._lost(f"{_describe(lost, seen)}; no sign of life since then")
            if stuck * look > self.timeout:
                raise self._lost("all have come, but their data does not get through")
            if missing and _is_time_to_tell(looks, look):
                logger.info("waiting for %s (%.0f s)", _describe(missing, seen), looks * look)

    def _lost(self, reason: str) -> UserError:
        return UserError(
            f"rank {self._rank} waited {self.timeout:g}s for the others at {self._activity}: {reason}",
            remedy="look at the log of the ranks named; a longer wait is launch.timeout=SECONDS",
            exit_code=ExitCode.FAILED,
        )

    def _run(self) -> None:
        period = self.timeout / _BEATS
        awaited = 0
        while not self._over.wait(period):
            with suppress(dist.DistError, RuntimeError):  # without the store nobody is seen, which ends every wait
                if self._is_working or self._is_waiting:
                    self._beats += 1
                    self._seen = self._look()
                self._tell()
            others_wait = self._is_working and any(entry.entered > self._entered for entry in self._seen.values())
            awaited = awaited + 1 if others_wait else 0
            if _is_time_to_tell(awaited, period):  # this may be the only rank with a console
                logger.info("the other ranks wait for this one: %s (%.0f s)", self._activity, awaited * period)

    def _tell(self) -> None:
        entry = RankActivity(self._entered, self._notes + self._beats, self._activity)
        if entry != self._told:
            self._store.set(_key(self._rank), json.dumps(astuple(entry)))
            self._told = entry

    def _look(self) -> dict[int, RankActivity]:
        texts = self._store.multi_get([_key(peer) for peer in self._peers])
        return {peer: RankActivity(*json.loads(text)) for peer, text in zip(self._peers, texts, strict=True)}


def _key(rank: int) -> str:
    return f"liveness/{rank}"


def _has_ended(operation: dist.Work, seconds: float) -> bool:
    """Whether an operation ends within so many seconds. Raises RuntimeError where it has failed."""
    try:
        operation.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not operation.is_completed():
            return False
        operation.wait()  # raises again what it raised, unless it has ended just now
    return True


def _is_time_to_tell(count: int, period: float) -> bool:
    return count > 0 and count % max(1, round(TELL_SECONDS / period)) == 0


def _describe(ranks: Sequence[int], seen: dict[int, RankActivity]) -> str:
    """``rank 0 (writing the checkpoint of step 3), rank 2 (step 4)``"""
    named = [f"rank {rank} ({seen.get(rank, RankActivity()).activity})" for rank in ranks[:_NAMED]]
    more = len(ranks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
