"""Cross-entropy of a language model's head, computed one chunk of targets at a time, without materializing all logits.

The gradients of a chunk are computed in the forward pass, while its logits are in memory (as in Liger Kernel, Hsu et
al. 2024, arXiv:2410.10989); backward only scales them (fp16: computes them). Positions without a target are skipped.

Between the matrix products, a chunk's logits are read and written several times. Compiled, they are read twice and
written once, in their own dtype, without an fp32 copy (unless the model transforms its logits). Losses and gradients
then differ in the last bits of fp32, so this code is compiled only if the run requests it (``parallel.compile``).

B: rows, L: tokens in a row, N: targets, C: targets in a chunk, H: hidden size, V: the vocabulary, or this rank's shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drawbar.parallel.compile import is_uncompiled

Transform = Callable[[Tensor], Tensor]
"""A model's elementwise transformation of its logits after the head, such as a soft cap: (C, V) → (C, V)."""

SMALL_CHUNK = 2**27
"""Size of fp32 logits that is always allowed for a chunk, in bytes."""


class LossTerms(NamedTuple):
    """What is added to the cross-entropy in training. An evaluation, without gradients, is plain: its perplexity can be
    compared with others."""

    label_smoothing: float = 0.0
    """The share of each label that is spread over all tokens (Szegedy et al. 2016, arXiv:1512.00567)."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp of the logits (Chowdhery et al. 2022, arXiv:2204.02311)."""

    def in_training(self) -> "LossTerms":
        """These terms, or none without gradients."""
        return self if torch.is_grad_enabled() else PLAIN


PLAIN = LossTerms()


class LossTargets(NamedTuple):
    """The positions with a target (indices into the B·L flattened positions), and the labels of all positions."""

    positions_N: Tensor
    labels_BL: Tensor

    @classmethod
    def of(cls, labels_BL: Tensor, ignored: int) -> "LossTargets":
        return cls((labels_BL.flatten() != ignored).nonzero().squeeze(1), labels_BL)

    @property
    def labels_N(self) -> Tensor:
        return self.labels_BL.flatten()[self.positions_N]


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of a vocabulary that is sharded over tensor-parallel ranks."""

    group: dist.ProcessGroup
    start: int
    """Its first token."""
    vocabulary: int
    """Number of tokens in all shards."""


def targets_in_chunk(vocabulary: int, hidden: int) -> int:
    """Number of targets in a chunk: its fp32 logits take at most 128 MiB or half the size of the fp32 gradient of the
    head's weight, whichever is larger. With smaller chunks, accumulating that gradient would cost more than computing
    it."""
    return max(1, SMALL_CHUNK // (4 * vocabulary), hidden // 2)


def chunked_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    transform: Transform | None = None,
    shard: VocabularyShard | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    terms: LossTerms = PLAIN,
) -> Tensor:
    """The summed cross-entropy of the logits ``hidden_NH @ weight_VH.T + bias_V``, in fp32 (0-d). Its backward can run
    only once, as it hands out the gradients that the forward has computed.

    Under autocast, the matrix products use its dtype. Every rank in the group of ``shard`` must call this with the same
    hidden states, and gets the full loss; the caller must then sum the gradient of the hidden states over the group.

    Args:
        transform: elementwise function between the matrix product and the loss.
        shard: the part of the vocabulary in the rows of ``weight_VH``; None for the full vocabulary.
        chunk: number of targets in a chunk; defaults to ``targets_in_chunk``.
        compiled: compile the code between the matrix products with torch; ``transform`` must then be compilable.
        terms: what to add while training.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
    how = _How(
        transform,
        shard,
        chunk or targets_in_chunk(*weight_VH.shape),
        dtype,
        torch.is_grad_enabled(),
        compiled and not is_uncompiled(),
        terms.in_training(),
    )
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_NH, weight_VH, bias_V, labels_N, how)
    return loss


@dataclass(frozen=True)
class _How:
    transform: Transform | None
    shard: VocabularyShard | None
    chunk: int
    dtype: torch.dtype
    """Dtype of the matrix products."""
    with_gradients: bool
    compiled: bool
    terms: LossTerms

    def per_token(self, columns: int) -> float:
        """The share of the smoothed label that each token of the vocabulary gets.

        Args:
            columns: of this rank's logits.
        """
        return self.terms.label_smoothing / (columns if self.shard is None else self.shard.vocabulary)


