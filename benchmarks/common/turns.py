"""Contenders that take turns every few steps: what slows the machine down for a minute slows all of them alike.

All are started one after another, each up to its first step. Then one makes its steps while the others wait.
"""

import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.common.fresh_process import Call, MeasurementFailed, Started, start

Key = TypeVar("Key")
Results = dict[Key, dict[str, Any] | MeasurementFailed]

STEPS = 2
"""Of a turn."""
_VARIABLE = "BENCHMARK_TURNS"
"""Two descriptors: where a process reads that it is its turn, and where it writes that its turn is over."""


class Turn:
    """In the process of a contender: waits until it is its turn. Without such a suite around it, it never waits."""

    def __init__(self) -> None:
        given = os.environ.get(_VARIABLE)
        self._pipes = tuple(map(int, given.split(","))) if given else None
        self._steps = 0
        self.waited = 0.0
        """Seconds, in all."""

    @property
    def is_shared(self) -> bool:
        """Whether others take turns with this process."""
        return self._pipes is not None

    def begin(self) -> None:
        """Right before the first step."""
        self._pass()

    def step(self) -> None:
        """After each step."""
        self._steps += 1
        if self._steps % STEPS == 0:
            self._pass()

    def _pass(self) -> None:
        if self._pipes is None:
            return
        began = time.perf_counter()
        own, others = self._pipes
        os.write(others, b".")
        if not os.read(own, 1):
            raise RuntimeError("the suite is gone")
        self.waited += time.perf_counter() - began


def in_turns(calls: Mapping[Key, Call]) -> Results[Key]:
    """What each call returns, or why it failed. Each runs in a process of its own, on one rank."""
    with ExitStack() as stack:
        players = {}
        for name, call in calls.items():
            players[name] = _Player.of(call, stack)
            players[name].wait()
        while any(player.is_waiting for player in players.values()):
            for player in players.values():
                if player.is_waiting:
                    player.play()
        return {name: _result(player.started) for name, player in players.items()}


def one_after_another(calls: Mapping[Key, Call], run: Callable[[Call], dict[str, Any]]) -> Results[Key]:
    """The same, each as ``run`` runs it."""
    found: Results[Key] = {}
    for name, call in calls.items():
        try:
            found[name] = run(call)
        except MeasurementFailed as error:
            found[name] = error
    return found


@dataclass
class _Player:
    started: Started
    go: int
    """Written to, to give it its turn."""
    over: int
    """Read from: it writes when its turn is over, and its end closes it."""
    is_waiting: bool = False

    @staticmethod
    def of(call: Call, stack: ExitStack) -> "_Player":
        (own, go), (over, others) = os.pipe(), os.pipe()
        environment = {**call.environment, _VARIABLE: f"{own},{others}"}
        started = start(replace(call, environment=environment), stack, inherited=(own, others))
        for descriptor in (own, others):
            os.close(descriptor)
        for descriptor in (go, over):
            stack.callback(os.close, descriptor)
        return _Player(started, go, over)

    def play(self) -> None:
        os.write(self.go, b".")
        self.wait()

    def wait(self) -> None:
        """Until its turn is over, or it has ended, or takes too long."""
        seconds = max(0.0, self.started.deadline - time.time())
        ready, _, _ = select.select([self.over], [], [], seconds)
        self.is_waiting = bool(ready) and bool(os.read(self.over, 1))


def _result(started: Started) -> dict[str, Any] | MeasurementFailed:
    try:
        return started.result()
    except MeasurementFailed as error:
        return error
