"""Copies batches to the device, overlapping with computation."""

from collections.abc import Iterator, Sequence

import torch

from drawbar.data.prefetch import MicroBatch
from drawbar.tasks.batch import Batch


class DeviceCopies:
    """Copies micro-batches to a device: on CUDA in a stream of their own, each while the batch before it is computed.
    In the stream of the computation, a copy would wait for all work queued before it, and hold up all work queued
    after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def of(self, micro_batches: Sequence[MicroBatch[Batch]]) -> Iterator[Batch]:
        """The batches on the device, in order. It copies one batch ahead of the one that it yields."""
        copies = map(self._copy, micro_batches)
        copy = next(copies, None)
        while copy is not None:
            following = next(copies, None)
            yield self._for_computation(*copy)
            copy = following

    def _copy(self, micro: MicroBatch[Batch]) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return micro.batch.to(self._device), None
        with torch.cuda.stream(self._stream):
            return micro.batch.to(self._device), self._stream.record_event()

    def _for_computation(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        if copied is not None:
            computation = torch.cuda.current_stream(self._device)
            computation.wait_event(copied)
            for tensor in batch.values():
                tensor.record_stream(computation)  # else a later copy may reuse memory that is still read
            for segments in getattr(batch.get("segment_ids"), "segments", ()):  # copied by ``Batch.to``, too
                segments.record_stream(computation)
        return batch