class _Gradients(NamedTuple):
    """The gradients accumulated so far; None for those not required."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    def add(self, chunk: slice, gradient_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add the gradients of one chunk, given the gradient of its logits, ``gradient_CV``."""
        if self.hidden_NH is not None:
            self.hidden_NH[chunk] = gradient_CV @ weight_VH
        if self.bias_V is not None:
            self.bias_V.add_(gradient_CV.sum(0, dtype=self.bias_V.dtype))
        if self.weight_VH is not None and self.weight_VH.dtype == gradient_CV.dtype:
            self.weight_VH.addmm_(gradient_CV.T, hidden_CH)
        elif self.weight_VH is not None:
            self.weight_VH.add_(gradient_CV.T @ hidden_CH)


def _new_gradients(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
    """Allocate the gradients; those of weight and bias are zeros, to accumulate the chunks in at least fp32."""
    exact = torch.promote_types(weight_VH.dtype, torch.float32)
    return _Gradients(
        torch.empty_like(hidden_NH) if needed[0] else None,
        torch.zeros_like(weight_VH, dtype=exact) if needed[1] else None,
        torch.zeros_like(bias_V, dtype=exact) if bias_V is not None and needed[2] else None,
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, how: _How
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3] if how.with_gradients else (False,) * 3
        # unscaled gradients would underflow in fp16: compute them in backward, where the scale is known
        ctx.recompute = any(needed) and how.dtype == torch.float16
        if ctx.recompute:
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N)
            needed = (False,) * 3
        loss, gradients = _run(hidden_NH, weight_VH, bias_V, labels_N, how, needed)
        ctx.how, ctx.gradients = how, gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_NH, weight_VH, bias_V)]
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.recompute:
            hidden_NH, weight_VH, bias_V, labels_N = ctx.saved_tensors
            _, found = _run(hidden_NH, weight_VH, bias_V, labels_N, ctx.how, ctx.needs_input_grad[:3], outer[0])
        else:
            # scaled in place, so only once: a copy would take as much memory as the weight
            found, ctx.gradients = ctx.gradients, None
            for gradient in found:
                if gradient is not None:
                    gradient *= outer[0]
        # rounded as by autocast, so that they are the same if FSDP has gathered the weight in this dtype
        rounded = (None if one is None else one.to(ctx.how.dtype) for one in found)
        given = (None if one is None else one.to(dtype) for one, dtype in zip(rounded, ctx.dtypes, strict=True))
        return (*given, None, None)


def _run(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    how: _How,
    needed: tuple[bool, ...],
    scale: Tensor | None = None,
) -> tuple[Tensor, _Gradients]:
    """The loss, and its gradients multiplied by ``scale`` (default: 1)."""
    gradients = _new_gradients(hidden_NH, weight_VH, bias_V, needed)
    dtype, shard = how.dtype, how.shard
    with torch.autocast(hidden_NH.device.type, enabled=False):
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
        loss = hidden_NH.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        # the same memory for all chunks: allocating this much each time takes longer than some of the operators
        chunk = min(how.chunk, len(hidden_NH))
        logits_memory = hidden_NH.new_empty(chunk, len(weight_VH))
        softmax = _CompiledSoftmax(how) if how.compiled else _Softmax(how, logits_memory)
        for start in range(0, len(hidden_NH), how.chunk):
            hidden_CH, labels_C = hidden_NH[start : start + chunk], labels_N[start : start + chunk]
            logits_CV = _logits(hidden_CH, weight_VH, bias_V, logits_memory[: len(labels_C)])
            index_C1, here_C1 = _local(labels_C, shard, len(weight_VH))
            log_p_C1 = softmax.log_p(logits_CV, index_C1)
            loss -= torch.where(here_C1, log_p_C1, 0).sum() * (1.0 - how.terms.label_smoothing)
            if how.terms.label_smoothing:
                loss -= softmax.sum_of_log_p() * how.per_token(len(weight_VH))
            if how.terms.z_loss:
                loss += torch.where(here_C1, softmax.log_sum_C1.square(), 0).sum() * how.terms.z_loss
            if any(needed):
                gradient_CV = softmax.gradient(logits_CV, log_p_C1, index_C1, here_C1, scale)
                gradients.add(slice(start, start + len(labels_C)), gradient_CV, hidden_CH, weight_VH)
        if shard is not None:  # each rank has only the terms of labels in its shard
            dist.all_reduce(loss, group=shard.group)
    return loss, gradients


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out: Tensor) -> Tensor:
    if bias_V is None:
        return torch.mm(hidden_CH, weight_VH.T, out=out)
    return torch.addmm(bias_V, hidden_CH, weight_VH.T, out=out)


