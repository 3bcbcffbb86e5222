"""What the soak does to its run: the lives of the run, one after another, each with its ranks, strategy and faults.

A life is one command of the supervisor. Its last fault ends it; those before it are met under ``launch.restarts``.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from fault_table import HANGS, PHASES, TIMEOUT

T = TypeVar("T")
GLOBAL_BATCH = 24
"""Rows of a step: every number of ranks divides it."""


@dataclass(frozen=True)
class Layout:
    """How many ranks, and under which strategy."""

    ranks: int
    strategy: str

    @property
    def replicas(self) -> int:
        return self.ranks // 2 if self.strategy in ("tensor", "pipeline") else self.ranks

    def settings(self) -> list[str]:
        """The settings of ``drawbar train``: one micro-batch a step on each rank, two in a pipeline."""
        parallel = {"single": "strategy=auto", "tensor": "tensor=2", "pipeline": "pipeline=2"}
        return [
            f"launch.nproc={self.ranks}",
            f"parallel.{parallel.get(self.strategy, f'strategy={self.strategy}')}",
            f"train.micro_batch={GLOBAL_BATCH // self.replicas // (2 if self.strategy == 'pipeline' else 1)}",
        ]

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks}"


ALONE = Layout(1, "single")
LAYOUTS = {
    ALONE: 2,
    **{Layout(2, strategy): 2 for strategy in ("ddp", "zero1", "fsdp", "tensor", "pipeline")},
    **{Layout(3, strategy): 2 for strategy in ("ddp", "zero1", "fsdp")},
    **{Layout(4, strategy): 1 for strategy in ("ddp", "zero1", "fsdp", "tensor")},
    **{Layout(6, strategy): 1 for strategy in ("ddp", "fsdp")},
    **{Layout(8, strategy): 1 for strategy in ("ddp", "zero1", "fsdp", "tensor")},
}
"""With their weights: two cores carry eight ranks, but not all the time."""


@dataclass(frozen=True)
class Fault:
    """One fault: of one rank in a phase of a step, which it meets itself, or from outside, at any moment."""

    kind: str
    who: int
    """The rank, where it is one's."""
    after: int
    """In which step since the start; from outside, after how many."""
    phase: str = ""
    """Empty: from outside."""
    delay: float = 0.0
    """Seconds from then to a fault from outside."""


INSIDE = {"kill": 5, "crash": 4, "exit": 3, "interrupt": 3, "raise": 5, "stop": 1, "spin": 1, "hold": 1}
LOSSES = {name: weight for name, weight in INSIDE.items() if name not in ("interrupt", "raise")}
"""After these the launcher starts the ranks again by itself."""
OUTSIDE = {
    "SIGKILL to a rank": 3,
    "SIGKILL to the launcher": 3,
    "SIGKILL to all": 3,
    "SIGKILL to all while saving": 4,
    "SIGKILL to all while starting": 2,
    "SIGKILL to all, torn checkpoint": 5,
    "SIGSTOP to a rank": 1,
    "SIGTERM to the launcher": 2,
    "SIGUSR1 to the launcher": 2,
    "SIGINT to the launcher": 2,
    "SIGTERM to a rank": 2,
    "SIGTERM to all": 1,
}
TORN = "SIGKILL to all, torn checkpoint"
NEED_A_LAUNCHER = ("exit", *HANGS, "SIGSTOP to a rank", "SIGTERM to all")
"""Nobody watches a process without one, and a supervisor takes its exit code 0 for the end of the run."""
DAMAGES = {
    "truncated": 'truncate -s -7 "$newest/model-00000.safetensors"',
    "a few bytes changed": 'printf soaked | dd of="$newest/model-00000.safetensors" bs=1 seek=20000 conv=notrunc',
    "no manifest": 'rm "$newest/manifest.json"',
    "an empty file": ': > "$newest/state.json"',
}
"""What the supervisor does to the newest checkpoint before it starts the run again."""


@dataclass(frozen=True)
class Life:
    """One command of the supervisor."""

    layout: Layout
    faults: tuple[Fault, ...]
    damage: str = ""

    @property
    def planted(self) -> tuple[Fault, ...]:
        """Those that a rank meets by itself. At most the last one comes from outside."""
        return tuple(fault for fault in self.faults if fault.phase)

    def write(self, folder: Path, number: int, settings: list[str]) -> None:
        """The files of this life, for the supervisor and for the task."""
        restarts = [f"launch.restarts={TIMEOUT}"] if len(self.faults) > 1 else []
        (folder / f"{number}.settings").write_text(" ".join([*settings, *self.layout.settings(), *restarts]))
        (folder / f"{number}.json").write_text(json.dumps([asdict(fault) for fault in self.planted]))
        if self.damage:
            newest = "newest=$(ls -d runs/tiny/checkpoints/step-???????? | tail -n 1)"
            (folder / f"{number}.after").write_text(f'{newest}\necho "$newest" > lives/{number}.torn\n{self.damage}\n')


def schedule(seed: int, faults: int) -> Iterator[Life]:
    """Lives with so many faults in all. The layout changes every other life, or so."""
    chance = Random(seed)
    layout, torn = ALONE, True
    while faults > 0:
        if chance.random() < 0.5:
            layout = _one_of(chance, LAYOUTS)
        several = 1 < layout.ranks <= 4 and faults > 2 and chance.random() < 0.15
        met = [_inside(chance, layout, LOSSES) for _ in range(chance.randint(1, 2) if several else 0)]
        # a second torn checkpoint before a new one is complete would only ask whether the oldest is kept
        met.append(_last(chance, layout, torn, under_restarts=bool(met)))
        torn = met[-1].kind == TORN
        yield Life(layout, tuple(met), chance.choice(list(DAMAGES.values())) if torn else "")
        faults -= len(met)


def _last(chance: Random, layout: Layout, torn: bool, under_restarts: bool) -> Fault:
    """A fault that ends the command."""
    begun_again = (*LOSSES, "SIGKILL to a rank", "SIGSTOP to a rank") if under_restarts else ()
    if chance.random() < 0.5:
        return _inside(chance, layout, {kind: weight for kind, weight in INSIDE.items() if kind not in begun_again})
    left = {kind: weight for kind, weight in OUTSIDE.items() if kind not in begun_again and not (torn and kind == TORN)}
    kind = _one_of(chance, _fitting(layout, left))
    delay = chance.uniform(0, 6 if kind.endswith("starting") else 0.15)
    return Fault(kind, chance.randrange(layout.ranks), chance.randint(1, 4), delay=delay)


def _inside(chance: Random, layout: Layout, kinds: dict[str, int]) -> Fault:
    kind, who, phases = _one_of(chance, _fitting(layout, kinds)), chance.randrange(layout.ranks), PHASES
    if layout.strategy == "pipeline":  # the task's forward is replayed there, and the last stage has the loss
        phases = ("optimizer", "backward") if who == layout.ranks - 1 else ("optimizer",)
    first = 2 if kind == "raise" else 1  # an error of the task in its first step is a mistake: exit code 2, and no rank
    return Fault(kind, who, chance.randint(first, 5), chance.choice(phases))


def _fitting(layout: Layout, kinds: dict[str, int]) -> dict[str, int]:
    return {kind: weight for kind, weight in kinds.items() if layout != ALONE or kind not in NEED_A_LAUNCHER}


def _one_of(chance: Random, weights: dict[T, int]) -> T:
    return chance.choices(list(weights), list(weights.values()))[0]
