"""Language models whose head computes the loss itself, without logits of all positions.

The loss is computed in the call of the head's own module, where the hooks of FSDP and ZeRO-3 have its weight at hand.
The model is called as ever, with its targets beside the inputs, and its outputs have the sum of the ``loss``.

B: rows, L: tokens in a row, H: hidden size, V: vocabulary, N: targets.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from drawbar.models.logit_ops import LogitOps
from drawbar.models.segments import UniqueRows
from drawbar.parallel.chunked_loss import LossTargets, Transform, VocabularyShard

POSITIONS, LABELS = "target_positions", "target_labels"
"""The keyword arguments by which a model with a ``LossHead`` is given its ``LossTargets``."""

CrossEntropy = Callable[..., Tensor]
"""``chunked_cross_entropy``, or a function that takes the same arguments."""


class LossHead(nn.Linear):
    """A head that gives the loss in place of logits, wherever it has targets; without them, a linear layer."""

    cross_entropy: CrossEntropy
    transform: Transform | None
    targets: LossTargets | None
    loss: Tensor | None

    @wraps(nn.Linear.forward)  # ``drawbar.parallel.low_precision_weights`` unwraps it and finds nn.Linear's
    def forward(self, input: Tensor) -> Tensor:
        if self.targets is None:
            return super().forward(input)
        hidden_BLH, weight_VH, bias_V, shard = input, self.weight, self.bias, None
        if isinstance(input, DTensor):  # each tensor-parallel rank has a shard of the vocabulary
            mesh = input.device_mesh
            _, start = Shard.local_shard_size_and_offset(self.out_features, mesh.size(), mesh.get_local_rank())
            shard = VocabularyShard(mesh.get_group(), start)
            hidden_BLH = input.to_local(grad_placements=[Partial()])
            weight_VH, bias_V = (_local(tensor) for tensor in (self.weight, self.bias))
        if hidden_BLH.shape[:-1] != self.targets.labels_BL.shape:
            raise ValueError(
                f"the head has {[*hidden_BLH.shape[:-1]]} positions, the labels are {[*self.targets.labels_BL.shape]}"
            )
        hidden_NH = UniqueRows.apply(hidden_BLH.flatten(0, -2), self.targets.positions_N)
        loss = self.cross_entropy(hidden_NH, weight_VH, bias_V, self.targets.labels_N, self.transform, shard)
        no_logits: Tensor
        self.loss, no_logits = _WithNoLogits.apply(loss, (0, *hidden_BLH.shape[1:-1], self.out_features))
        return no_logits


def _local(tensor: Any) -> Any:
    return tensor if tensor is None else tensor.to_local(grad_placements=[Shard(0)])


class _WithNoLogits(torch.autograd.Function):
    """The loss, and empty logits (0, L, V) to go through what the model does after its head. As one autograd node gives
    both, its backward waits for both gradients: FSDP's hooks on the outputs of head and model have run by then."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return loss.clone(), loss.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None


def give_loss_head(module: nn.Module, cross_entropy: CrossEntropy, ops: LogitOps) -> None:
    """Let a model, or a pipeline stage of one, compute its loss in the head, in place.

    Called with ``target_positions`` and ``target_labels``, the model returns outputs with the sum of the ``loss`` and
    with no logits. A last stage returns the loss; other stages drop both arguments. Called without, nothing changes.

    Args:
        ops: the operators that the full model applies to its logits after the head.
    """
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:  # of the stages, only the last has a head
        head.__class__ = LossHead
        head.cross_entropy, head.transform = cross_entropy, ops.of(module)
        head.targets = head.loss = None
    module.register_forward_pre_hook(_take_targets, with_kwargs=True)
    module.register_forward_hook(_return_loss, always_call=True)


def _head_of(module: Any) -> LossHead | None:
    """Found anew in each call: the module may be a copy of the one that has got the head."""
    head = module.get_output_embeddings()
    return head if isinstance(head, LossHead) else None


def _take_targets(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    inputs = {name: value for name, value in kwargs.items() if name not in (POSITIONS, LABELS)}
    head = _head_of(module)
    if head is not None and POSITIONS in kwargs:
        head.targets = LossTargets(kwargs[POSITIONS], kwargs[LABELS])
    return args, inputs


def _return_loss(module: nn.Module, args: Any, outputs: Any) -> Any:
    head = _head_of(module)
    if head is None or head.targets is None:
        return outputs
    loss, head.targets, head.loss = head.loss, None, None
    if outputs is None:
        return None  # the forward pass has failed
    assert loss is not None, "the model did not call its head, as it did when its logit ops were recorded"
    if isinstance(outputs, Tensor):
        return loss + outputs.sum()
    outputs["loss"] = loss + outputs.logits.sum()
    return outputs
