"""Heartbeats of the ranks through the rendezvous store: waiting for a rank that is working has no deadline, and a rank
that is gone or hangs is named.

A thread of each rank publishes its activity. It sends heartbeats while the rank waits here, and for as long as what it
does may take (``launch.limits``), less ``launch.timeout``: then a rank that hangs falls silent. Only rank 0's thread
reads the activities of all ranks; it publishes a digest that tells every rank which ranks are silent.

The digest's size does not grow with the number of ranks. The launcher of a node reads the same from the pulses of its
ranks (:mod:`drawbar.distributed.pulse`).
"""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import ceil
from typing import NamedTuple

import torch.distributed as dist

from drawbar.config.schema.run_config import LimitsSection
from drawbar.distributed import pulse
from drawbar.distributed.pulse import Kind, Pulse, limit_of
from drawbar.errors import ExitCode, UserError
from drawbar.runtime import torch_internals
from drawbar.runtime.log import logger

_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset)|broken pipe|remote process|pair closure|timed out waiting|wait timeout",
    re.IGNORECASE,
)
"""Matches the messages of gloo, NCCL and torch's store when the other end is gone or does not answer."""
_MAX_NAMED = 4
"""Maximum number of ranks that a message names."""
_DIGEST = "liveness/digest"


class PeerLost(UserError):
    """This rank has waited in vain for another one, which is at fault."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error is that another rank is gone or does not answer."""
    cause: BaseException | None = error
    while cause is not None:
        is_torchs = isinstance(cause, RuntimeError)  # as torch's DistError is
        if isinstance(cause, PeerLost) or (is_torchs and _LOST_PEER.search(str(cause))):
            return True
        cause = cause.__cause__
    return False


class RankActivity(NamedTuple):
    """The activity of one rank: its entry in the store."""

    entered: int = 0
    """Number of collectives it has waited for (``Liveness.wait``); all ranks enter the same ones in the same order."""
    heartbeats: int = 0
    """Number of heartbeats and changes of activity so far."""
    is_waiting: bool = False
    """Whether it is waiting in such a collective; the other ranks must then send heartbeats."""
    activity: str = "starting"

    def publish(self, store: dist.Store, rank: int) -> None:
        activity = self.activity.encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
        store.set(_key(rank), f"{self.entered} {self.heartbeats} {self.is_waiting:d} {activity}")

    @staticmethod
    def parse(text: bytes) -> "RankActivity":
        entered, heartbeats, is_waiting, activity = text.decode().split(" ", 3)  # seven times as fast as JSON
        return RankActivity(int(entered), int(heartbeats), is_waiting == "1", activity)


class LivenessDigest(NamedTuple):
    """Rank 0's summary of all entries. Ranks are given as text for messages: ``rank 2 (step 4) and 3 more``."""

    number: int = 0
    """Increases with each digest: the heartbeat of rank 0's thread."""
    lowest: int = 0
    """The lowest ``entered`` of any rank."""
    highest: int = 0
    behind: str = "rank 0"
    """The ranks with the lowest ``entered``, which the others wait for."""
    silent: str = ""
    """The ranks that have sent no heartbeat for ``launch.timeout`` seconds while some rank was waiting."""
    rank0: str = "rank 0"
    """Rank 0, as text, for the others' messages when no digests arrive."""
    others: str = ""
    """All ranks but rank 0, as text, for rank 0's messages."""

    @staticmethod
    def read(store: dist.Store) -> "LivenessDigest":
        return LivenessDigest(*json.loads(store.get(_DIGEST)))


class ActivityReader:
    """On rank 0: reads the entries of all ranks, and counts the readings since each last changed.

    Args:
        silent_after: after this many readings with the same entry, a rank counts as silent.
    """

    def __init__(self, store: dist.Store, size: int, silent_after: int) -> None:
        self._store = store
        self._silent_after = silent_after
        self._keys = [_key(rank) for rank in range(size)]
        self._texts = [b""] * size
        self._entries = [RankActivity()] * size
        self._unchanged = [0] * size
        self._number = 0

    def read_all(self) -> None:
        """Read all entries."""
        texts = self._store.multi_get(self._keys)
        for rank, (text, known) in enumerate(zip(texts, self._texts, strict=True)):
            if text == known:
                self._unchanged[rank] += 1
            else:
                self._entries[rank] = RankActivity.parse(text)
                self._unchanged[rank] = 0
        self._texts = texts
        if not any(entry.is_waiting for entry in self._entries):  # then no rank needs to send heartbeats
            self._unchanged = [0] * len(texts)

    def publish(self) -> LivenessDigest:
        """Write the digest of the last reading."""
        entered = [entry.entered for entry in self._entries]
        lowest = min(entered)
        self._number += 1
        digest = LivenessDigest(
            self._number,
            lowest,
            max(entered),
            behind=self._describe([rank for rank, count in enumerate(entered) if count == lowest]),
            silent=self._describe([rank for rank, count in enumerate(self._unchanged) if count >= self._silent_after]),
            rank0=self._describe([0]),
            others=self._describe(range(1, len(entered))),
        )
        self._store.set(_DIGEST, json.dumps(digest))
        return digest

    def _describe(self, ranks: Sequence[int]) -> str:
        """``rank 0 (writing the checkpoint of step 3), rank 2 (step 4)``"""
        named = [f"rank {rank} ({self._entries[rank].activity})" for rank in ranks[:_MAX_NAMED]]
        more = len(ranks) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


