"""What a user adds to a simulated run: a task and a callback, in which a rank may meet its fate."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stand_ins import MODULES
from torch_stand_in import DIST
from world import current, world

from drawbar.tasks.batch import Batch
from drawbar.train.callback import Callback

_os, _time = MODULES["os"], MODULES["time"]


def meet(phase: str) -> None:
    """Meet the fate that this schedule has for this rank in this phase of the step, if any."""
    fault = world().fate_in(current(), phase)  # type: ignore[attr-defined]
    if fault is not None:
        FATES[fault.kind]()


def spin() -> None:
    world().block()  # a loop in Python: it runs signal handlers


def be_deaf() -> None:
    world().block(interruptible=False)  # inside of C, without the interpreter's lock


def hold() -> None:
    current().holder = world().running  # inside of C, with that lock
    world().block(interruptible=False)


def fail() -> None:
    raise ValueError("planted")


FATES: dict[str, Callable[[], object]] = {
    "spin": spin,
    "be deaf": be_deaf,
    "hold": hold,
    "raise": fail,
    "exit": lambda: _os._exit(0),
    "crash": lambda: _os.kill(_os.getpid(), signal.SIGSEGV),
    "freeze": lambda: _os.kill(_os.getpid(), signal.SIGSTOP),
    "one-sided": lambda: DIST.all_reduce(torch.zeros(3, dtype=torch.int64)),
}


class Fated:
    """A task."""

    predicts = False

    def collate(self, samples: list[int]) -> Batch:
        meet("data")
        _time.sleep(world().random.uniform(0.01, 0.1))
        return Batch({}, samples)

    def num_targets(self, batch: Batch) -> float:
        return float(len(batch.ids))

    def forward(self, model: None, batch: Batch) -> None:
        meet("forward")
        _time.sleep(world().random.uniform(0.05, 0.3))


class Notes(Callback):
    def on_step(self, run: Any, info: Any) -> None:
        meet("callback")
        _time.sleep(world().random.uniform(0.0, 0.05))

    def on_save(self, run: Any, checkpoint: Path) -> None:
        meet("save")