class _Softmax:
    """The softmax of a chunk's logits, and then its gradient, with torch's operators.

    Args:
        logits_memory: buffer for the logits, shared by all chunks.
    """

    def __init__(self, how: _How, logits_memory: Tensor) -> None:
        self.how = how
        exact = torch.promote_types(logits_memory.dtype, torch.float32)
        in_place = how.transform is None and logits_memory.dtype == exact
        self.memory = logits_memory if in_place else logits_memory.new_empty(logits_memory.shape, dtype=exact)

    def log_p(self, logits_CV: Tensor, index_C1: Tensor) -> Tensor:
        """The log-probability of the token in each row's column ``index_C1``, (C, 1)."""
        self.before_CV, self.after_CV = _transformed(logits_CV, self.how.transform)
        out = self.memory[: len(logits_CV)]
        self.log_p_CV, self.log_sum_C1 = _log_softmax(self.after_CV.detach(), out, self.how.shard)
        return self.log_p_CV.gather(1, index_C1)

    def sum_of_log_p(self) -> Tensor:
        """The sum over all columns and rows, 0-d."""
        return self.log_p_CV.sum()

    def gradient(
        self, logits_CV: Tensor, log_p_C1: Tensor, index_C1: Tensor, here_C1: Tensor, scale: Tensor | None
    ) -> Tensor:
        """The gradient of the logits, in their dtype: the probabilities, minus 1 at the label. It may share the logits'
        memory."""
        of_labels_C1 = torch.where(here_C1, log_p_C1.expm1(), log_p_C1.exp())
        plain = self.how.terms == PLAIN
        if plain and self.how.transform is None and scale is None and logits_CV.is_cuda:  # rounded in the kernel of exp
            out_CV = torch.exp(self.log_p_CV, out=logits_CV)
            return out_CV.scatter_(1, index_C1, of_labels_C1.to(out_CV.dtype))
        gradient_CV = self.log_p_CV.exp_()
        if plain:
            gradient_CV.scatter_(1, index_C1, of_labels_C1)
        else:
            smoothing, z_loss = self.how.terms
            gradient_CV.mul_(1.0 + 2.0 * z_loss * self.log_sum_C1).sub_(self.how.per_token(logits_CV.shape[1]))
            gradient_CV.scatter_add_(1, index_C1, here_C1.to(gradient_CV.dtype) * (smoothing - 1.0))
        if self.how.transform is not None:
            (gradient_CV,) = torch.autograd.grad(self.after_CV, self.before_CV, gradient_CV)
        if scale is not None:
            gradient_CV *= scale
        return gradient_CV if gradient_CV.dtype == logits_CV.dtype else logits_CV.copy_(gradient_CV)


class _CompiledSoftmax:
    """As ``_Softmax``, in two kernels: one reads the logits, the other overwrites them with their gradient."""

    def __init__(self, how: _How) -> None:
        self.how = how
        self.sum_kernel, self.gradient_kernel = _compiled_kernels()

    def log_p(self, logits_CV: Tensor, index_C1: Tensor) -> Tensor:
        smooths = self.how.terms.label_smoothing > 0
        self.log_sum_C1, label_C1, self.sum_C1 = self.sum_kernel(logits_CV, index_C1, self.how.transform, smooths)
        if self.how.shard is not None:
            self.log_sum_C1 = _of_all_shards(self.log_sum_C1.squeeze(1), self.how.shard).unsqueeze(1)
        self.columns = logits_CV.shape[1]
        return label_C1 - self.log_sum_C1

    def sum_of_log_p(self) -> Tensor:
        return (self.sum_C1 - self.columns * self.log_sum_C1).sum()

    def gradient(
        self, logits_CV: Tensor, log_p_C1: Tensor, index_C1: Tensor, here_C1: Tensor, scale: Tensor | None
    ) -> Tensor:
        terms, per_token = self.how.terms, self.how.per_token(self.columns)
        label_C1 = index_C1.where(here_C1, -1)
        self.gradient_kernel(logits_CV, self.log_sum_C1, label_C1, scale, self.how.transform, terms, per_token)
        return logits_CV


