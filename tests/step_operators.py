"""What a piece of training asks of a device, seen without one: operators, values that the host reads, copies, and which
attention it is. ``StepOperators`` watches any code; ``fake_cuda`` lets it run on CUDA tensors that hold no values."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from drawbar.data.loader import MicroBatch
from drawbar.engines.engine import Engine
from drawbar.engines.executors import ModelExecutor, count_targets, with_targets
from drawbar.engines.updaters import TorchUpdater
from drawbar.models.segments import Segments, segments_of, send_padding
from drawbar.tasks.batch import Batch

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}
"""Operators for which the host waits: their results, or the shapes of these, depend on values. ``bool(tensor)``,
``.item()``, ``float(tensor)`` and indexing by a mask come down to them."""
LIBRARIES = ("/torch/", "step_operators.py", "/contextlib.py")


class StepOperators(TorchDispatchMode):
    """Counts the operators that torch runs inside of it, those of backward passes among them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        """Operators by name, such as ``aten::mm``; without those that only give a view of a tensor."""
        self.reads: Counter[str] = Counter()
        """Values that the host reads, by the function that does so, such as ``sdpa_mask`` or ``num_targets``."""
        self.copies: Counter[tuple[str, str]] = Counter()
        """Copies from one type of device to another."""

    @property
    def attention(self) -> set[str]:
        """The operators that compute attention, in forward and backward passes."""
        return {name for name in self.launches if "attention" in name or "_attn" in name}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if not func.is_view:
            self.launches[name] += 1
        if name in READS:
            self.reads[_reader()] += 1
        result = func(*args, **kwargs)
        if name in ("aten::copy_", "aten::_to_copy"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device.type != result.device.type:
                self.copies[(source.device.type, result.device.type)] += 1
        return result


def watch_device(engine: Engine) -> StepOperators:
    """What the engine's steps run from now on after their batches have been copied to the device: forward and backward
    of each micro-batch, clipping and update. What the host reads there, it would wait for on a GPU."""
    operators = StepOperators()
    for part, name in ((engine.executor, "_forward_backward"), (engine.updater, "step")):
        setattr(part, name, partial(_watched, operators, getattr(part, name)))
    return operators


def _watched(operators: StepOperators, run: Callable[..., Any], *args: Any) -> Any:
    with operators:
        return run(*args)


def _reader() -> str:
    frames = reversed(traceback.extract_stack())
    return next(frame.name for frame in frames if not any(part in frame.filename for part in LIBRARIES))


@contextmanager
def fake_cuda() -> Iterator[None]:
    """A context in which tensors on ``cuda`` can be made, and hold no values; torch finds an H100 where it asks for the
    GPU. It raises where a value is read, and where devices are mixed. Backward passes do not run: torch's engine wants
    a real device for them."""
    if torch.version.cuda is None:
        pytest.skip("torch is built without CUDA, and aborts on a fake CUDA tensor")
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda including_emulation=True: True),
        patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        FakeTensorMode(),
    ):
        yield


def step_on_fake_cuda(engine: Engine, micro_batches: list[MicroBatch[Batch]]) -> StepOperators:
    """A step of an engine that was built on the CPU, as it would be on CUDA once its batches have been copied: each
    forward, loss, clipping and update. In place of the backward passes, which need a device, gradients are there.

    Args:
        engine: of a model that is not sharded; it is of no use afterwards.
    """
    executor, updater = engine.executor, engine.updater
    assert isinstance(executor, ModelExecutor)
    assert isinstance(updater, TorchUpdater)
    ready = with_targets(engine.task, micro_batches, executor.loss_in_head)
    targets = count_targets(engine.task, micro_batches)
    segments = [segments_of(micro.batch["segment_ids"]) if micro.batch.packed else () for micro in ready]
    for micro in ready:
        if "attention_mask" in micro.batch:
            send_padding(micro.batch["attention_mask"], micro.batch["attention_mask"])

    def backward(loss: Tensor) -> None:
        assert loss.is_cuda
        assert loss.requires_grad
        for parameter in engine.module.parameters():
            parameter.grad = torch.empty_like(parameter)

    with fake_cuda():
        before = list(engine.module.parameters())
        to_fake_cuda(engine.module)
        fakes = dict(zip(before, engine.module.parameters(), strict=True))
        for group in chain.from_iterable(optimizer.param_groups for optimizer in updater.optimizers):
            group["params"] = [fakes[parameter] for parameter in group["params"]]
        executor.device = updater.device = torch.device("cuda", 0)
        executor.training_forward = replace(executor.training_forward, backward=backward)
        copies = [_copy(micro.batch, found) for micro, found in zip(ready, segments, strict=True)]
        executor.device_copies.of = lambda _: iter(copies)  # type: ignore[method-assign]
        operators = watch_device(engine)
        assert engine.train_step(ready, num_targets=targets).loss.is_cuda
    return operators


def _copy(batch: Batch, segments: tuple[Segments, ...]) -> Batch:
    """As ``Batch.to`` copies it, with what the host knows of it."""
    copy = Batch(to_fake_cuda(dict(batch)), batch.ids)
    if segments:
        copy["segment_ids"].segments = to_fake_cuda(segments)
    if "attention_mask" in batch:
        copy["attention_mask"].known_padding = batch["attention_mask"].known_padding
    return copy


def to_fake_cuda(value: Any) -> Any:
    """The same with a fake CUDA tensor in place of each tensor: of a tensor, a dict, a tuple or a dataclass of them. A
    module is changed in place."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, nn.Module):
        fakes = {
            parameter: nn.Parameter(to_fake_cuda(parameter), requires_grad=parameter.requires_grad)
            for parameter in value.parameters()
        }
        for module in value.modules():  # of which several may share a parameter
            given = {name: fakes.get(parameter) for name, parameter in module._parameters.items()}
            module._parameters.update(given)
            module._buffers.update(to_fake_cuda(module._buffers))
        return value
    if isinstance(value, dict):
        return {name: to_fake_cuda(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(to_fake_cuda(item) for item in value)
    return replace(value, **to_fake_cuda(vars(value))) if is_dataclass(value) else value
