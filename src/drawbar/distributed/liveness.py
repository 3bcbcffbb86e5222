"""What each rank is doing, published in the store: so that waiting for a rank that works has no deadline,
and one that is gone or hangs is named.

A thread of each rank writes its entry. It sends heartbeats by itself only while the rank waits here, or says that it
is at work: a rank that hangs anywhere else, as in a collective of its engine, falls silent. The thread of rank 0 alone
reads all entries, and publishes one digest, from which every rank learns who is silent.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import ceil

import torch.distributed as dist

from drawbar.distributed.rank_activity import ActivityCensus, LivenessDigest, RankActivity
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger

TELL_SECONDS = 60.0
"""How often the log says which rank waits for which."""
_BEATS = 20
"""Heartbeats within the timeout, at least."""
_CONFIRMATIONS = 3
"""Digests in a row that must find a rank silent before a wait ends: the first of them may have been made before that
rank's newest sign of life came in."""
_LOOK_SECONDS = 1.0
"""Longest blocking wait between polls; Python handles signals in between."""


class Liveness:
    """This rank's entry, the digest last seen of all entries, and waits that depend on it.

    Args:
        store: where the ranks meet.
        timeout: seconds without a sign of life, after which nobody waits for a rank any longer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.timeout = timeout
        self._store = store
        self._rank = rank
        self._census = ActivityCensus(store, size, ceil(timeout / self._period)) if rank == 0 else None
        self._activity = RankActivity().activity
        self._entered = 0
        self._notes = 0
        self._beats = 0
        """Written by the thread alone, and the three above it by the main thread alone."""
        self._is_working = False
        self._is_waiting = False
        self._told: RankActivity | None = None
        self._digest = LivenessDigest()
        self._over = threading.Event()

    def join(self) -> None:
        """Write the first entry; rank 0 writes the first digest, too."""
        self._tell()
        if self._census:
            self._digest = self._census.publish()

    def start(self) -> None:
        """Begin to read and write entries. Call it when the first entries of all ranks are in the store."""
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
        looks = unchanged = accused = stuck = 0
        last = self._digest
        while not _has_ended(operation, look):
            looks += 1
            digest = self._digest
            if digest == last:
                unchanged += 1
            else:
                unchanged = 0
                accused = accused + 1 if digest.silent else 0
            last = digest
            have_come = digest.lowest >= self._entered
            stuck = stuck + 1 if have_come else 0
            if unchanged * look > self.timeout:  # rank 0 makes no digests, or the store is lost
                raise self._lost(f"{digest.others if self._rank == 0 else digest.first}; no sign of life since then")
            if accused >= _CONFIRMATIONS and looks * look > self.timeout:
                raise self._lost(f"{digest.silent}; no sign of life since then")
            if stuck * look > self.timeout:
                raise self._lost("all have come, but their data does not get through")
            if not have_come and _is_time_to_tell(looks, look):
                logger.info("waiting for %s (%.0f s)", digest.behind, looks * look)

    def _lost(self, reason: str) -> UserError:
        return UserError(
            f"rank {self._rank} waited {self.timeout:g}s for the others at {self._activity}: {reason}",
            remedy="look at the log of the ranks named; a longer wait is launch.timeout=SECONDS",
            exit_code=ExitCode.FAILED,
        )

    @property
    def _period(self) -> float:
        """Seconds between heartbeats. All ranks know within three periods that a rank has come, and only after
        ``TELL_SECONDS`` (four periods or more) does the log first say which ranks a rank waits for."""
        return min(self.timeout / _BEATS, TELL_SECONDS / 4)

    def _run(self) -> None:
        awaited = 0
        while not self._over.wait(period := self._period):
            with suppress(dist.DistError, RuntimeError):  # without the store no digest is new, which ends every wait
                self._tell()
                self._look()
            others_wait = self._is_working and self._digest.highest > self._entered
            awaited = awaited + 1 if others_wait else 0
            if _is_time_to_tell(awaited, period):  # this may be the only rank with a console
                logger.info("the other ranks wait for this one: %s (%.0f s)", self._activity, awaited * period)

    def _tell(self) -> None:
        if self._is_working or self._is_waiting:
            self._beats += 1
        entry = RankActivity(self._entered, self._notes + self._beats, self._is_waiting, self._activity)
        if entry != self._told:
            entry.publish(self._store, self._rank)
            self._told = entry

    def _look(self) -> None:
        if self._census:
            self._census.take()
            self._digest = self._census.publish()
        elif self._is_working or self._is_waiting:
            self._digest = LivenessDigest.read(self._store)


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
