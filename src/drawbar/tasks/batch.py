"""``Batch``: what a task collates samples into."""

from collections.abc import Iterable
from typing import Self

import torch

from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL

_NOT_MODEL_INPUTS = frozenset({"labels", "segment_ids"})


class Batch(dict[str, torch.Tensor]):
    """Tensors by name, and the ids of the samples that they hold.

    ``batch.inputs`` is what a model's forward takes: everything but ``labels`` and ``segment_ids``.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]] | dict[str, torch.Tensor], ids: list[int]) -> None:
        super().__init__(tensors)
        self.ids = ids

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.items() if name not in _NOT_MODEL_INPUTS}

    def to(self, device: torch.device) -> Self:
        """The same batch on ``device``; copies to a GPU go through pinned memory, and overlap with its work."""
        tensors = {name: tensor.pin_memory() for name, tensor in self.items()} if device.type == "cuda" else self
        return type(self)({name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}, self.ids)


PADDING = {"labels": IGNORED_LABEL, "attention_mask": 0, "segment_ids": -1}
"""What each field is padded with; ``input_ids`` get the tokenizer's pad token, anything else 0."""


def pad_and_stack(samples: list[Sample], pad_token: int = 0) -> Batch:
    """Stack fields of equal shape; pad those that differ in length, on the right, to the longest.

    Args:
        samples: rows with the same keys; each field an array (L,) or a number, and ``ids``, those of its samples.
        pad_token: what ``input_ids`` are padded with.

    Returns:
        A batch of (B, L) and (B,) tensors.
    """
    padding = {**PADDING, "input_ids": pad_token}
    tensors: dict[str, torch.Tensor] = {}
    for name in samples[0]:
        if name in ("id", "ids"):
            continue
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        if len({row.shape for row in rows}) > 1:
            rows = list(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0)))
        tensors[name] = torch.stack(rows)
    return Batch(tensors, ids=[number for sample in samples for number in sample["ids"]])
