"""The shards that this rank writes to a checkpoint in parts, copied to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import saved_values
from drawbar.parallel.local_boxes import LocalBox, WriterAssignment, bands
from drawbar.runtime.tensor_boxes import TensorBox

_Buffers: TypeAlias = dict[tuple[str, tuple[int, ...]], torch.Tensor]
"""The host buffers of a copy, by the tensor's name and the box's offset."""


@dataclass(frozen=True)
class LocalShards:
    """One rank's share of an engine's state, copied to host memory."""

    model: list[TensorBox]
    optimizer: list[TensorBox]
    tied: dict[str, str]
    """Maps each further name of a tied weight to the name that it is saved under."""
    values: dict[str, Any]
    """What ``saved_values`` returns."""

    def nbytes(self) -> int:
        return sum(shard.data.nbytes for shard in (*self.model, *self.optimizer))


class ShardCopier:
    """Copies those shards of an engine that this rank writes to a checkpoint; over all ranks, each element is written
    once. The host buffers are reused by the next copy, as first use of new memory costs page faults.
    """

    def __init__(self, engine: Engine, world: Distributed) -> None:
        self._engine = engine
        self._world = world
        self._weights = WriterAssignment(world)
        self._optimizer = WriterAssignment(world)
        self._buffers: _Buffers = {}

    def copy(self) -> LocalShards:
        """Collective. The previous copy must not be in use any more."""
        engine = self._engine
        engine.share_buffers()
        state = engine.parts.state
        previous, self._buffers = self._buffers, {}
        optimizer = self._copies(state.local_optimizer_boxes(), self._optimizer, previous)
        model = self._copies(state.local_weight_boxes(), self._weights, previous)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the asynchronous copies are complete only then
        values = saved_values(engine.step, engine.config, engine.updater.scaler_state())
        return LocalShards(model, optimizer, state.tied(), values)

    def _copies(self, boxes: Sequence[LocalBox], assignment: WriterAssignment, previous: _Buffers) -> list[TensorBox]:
        divided = [(box, [*bands(box)]) for box in boxes]
        is_writer = iter(assignment.chosen([band for _, all_bands in divided for band in all_bands]))
        found: list[TensorBox] = []
        for box, all_bands in divided:
            own = [band for band in all_bands if next(is_writer)]
            if own or box.is_collective:
                self._world.set_activity(f"copying {box.name}")  # shown by ranks that wait for this one
            if own == all_bands:  # one copy of the whole box is faster than one for each band
                # copied here, once: ``get`` then returns this copy
                whole = replace(box, get=self._host_copy(box, previous).detach)
                found += [TensorBox(band.name, band.shape, band.offset, band.get()) for band in bands(whole)]
            elif own:
                found += [
                    TensorBox(band.name, band.shape, band.offset, self._host_copy(band, previous)) for band in own
                ]
            elif box.is_collective:
                box.get()
        return found

    def _host_copy(self, box: LocalBox, previous: _Buffers) -> torch.Tensor:
        """A copy in host memory; from a CUDA device it is asynchronous, into pinned memory."""
        tensor = box.get()
        pinned = tensor.is_cuda
        buffer = previous.get((box.name, box.offset))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._buffers[box.name, box.offset] = buffer
        return buffer.copy_(tensor, non_blocking=pinned)