def _key(rank: int) -> str:
    return f"liveness/{rank}"


LOG_SECONDS = 60.0
"""Seconds between log lines about ranks waiting for one another."""
_MIN_HEARTBEATS = 20
"""Minimum number of heartbeats sent within the timeout."""
_CONFIRMATIONS = 3
"""Number of consecutive digests that must find a rank silent before a wait fails, as the first of them may be older
than that rank's newest heartbeat."""
_POLL_SECONDS = 1.0
"""Longest blocking wait between polls; Python handles signals in between."""


class Liveness:
    """Publishes this rank's activity, and waits for other ranks as long as they are alive.

    Args:
        store: the rendezvous store.
        timeout: seconds without a heartbeat after which a rank counts as gone.
        limits: how long a rank sends heartbeats while it is working.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: float, limits: LimitsSection | None = None
    ) -> None:
        self.timeout = timeout
        self._limits = limits or LimitsSection()
        self._store = store
        self._rank = rank
        self._activity_reader = ActivityReader(store, size, ceil(timeout / self._period)) if rank == 0 else None
        self._pulse = Pulse()
        self._usual_kind = Kind.START
        self._entered = 0
        self._heartbeats = 0
        self._pulse_before = self._pulse
        """The pulse at the last heartbeat."""
        self._unchanged = 0
        """Number of heartbeats with the same pulse. Only the heartbeat thread writes it and ``_heartbeats``; only the
        main thread writes the pulse and ``_entered``."""
        self._is_working = False
        self._is_waiting = False
        self._last_published: RankActivity | None = None
        self._digest = LivenessDigest()
        self._stopped = threading.Event()

    def publish_first(self) -> None:
        """Write the first entry; rank 0 also writes the first digest."""
        self._publish_activity()
        if self._activity_reader:
            self._digest = self._activity_reader.publish()

    def start(self) -> None:
        """Start the heartbeat thread, once the first entries of all ranks are in the store."""
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def activity(self) -> str:
        """``step 5, forward``"""
        return str(self._pulse)

    def set_activity(self, activity: str, kind: Kind | None = None) -> None:
        """Set this rank's activity, which counts as a heartbeat. Returns immediately."""
        self._pulse = Pulse(self._pulse.changes + 1, kind or self._usual_kind, self._pulse.step, activity)
        self._pulse.write()

    def begin_step(self, step: int) -> None:
        """Set the step that the following activities belong to; 0 before the first one."""
        is_first = self._pulse.step == 0 or step == 0  # the first step may compile
        self._usual_kind = Kind.START if is_first else Kind.STEP
        self._pulse = self._pulse._replace(step=step)
        self.set_activity("counting its targets" if step else "starting")

    @contextmanager
    def working(self, activity: str, kind: Kind | None = None) -> Iterator[None]:
        """Context manager that sends heartbeats during long work on this rank only."""
        before, outer = self._pulse, self._is_working
        self.set_activity(activity, kind or (Kind.CALLBACK if self._usual_kind is Kind.STEP else None))
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = outer
        self.set_activity(before.activity, before.kind)  # after an error it stays what failed

    def wait(self, operation: dist.Work, what: str | None) -> None:
        """Wait for a collective as long as the ranks send heartbeats.

        Raises:
            UserError: a rank sent none for ``timeout`` seconds; or the collective did not end within ``timeout``
                seconds after all ranks had entered it.
            RuntimeError: the connection to a rank is lost.
        """
        assert not self._is_working, f"{what}: a rank that waits inside working() may wait forever"
        self._entered += 1
        kind = self._pulse.kind
        self.set_activity(what or self._pulse.activity, kind)
        poll_seconds = min(_POLL_SECONDS, self.timeout / _MIN_HEARTBEATS)
        if _has_ended(operation, poll_seconds):
            return
        self._is_waiting = True
        self.set_activity(self._pulse.activity, Kind.WAITING)
        try:
            self._watch(operation, poll_seconds)
        finally:
            self._is_waiting = False
            self.set_activity(self._pulse.activity, kind)

    def _watch(self, operation: dist.Work, poll_seconds: float) -> None:
        # counts polls instead of seconds, so that no rank counts as silent after a suspended job resumes
        polls = unchanged = silent_digests = stuck = 0
        last = self._digest
        while not _has_ended(operation, poll_seconds):
            polls += 1
            digest = self._digest
            if digest == last:
                unchanged += 1
            else:
                unchanged = 0
                silent_digests = silent_digests + 1 if digest.silent else 0
            last = digest
            all_arrived = digest.lowest >= self._entered
            stuck = stuck + 1 if all_arrived else 0
            if unchanged * poll_seconds > self.timeout:  # rank 0 writes no digests, or the store is lost
                raise self._lost(f"{digest.others if self._rank == 0 else digest.rank0}; no heartbeat since then")
            if silent_digests >= _CONFIRMATIONS and polls * poll_seconds > self.timeout:
                raise self._lost(f"{digest.silent}; no heartbeat since then")
            if stuck * poll_seconds > self.timeout:
                raise self._lost("all have come, but their data does not get through")
            if not all_arrived and _is_time_to_log(polls, poll_seconds):
                logger.info("waiting for %s (%.0f s)", digest.behind, polls * poll_seconds)

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(
            f"rank {self._rank} waited {self.timeout:g}s for the others at {self._pulse.activity}: {reason}",
            remedy="look at the logs of the ranks named; to wait longer, set launch.timeout=SECONDS",
            exit_code=ExitCode.FAILED,
        )

    @property
    def _period(self) -> float:
        """Seconds between heartbeats: at most a quarter of ``LOG_SECONDS``. It takes up to three periods until all
        ranks know who has entered a collective, so the log never names a rank that entered in time."""
        return min(self.timeout / _MIN_HEARTBEATS, LOG_SECONDS / 4)

    def _run(self) -> None:
        awaited = 0
        while not self._stopped.wait(period := self._period):
            pulse.write_collectives(_begun_collectives(is_stuck=self._unchanged > 0))
            with suppress(dist.DistError, RuntimeError):  # no store, no new digests: this ends every wait
                self._publish_activity()
                self._poll()
            others_wait = self._is_working and self._digest.highest > self._entered
            awaited = awaited + 1 if others_wait else 0
            if _is_time_to_log(awaited, period):  # this may be the only rank with a console
                logger.info("the other ranks wait for this one: %s (%.0f s)", self._pulse.activity, awaited * period)

    def _publish_activity(self) -> None:
        now, before = self._pulse, self._pulse_before
        self._unchanged = self._unchanged + 1 if now == before else 0
        self._pulse_before = now
        # a silence becomes one too many after a further timeout
        beats = limit_of(now.kind, self._limits, self.timeout) - self.timeout
        if self._is_waiting or self._unchanged * self._period < beats:
            self._heartbeats += 1
        entry = RankActivity(self._entered, now.changes + self._heartbeats, self._is_waiting, str(now))
        if entry != self._last_published:
            entry.publish(self._store, self._rank)
            self._last_published = entry

    def _poll(self) -> None:
        if self._activity_reader:
            self._activity_reader.read_all()
            self._digest = self._activity_reader.publish()
        elif self._is_working or self._is_waiting:
            self._digest = LivenessDigest.read(self._store)


