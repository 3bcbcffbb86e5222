"""``TensorBox``: a box of a full tensor."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorBox:
    """A box of a full tensor, to be written or to be filled."""

    name: str
    """Of the whole tensor: ``lm_head.weight``, for the optimizer ``lm_head.weight/exp_avg``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box begins, one number a dimension."""
    data: torch.Tensor
    """The box; its shape is the box's size."""
