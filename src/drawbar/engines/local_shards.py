"""The shards that this rank writes to a checkpoint in parts, copied to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import saved_values
from drawbar.parallel.local_boxes import LocalBox, WriterAssignment, bands
from drawbar.runtime.tensor_shards import TensorShard


@dataclass(frozen=True)
class LocalShards:
    """One rank's share of an engine's state, copied to host memory."""

    model: list[TensorShard]
    optimizer: list[TensorShard]
    tied: dict[str, str]
    """Maps each further name of a tied weight to the name that it is saved under."""
    values: dict[str, Any]
    """See ``EngineState.values``."""

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
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        """The host buffer of each box of the last copy, by the tensor's name and the box's offset."""

    def copy(self) -> LocalShards:
        """Collective. The previous copy must not be in use any more."""
        engine = self._engine
        engine.share_buffers()
        state = engine.parts.state
        optimizer = self._copies(state.local_optimizer_boxes(), self._optimizer)
        model = self._copies(state.local_weight_boxes(), self._weights)
        self._buffers = {(shard.name, shard.offset): shard.data for shard in (*optimizer, *model)}
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the asynchronous copies are complete only then
        values = saved_values(engine.step, engine.config, engine.updater.scaler_state())
        return LocalShards(model, optimizer, state.tied(), values)

    def _copies(self, boxes: Sequence[LocalBox], assignment: WriterAssignment) -> list[TensorShard]:
        cut = [band for box in boxes for band in bands(box)]
        found = []
        for box, is_writer in zip(cut, assignment.chosen(cut), strict=True):
            if is_writer or box.is_collective:
                self._world.note(f"copying {box.name}")  # shown by ranks that wait for this one
                tensor = box.get()
                if is_writer:
                    found.append(TensorShard(box.name, box.shape, box.offset, self._host_copy(box, tensor)))
        return found

    def _host_copy(self, box: LocalBox, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory; from a CUDA device it is asynchronous, into pinned memory."""
        pinned = tensor.is_cuda
        buffer = self._buffers.get((box.name, box.offset))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return buffer.copy_(tensor, non_blocking=pinned)
