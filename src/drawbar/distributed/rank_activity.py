"""The ranks' activities in the rendezvous store: an entry of each rank, and a digest of all entries, made by rank 0.

The other ranks read nothing but the digest, whose size does not grow with the number of ranks.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

_MAX_NAMED = 4
"""A message names at most so many ranks."""
_DIGEST = "liveness/digest"


class RankActivity(NamedTuple):
    """What one rank is doing: its entry in the store."""

    entered: int = 0
    """Number of collectives it has waited for (``Liveness.wait``): all ranks enter the same ones, in the same order."""
    heartbeats: int = 0
    """Count of its heartbeats and changes of activity so far."""
    is_waiting: bool = False
    """Whether it waits in such a collective; the other ranks must then send heartbeats."""
    activity: str = "starting"

    def publish(self, store: dist.Store, rank: int) -> None:
        activity = self.activity.encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
        store.set(_key(rank), f"{self.entered} {self.heartbeats} {self.is_waiting:d} {activity}")

    @staticmethod
    def parse(text: bytes) -> "RankActivity":
        entered, heartbeats, is_waiting, activity = text.decode().split(" ", 3)  # a seventh of the time that JSON takes
        return RankActivity(int(entered), int(heartbeats), is_waiting == "1", activity)


class LivenessDigest(NamedTuple):
    """Rank 0's summary of all entries. Ranks are given as text for messages: ``rank 2 (step 4) and 3 more``."""

    number: int = 0
    """Increases with each digest: the heartbeat of rank 0's thread."""
    lowest: int = 0
    """The smallest ``entered`` of any rank."""
    highest: int = 0
    behind: str = "rank 0"
    """The ranks with the smallest ``entered``: the others wait for these."""
    silent: str = ""
    """The ranks that have sent no heartbeat for ``launch.timeout`` seconds in which some rank waited."""
    rank0: str = "rank 0"
    """Rank 0, as text: the others name it when no digests come."""
    others: str = ""
    """All ranks but rank 0, as text: rank 0 names them."""

    @staticmethod
    def read(store: dist.Store) -> "LivenessDigest":
        return LivenessDigest(*json.loads(store.get(_DIGEST)))


class ActivityReader:
    """On rank 0: reads the entries of all ranks, and counts for how many readings each has not changed.

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
        if not any(entry.is_waiting for entry in self._entries):  # then nobody needs to send heartbeats
            self._unchanged = [0] * len(texts)

    def publish(self) -> LivenessDigest:
        """Write the digest of what was read last."""
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
