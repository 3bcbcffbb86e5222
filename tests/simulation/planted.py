"""Defects that drawbar has had, planted again: what the simulation must find."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from stand_ins import replaced

from drawbar.distributed import liveness
from drawbar.launch import agent
from drawbar.launch.observer import Observer
from drawbar.train import run_dir_lock


def no_end_after_a_signal() -> AbstractContextManager[None]:
    """The observer ends no stuck rank once the launcher has got a signal: one SIGTERM to it while a rank is stopped,
    and it waits for ever."""
    wait, look = agent._signal_and_wait, Observer.look

    def signal_and_wait(ranks: Any, number: int) -> None:
        for rank in ranks:
            rank.is_left_alone = True
        wait(ranks, number)

    def look_unless_signalled(observer: Observer, seconds: float) -> None:
        if not any(hasattr(rank, "is_left_alone") for rank in observer.ranks):
            look(observer, seconds)

    return replaced([(agent, "_signal_and_wait", signal_and_wait), (Observer, "look", look_unless_signalled)])


def no_limit_of_work() -> AbstractContextManager[None]:
    """A rank that works sends heartbeats for ever: under torch's launcher, the others wait for a callback that hangs as
    long as that does."""
    return replaced([(liveness, "limit_of", lambda kind, limits, timeout: float("inf"))])


def no_fence() -> AbstractContextManager[None]:
    """A process writes on in a directory that was deleted, and begun again by another one."""
    return replaced([(run_dir_lock.RunDirLock, "check", lambda lock: None)])


@dataclass(frozen=True)
class Planted:
    """A defect, and how it shows."""

    plant: Callable[[], AbstractContextManager[None]]
    says: str
    """What the simulation says of it."""
    seed: int
    """A schedule in which it shows."""
    takes: tuple[str, ...]
    """The faults that are left of that."""


PLANTED = {
    "no end after a signal": Planted(
        no_end_after_a_signal, "the command has not ended", 49, ("signal the launcher", "hold")
    ),
    "no limit of work": Planted(no_limit_of_work, "the command has not ended", 103, ("spin",)),
    "no fence": Planted(no_fence, "in a directory that is not its own any more", 72, ("begin again",)),
}
