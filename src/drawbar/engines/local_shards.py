"""Host-memory copies of the shards that this rank writes to a checkpoint in parts."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import saved_values
from drawbar.parallel.local_boxes import LocalBox, WriterAssignment, bands
from drawbar.runtime.safetensors_reader import TensorBox

_ALIGNMENT = 64
"""Alignment of tensors in host memory, in bytes: a cache line."""


@dataclass(frozen=True)
class LocalShards:
    """One rank's share of an engine's state, copied to host memory."""

    model: list[TensorBox]
    optimizer: list[TensorBox]
    tied: dict[str, str]
    """Maps each alias of a tied weight to the name that it is saved under."""
    values: dict[str, Any]
    """The result of ``saved_values``."""

    def nbytes(self) -> int:
        return sum(shard.data.nbytes for shard in (*self.model, *self.optimizer))


class _HostMemory:
    """A block of host memory for all tensors of a copy, of exactly their size; reused by the next copy.

    Args:
        device: the device that the tensors are copied from. For CUDA the memory is page-locked, so that copies run at
            full speed. (torch's page-locked allocations are rounded up to powers of two.)
    """

    def __init__(self, device: torch.device) -> None:
        self._locks = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._unlock: Callable[[], object] = lambda: None

    def begin(self, size: int) -> None:
        """Invalidate all tensors, and provide ``size`` bytes for new ones: the sum of their ``rounded_bytes``."""
        self._used = 0
        if size == self._bytes.numel():
            return
        self._unlock()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # free first: old and new may each take half of the memory
        self._bytes = torch.empty(size, dtype=torch.uint8)
        if self._locks and size:
            start, runtime = self._bytes.data_ptr(), torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(start, size, 1)))  # as in torch: for all devices
            # called at the latest when this object is destroyed, which is before its memory is freed
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, start)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor in this memory."""
        size = prod(shape) * dtype.itemsize
        begin, self._used = self._used, self._used + rounded_bytes(size)
        assert self._used <= self._bytes.numel()
        return self._bytes[begin : begin + size].view(dtype).view(tuple(shape))


def rounded_bytes(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes occupies in a copy."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Share:
    """The part of a box that this rank writes."""

    box: LocalBox
    bands: list[LocalBox]
    """The bands that it writes."""
    is_whole: bool
    """Whether these are all bands of the box: copying the whole box at once is faster than band by band."""

    @property
    def copied(self) -> list[LocalBox]:
        """The boxes to copy, one by one."""
        return [self.box] if self.is_whole else self.bands


class ShardCopier:
    """Copies the shards of an engine that this rank writes to a checkpoint; over all ranks, each element is written
    once. Copies reuse the same host memory, to avoid page faults.
    """

    def __init__(self, engine: Engine, world: Distributed) -> None:
        self._engine = engine
        self._world = world
        self._weights = WriterAssignment(world)
        self._optimizer = WriterAssignment(world)
        self._memory = _HostMemory(world.device)

    def copy(self) -> LocalShards:
        """Copy this rank's share. Collective. The previous copy must no longer be in use."""
        engine = self._engine
        engine.share_buffers()
        state = engine.parts.state
        of_optimizer = _shares(state.local_optimizer_boxes(), self._optimizer)
        of_model = _shares(state.local_weight_boxes(), self._weights)
        copied = [box for share in (*of_optimizer, *of_model) for box in share.copied]
        self._memory.begin(sum(rounded_bytes(box.bytes) for box in copied))
        optimizer, model = self._copies(of_optimizer), self._copies(of_model)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the asynchronous copies are complete only then
        values = saved_values(engine.step, engine.config, engine.updater.scaler_state())
        return LocalShards(model, optimizer, state.tied(), values)

    def _copies(self, shares: Sequence[_Share]) -> list[TensorBox]:
        found: list[TensorBox] = []
        for share in shares:
            box, own = share.box, share.bands
            if own or box.is_collective:
                self._world.set_activity(f"copying {box.name}")  # shown by ranks that wait for this one
            if share.is_whole:
                # copied once, here: ``get`` then returns this copy
                whole = replace(box, get=self._host_copy(box).detach)
                found += [TensorBox(band.name, band.shape, band.offset, band.get()) for band in bands(whole)]
            elif own:
                found += [TensorBox(band.name, band.shape, band.offset, self._host_copy(band)) for band in own]
            elif box.is_collective:
                box.get()
        return found

    def _host_copy(self, box: LocalBox) -> torch.Tensor:
        """A copy in host memory; asynchronous from a CUDA device."""
        tensor = box.get()
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(box.sizes), box.dtype), box.name
        return self._memory.tensor(box.sizes, box.dtype).copy_(tensor, non_blocking=tensor.is_cuda)


def _shares(boxes: Sequence[LocalBox], assignment: WriterAssignment) -> list[_Share]:
    """The part of each of its boxes that this rank writes. Collective."""
    divided = [(box, [*bands(box)]) for box in boxes]
    is_writer = iter(assignment.chosen([band for _, all_bands in divided for band in all_bands]))
    shares = []
    for box, all_bands in divided:
        own = [band for band in all_bands if next(is_writer)]
        shares.append(_Share(box, own, is_whole=own == all_bands))
    return shares
