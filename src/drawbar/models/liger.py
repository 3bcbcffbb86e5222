"""Cross-entropy by the kernels of liger-kernel (Hsu et al. 2024, arXiv:2410.10989), on CUDA devices."""

from typing import Any

import torch
from torch import Tensor

from drawbar.errors import UserError
from drawbar.models.logit_ops import LogitOps
from drawbar.models.loss_head import CrossEntropy


def liger_cross_entropy(ops: LogitOps) -> CrossEntropy:
    """A function to use in place of ``chunked_cross_entropy``, computed by liger-kernel.

    Raises:
        UserError: liger-kernel is not installed, or cannot compute this model's loss.
    """
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise UserError(
            f"liger-kernel cannot be used: {error}",
            where="task.cross_entropy",
            remedy="install it (pip install 'drawbar[liger]'), or set task.cross_entropy=auto",
        ) from error
    if ops.ops:
        raise UserError(
            "liger-kernel cannot compute this loss: the model changes its logits after the head",
            where="task.cross_entropy",
            remedy="set task.cross_entropy=auto",
        )

    def cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, *_: Any) -> Tensor:
        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden_NH, weight_VH, labels_N, bias_V, reduction="sum", accum_dtype=torch.float32
        )
        return loss.float()

    return cross_entropy
