"""What the ranks are doing, in the store: an entry of each rank, and a digest of all entries, which rank 0 makes.

The other ranks read nothing but the digest, whose size does not grow with the number of ranks.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

_NAMED = 4
"""Ranks that a message names."""
_DIGEST = "liveness/digest"


class RankActivity(NamedTuple):
    """The entry of a rank."""

    entered: int = 0
    """How many operations it has come to: all ranks come to the same ones, in the same order."""
    signs: int = 0
    """Its notes and heartbeats so far, in one number: that it changes is a sign of life."""
    is_waiting: bool = False
    """Whether it waits in such an operation; the others then owe it signs of life."""
    activity: str = "starting"

    def publish(self, store: dist.Store, rank: int) -> None:
        activity = self.activity.encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
        store.set(_key(rank), f"{self.entered} {self.signs} {self.is_waiting:d} {activity}")

    @staticmethod
    def parse(text: bytes) -> "RankActivity":
        entered, signs, is_waiting, activity = text.decode().split(" ", 3)  # a seventh of the time that JSON takes
        return RankActivity(int(entered), int(signs), is_waiting == "1", activity)


class LivenessDigest(NamedTuple):
    """What rank 0 has found in all entries. Ranks are named in the words of the messages: ``rank 2 (step 4) and 3
    more``."""

    number: int = 0
    """That it changes is a sign of life of rank 0's thread."""
    lowest: int = 0
    """The fewest operations that a rank has come to."""
    highest: int = 0
    behind: str = "rank 0"
    """The ranks that have come to the fewest: any other one waits for these."""
    silent: str = ""
    """The ranks that have given no sign of life for ``launch.timeout`` seconds in which some rank waited."""
    first: str = "rank 0"
    """Rank 0, which makes the digest."""
    others: str = ""
    """All ranks but rank 0."""

    @staticmethod
    def read(store: dist.Store) -> "LivenessDigest":
        return LivenessDigest(*json.loads(store.get(_DIGEST)))


class ActivityCensus:
    """The entries of all ranks as rank 0 last read them, and for how many readings each has been the same.

    Args:
        patience: after this many readings with the same entry, a rank counts as silent.
    """

    def __init__(self, store: dist.Store, size: int, patience: int) -> None:
        self._store = store
        self._patience = patience
        self._keys = [_key(rank) for rank in range(size)]
        self._texts = [b""] * size
        self._entries = [RankActivity()] * size
        self._unchanged = [0] * size
        self._number = 0

    def take(self) -> None:
        """Read all entries."""
        texts = self._store.multi_get(self._keys)
        for rank, (text, known) in enumerate(zip(texts, self._texts, strict=True)):
            if text == known:
                self._unchanged[rank] += 1
            else:
                self._entries[rank] = RankActivity.parse(text)
                self._unchanged[rank] = 0
        self._texts = texts
        if not any(entry.is_waiting for entry in self._entries):  # then nobody needs to give signs of life
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
            silent=self._describe([rank for rank, count in enumerate(self._unchanged) if count >= self._patience]),
            first=self._describe([0]),
            others=self._describe(range(1, len(entered))),
        )
        self._store.set(_DIGEST, json.dumps(digest))
        return digest

    def _describe(self, ranks: Sequence[int]) -> str:
        """``rank 0 (writing the checkpoint of step 3), rank 2 (step 4)``"""
        named = [f"rank {rank} ({self._entries[rank].activity})" for rank in ranks[:_NAMED]]
        more = len(ranks) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


def _key(rank: int) -> str:
    return f"liveness/{rank}"