@cache
def _compiled_kernels() -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., None]]:
    return torch.compile(_sum_and_label), torch.compile(_replace_by_gradient)


def _sum_and_label(
    logits_CV: Tensor, index_C1: Tensor, transform: Transform | None, smooths: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp of each row, its logit in column ``index_C1``, and the row's sum if needed (``smooths``); all
    (C, 1)."""
    exact_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    after_CV = exact_CV if transform is None else transform(exact_CV)
    label_C1 = after_CV.gather(1, index_C1)
    return after_CV.logsumexp(1, keepdim=True), label_C1, after_CV.sum(1, keepdim=True) if smooths else label_C1


def _replace_by_gradient(
    logits_CV: Tensor,
    log_sum_C1: Tensor,
    label_C1: Tensor,
    scale: Tensor | None,
    transform: Transform | None,
    terms: LossTerms,
    per_token: float,
) -> None:
    """Overwrite the logits with their gradient. The label of a row is -1 if another shard has it."""
    after_CV, pull_back = logits_CV.to(log_sum_C1.dtype), None
    if transform is not None:
        after_CV, pull_back = torch.func.vjp(transform, after_CV)
    log_p_CV = after_CV - log_sum_C1
    is_label_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == label_C1
    if terms == PLAIN:
        gradient_CV = torch.where(is_label_CV, log_p_CV.expm1(), log_p_CV.exp())
    else:
        of_label_CV = is_label_CV.to(log_p_CV.dtype) * (terms.label_smoothing - 1.0)
        gradient_CV = log_p_CV.exp() * (1.0 + 2.0 * terms.z_loss * log_sum_C1) - per_token + of_label_CV
    if pull_back is not None:
        (gradient_CV,) = pull_back(gradient_CV)
    if scale is not None:
        gradient_CV = gradient_CV * scale
    logits_CV.copy_(gradient_CV)


def _transformed(logits_CV: Tensor, transform: Transform | None) -> tuple[Tensor, Tensor]:
    """The logits before and after ``transform``; with a transform, in at least fp32 and connected by an autograd
    graph."""
    if transform is None:
        return logits_CV, logits_CV
    with torch.enable_grad():
        before_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).detach().requires_grad_()
        return before_CV, transform(before_CV)


def _log_softmax(logits_CV: Tensor, out: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """The log-probabilities, and the log-sum-exp of each row (C, 1). ``out`` may be the memory of the logits: each is
    read, then written."""
    first_C = logits_CV[:, 0].clone()
    # torch would make another copy in the format of ``out``
    exact_CV = logits_CV if logits_CV.dtype == out.dtype else out.copy_(logits_CV)
    log_p_CV = torch.log_softmax(exact_CV, 1, out=out)
    own_C = first_C - log_p_CV[:, 0]  # the log-sum-exp
    if shard is None:
        return log_p_CV, own_C.unsqueeze(1)
    all_C = _of_all_shards(own_C, shard)
    return log_p_CV.add_((own_C - all_C).unsqueeze(1)), all_C.unsqueeze(1)


def _of_all_shards(own_C: Tensor, shard: VocabularyShard) -> Tensor:
    """The log-sum-exp of all logits, from that of each rank's logits."""
    of_ranks = own_C.new_empty(shard.group.size() * len(own_C))
    dist.all_gather_into_tensor(of_ranks, own_C, group=shard.group)
    return of_ranks.view(-1, len(own_C)).logsumexp(0)


def _local(labels_C: Tensor, shard: VocabularyShard | None, size: int) -> tuple[Tensor, Tensor]:
    """Each label's column in this rank's logits (0 for other ranks' labels), and whether the rank has it; (C, 1)."""
    index_C1 = labels_C.unsqueeze(1)
    if shard is None:
        return index_C1, torch.ones_like(index_C1, dtype=torch.bool)
    index_C1 = index_C1 - shard.start
    here_C1 = (index_C1 >= 0) & (index_C1 < size)
    return index_C1.where(here_C1, 0), here_C1
