"""``Batch``: what a task collates samples into."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError


class Batch(dict[str, torch.Tensor]):
    """Tensors by name, and the ids of the samples that they hold."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]] | dict[str, torch.Tensor], ids: list[int]) -> None:
        super().__init__(tensors)
        self.ids = ids

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model's forward takes: everything but ``labels``."""
        return {name: tensor for name, tensor in self.items() if name != "labels"}

    @property
    def packed(self) -> bool:
        """Whether a row holds several samples: ``segment_ids`` then say which token belongs to which."""
        return "segment_ids" in self

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, from which copies to a CUDA device overlap with its work."""
        return type(self)({name: tensor.pin_memory() for name, tensor in self.items()}, self.ids)

    def to(self, device: torch.device) -> Self:
        """The same batch on ``device``; copies to a GPU go through pinned memory, and overlap with its work. MPS has no
        float64: there it becomes float32."""
        tensors: dict[str, torch.Tensor] = self
        if device.type == "cuda":
            tensors = {name: t if t.is_cuda or t.is_pinned() else t.pin_memory() for name, t in self.items()}
        elif device.type == "mps":
            tensors = {name: t.float() if t.dtype == torch.float64 else t for name, t in self.items()}
        moved = type(self)({name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}, self.ids)
        if device.type == "cuda":
            self._send_what_the_host_knows(moved)
        return moved

    def _send_what_the_host_knows(self, moved: Self) -> None:
        """Attach to the copies of a batch what a model would otherwise wait for the GPU to say."""
        from drawbar.models.segments import (  # they need transformers, which a batch does not
            MASKS,
            send_padding,
            send_segments,
        )

        if self.packed and not self["segment_ids"].is_cuda:
            sides = [self[name] for name in ("segment_ids", "decoder_segment_ids") if name in self]
            send_segments(moved["segment_ids"], *sides)
        for name in MASKS:
            if name in self and not self[name].is_cuda:
                send_padding(moved[name], self[name])


PADDING = {"labels": IGNORED_LABEL, "attention_mask": 0, "segment_ids": -1, "decoder_segment_ids": -1}
"""What each field is padded with; any other gets 0, or what ``padding`` of ``pad_and_stack`` says."""


PredictFunction = Callable[[nn.Module, Batch], list[Any]]
"""``predict`` or ``probabilities`` of a task: an answer of the model for each sample of a batch."""


def pad_and_stack(samples: list[Sample], padding: dict[str, int] | None = None) -> Batch:
    """Stack fields of equal shape; pad those that differ in length, on the right, to the longest.

    Integers become int64; bytes (uint8) stay. The fields of packed rows that hold a value for each sample are laid
    end to end.

    Args:
        samples: rows with the same keys; each field an array (L, …), a number, or, in packed rows, a list with an item
            for each sample; and ``ids``, the numbers of the row's samples.
        padding: what to fill fields with, by name; it takes precedence over ``PADDING``.

    Returns:
        A batch of (B, L, …), (B,) and, for lists, (samples, …) tensors.

    Raises:
        UserError: a field is text, or its arrays cannot be stacked.
    """
    fill = {**PADDING, **(padding or {})}
    tensors: dict[str, torch.Tensor] = {}
    for name in samples[0]:
        if name not in ("id", "ids"):
            values = [sample[name] for sample in samples]
            if isinstance(values[0], list):
                values = [value for row in values for value in row]
            tensors[name] = _stack(name, values, fill.get(name, 0))
    return Batch(tensors, ids=[number for sample in samples for number in sample["ids"]])


def _stack(name: str, values: list[Any], fill: int) -> torch.Tensor:
    try:
        rows = [torch.as_tensor(value) for value in values]
        if len({row.shape for row in rows}) > 1:
            rows = list(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill))
        stacked = torch.stack(rows)
    except (TypeError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the field {name!r} of the samples cannot become a tensor: {error}",
            remedy="leave it out of what the task's encode returns, or define the task's collate",
        ) from error
    # int32 keeps encoded data small, but embeddings want int64; bytes are pictures, and stay small
    kept = stacked.is_floating_point() or stacked.dtype in (torch.bool, torch.uint8)
    return stacked if kept else stacked.long()
