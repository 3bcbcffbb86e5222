"""A world of two ranks without processes, for what ranks tell one another: as the second of them sees it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo


class SecondRank:
    """Stands for a :class:`Distributed`.

    Args:
        answers_of_first: what rank 0 shares, one after another.
    """

    rank, size, is_rank0 = 1, 2, False
    rank_info = RankInfo(1, 2, 1, 2)
    lowest_rank_with_same = Distributed.lowest_rank_with_same
    barrier_after = Distributed.barrier_after

    def __init__(self, *answers_of_first: Any) -> None:
        self.answers = list(answers_of_first)

    def all_gather(self, value: Any) -> list[Any]:
        return [self.answers.pop(0), value]

    def working(self, activity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def set_activity(self, activity: str) -> None:
        pass

    def barrier(self, what: str) -> None:
        pass
