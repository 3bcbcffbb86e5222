"""Copies batches to the device, overlapping with computation."""

from collections.abc import Iterator, Sequence

import torch

from drawbar.data.prefetch import MicroBatch
from drawbar.tasks.batch import Batch


class DeviceCopies:
    """Copies micro-batches to a device: on CUDA in a separate stream, each while the previous batch is computed. In the
    compute stream, a copy would wait for all work queued before it, and delay all work queued after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def of(self, micro_batches: Sequence[MicroBatch[Batch]]) -> Iterator[Batch]:
        """Yield the batches on the device, in order, copying one batch ahead."""
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
                tensor.record_stream(computation)  # otherwise a later copy may reuse memory that is still in use
            for segments in getattr(batch.get("segment_ids"), "segments", ()):  # copied by ``Batch.to``, too
                segments.record_stream(computation)
        return batch