def _begun_collectives(is_stuck: bool) -> pulse.Collectives:
    """The collectives that this rank has begun; with what the newest ones are, which takes milliseconds, if it is
    stuck."""
    with suppress(RuntimeError):  # a group is being made or destroyed by the main thread
        newest = _newest_collectives() if is_stuck else {}
        return {
            f"{group.group_desc or 'group'} {name}": (group._get_sequence_number_for_group(), newest.get(name, ""))
            for group, name in list(torch_internals._world.pg_names.items())
            if isinstance(group, dist.ProcessGroup)
        }
    return {}


def _newest_collectives() -> dict[str, str]:
    """The newest collective in each process group, as torch's flight recorder has it: ``gloo:all_reduce [[3]]``."""
    with suppress(Exception):  # its format may change with torch's version, and heartbeats must go on
        entries = json.loads(torch_internals._dump_fr_trace_json()).get("entries", [])
        return {entry["process_group"][0]: f"{entry['profiling_name']} {entry['input_sizes']}" for entry in entries}
    return {}


def _has_ended(operation: dist.Work, seconds: float) -> bool:
    """Whether an operation ends within this many seconds. Raises RuntimeError if it has failed."""
    try:
        operation.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not operation.is_completed():
            return False
        operation.wait()  # raises its error again, unless it has just ended
    return True


def _is_time_to_log(count: int, period: float) -> bool:
    return count > 0 and count % max(1, round(LOG_SECONDS / period)) == 0
