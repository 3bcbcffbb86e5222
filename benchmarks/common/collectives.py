"""Count the collectives of a training, with the bytes that each is given."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.fresh_process import load_function


class CollectiveCounter(TorchDispatchMode):
    """Sees every operator of torch.distributed, as DDP, FSDP and programs call it.

    The bytes of a collective are those of its larger side: of an all-gather what it makes, of a reduce-scatter what it
    takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].strip("_")
            if "wait" not in name:
                self.calls[name] += 1
                self.bytes[name] += max([tensor_bytes(argument) for argument in args], default=0)
        return func(*args, **(kwargs or {}))


def tensor_bytes(value: Any) -> int:
    """Of a tensor, or of those in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def count(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Calls and bytes by name of the collective, on this rank, while the function runs."""
    with CollectiveCounter() as counter:
        load_function(function)(**arguments)
    return {"calls": counter.calls, "bytes": counter.bytes}


def of_one_step(short: Mapping[str, Any], long: Mapping[str, Any], more_steps: int) -> dict[str, dict[str, float]]:
    """Calls and bytes by collective of one step, from two runs of which the second makes some steps more: what a run
    sends at its start and at its end is the same in both."""
    found = {}
    for name in long["calls"]:
        calls, size = (long[kind][name] - short[kind].get(name, 0) for kind in ("calls", "bytes"))
        if calls:
            found[name] = {"calls": calls / more_steps, "bytes": size / more_steps}
    return found
