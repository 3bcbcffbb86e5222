"""ParallelStyles of modules with sharded weights. Between modules, activations are plain tensors.

torch's own styles also shard the weights; here ``parallel.tensor`` has already done that, since tied weights must
stay one tensor. So these styles only convert inputs and outputs.

Plain linear layers and embeddings also compute with this rank's plain tensors: for each operator on DTensors, torch
looks up the placements of its inputs, which costs many times the host time of the operator itself, and for each new
shape (such as a new micro-batch length) it recomputes the placements, which takes milliseconds. Other layers (fp8, with
scales of the full tensors) and the head (whose logits may stay sharded) compute with DTensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from drawbar.parallel.chunked_loss import PLAIN, LossTerms
from drawbar.parallel.sequence import SEQUENCE, with_summed_gradient

GradPlacement: TypeAlias = Replicate | Shard | Partial | None
_sharded: ContextVar[bool] = ContextVar("sharded_logits", default=False)


@contextmanager
def sharded_logits() -> Iterator[None]:
    """Context manager in which a vocabulary-parallel head leaves its logits sharded along the vocabulary (a
    ``DTensor``), which :func:`cross_entropy_sum` accepts, so that no rank holds the full logits. The backward pass must
    also run inside."""
    token = _sharded.set(True)
    try:
        # a tensor that a model adds to its logits (BART's bias, a buffer) is plain, and the same on every rank
        with loss_parallel(), implicit_replication():
            yield
    finally:
        _sharded.reset(token)


def cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor, ignored: int, terms: LossTerms = PLAIN) -> Tensor:
    """The summed cross-entropy in fp32, a plain 0-d tensor; the logits may be sharded (see ``sharded_logits``).

    Args:
        ignored: the label of rows to ignore.
        terms: what to add while training.
    """
    logits_NV = logits_NV.float()
    smoothing, z_loss = terms.in_training()
    if (smoothing or z_loss) and isinstance(logits_NV, DTensor):
        logits_NV = logits_NV.full_tensor()  # torch's loss_parallel only has the plain loss
    loss = functional.cross_entropy(
        logits_NV, labels_N, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
    )
    if z_loss:
        squares_N = logits_NV.logsumexp(-1).square()
        loss = loss + z_loss * torch.where(labels_N != ignored, squares_N, 0).sum()
    return loss.to_local() if isinstance(loss, DTensor) else loss


class Colwise(ParallelStyle):
    """A column-parallel layer (linear or embedding): each rank has a shard of the outputs.

    Args:
        gathers: whether the outputs are gathered.
        sums_input_gradient: whether the input's partial gradient is all-reduced here; otherwise
            ``drawbar.parallel.sequence`` reduces it once for all linear layers with that input.
    """

    def __init__(self, gathers: bool = False, sums_input_gradient: bool = True) -> None:
        self.gathers = gathers
        self.sums_input_gradient = sums_input_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        use_local(module, [name for name, _ in module.named_parameters(recurse=False)], None)
        if isinstance(module, Conv1D):
            module.nf //= device_mesh.size()  # the shape of its outputs
        sums = self.sums_input_gradient and not isinstance(module, nn.Embedding)
        enter: Any = _with_summed_gradient if sums else None
        return distribute_module(module, device_mesh, None, enter, _gathered if self.gathers else None)


def _with_summed_gradient(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Tensor:
    return with_summed_gradient(inputs[0], device_mesh)


def _gathered(module: nn.Module, output: Tensor, device_mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(output, device_mesh, [Shard(-1)]).redistribute(placements=[Replicate()]).to_local()


class Rowwise(ParallelStyle):
    """A row-parallel linear layer: each rank has a shard of the inputs.

    Args:
        splits: whether the inputs are unsharded, and each rank takes its shard of them.
        scatters: as for ``DTensorRowwise``.
    """

    def __init__(self, splits: bool = False, scatters: bool = False) -> None:
        self.splits = splits
        self.scatters = scatters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        use_local(module, ["weight"], None, without_bias=module._parameters.get("bias") is not None)
        finish = partial(_summed, self.scatters)
        return distribute_module(module, device_mesh, None, _split if self.splits else None, finish)


def _split(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(inputs[0], device_mesh, [Replicate()]).redistribute(placements=[Shard(-1)]).to_local()


def _summed(scatters: bool, module: nn.Module, output: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' outputs, or this rank's shard of it along the sequence, plus the bias."""
    scatters = scatters and torch.is_grad_enabled()
    sums = DTensor.from_local(output, device_mesh, [Partial()])
    total = sums.redistribute(placements=[SEQUENCE if scatters else Replicate()]).to_local()
    bias: Any = module._parameters.get("bias")
    return total if bias is None else total + _local(bias, Partial() if scatters else Replicate()).to(total.dtype)


class DTensorColwise(ColwiseParallel):
    """A column-parallel layer that computes with DTensors.

    Args:
        gathers: as for ``Colwise``.
        sums_input_gradient: as for ``Colwise``.
    """

    def __init__(self, gathers: bool = False, sums_input_gradient: bool = True) -> None:
        super().__init__(output_layouts=Replicate() if gathers else None)
        self.sums_input_gradient = sums_input_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare = partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts)
        finish = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        enter = prepare if self.sums_input_gradient else _input_with_partial_grad
        return distribute_module(module, device_mesh, None, enter, finish)


def _input_with_partial_grad(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], device_mesh, [Replicate()], grad_placements=[Partial()])


class DTensorRowwise(RowwiseParallel):
    """A row-parallel linear layer that computes with DTensors.

    Args:
        splits: as for ``Rowwise``.
        scatters: whether outputs are reduce-scattered along the sequence, if gradients are on (``parallel.sequence``).
    """

    def __init__(self, splits: bool = False, scatters: bool = False) -> None:
        super().__init__(input_layouts=Replicate() if splits else None)
        self.scatters = scatters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare = partial(self._prepare_input_fn, self.input_layouts, (Shard(-1),))
        finish = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        return distribute_module(module, device_mesh, None, prepare, _scattered if self.scatters else finish)


def _scattered(module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> Tensor:
    return output.redistribute(placements=[SEQUENCE if torch.is_grad_enabled() else Replicate()]).to_local()


class Vocabulary(DTensorColwise):
    """The head of a language model: its logits are gathered, except inside ``sharded_logits``."""

    def __init__(self) -> None:
        super().__init__(gathers=True)

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        if _sharded.get() or not isinstance(outputs, DTensor):  # a head that computes the loss has no logits
            return outputs
        return DTensorColwise._prepare_output_fn(layouts, use_local, mod, outputs, device_mesh)


class Embedding(ParallelStyle):
    """An embedding with a shard of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053): each rank looks up the
    tokens in its shard, and the results are summed over the ranks.

    torch's ``RowwiseParallel`` compares the pad token with row numbers relative to the shard, and does not support
    embeddings that also scale their rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        assert isinstance(module.weight, DTensor)
        use_local(module, ["weight"], Shard(0))
        total, degree, rank = module.num_embeddings, device_mesh.size(), device_mesh.get_local_rank()
        size, start = Shard.local_shard_size_and_offset(total, degree, rank)
        if module.padding_idx is not None:  # this row gets no gradient
            inside = start <= module.padding_idx < start + size
            module.padding_idx = module.padding_idx - start if inside else None
        original_forward = module.forward

        def forward(input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            here = input_ids - start
            absent = (here < 0) | (here >= size)
            found = original_forward(here.masked_fill(absent, 0), *args, **kwargs)
            found = found.masked_fill(absent.unsqueeze(-1), 0)
            return DTensor.from_local(found, device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

        module.forward = forward
        return module


def use_local(
    module: nn.Module, names: Sequence[str], grad_placement: GradPlacement, without_bias: bool = False
) -> None:
    """Make the module's ``forward`` see these parameters as this rank's plain tensors, in place.

    Forward may then use any operator. Outside forward (optimizer, state_dict) they remain DTensors.

    Args:
        grad_placement: placement of the gradients: ``Partial`` if the module's inputs differ between ranks; None for
            the placement of the parameters.
        without_bias: hide the bias from ``forward``.
    """
    module.shows_local = False
    kind: Any = type(module)
    module.__class__ = _with_local(kind, tuple(names), grad_placement, without_bias)


@cache  # equal modules share a class, so that torch.compile shares code between them
def _with_local(
    kind: Any, names: tuple[str, ...], grad_placement: GradPlacement, without_bias: bool
) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.shows_local = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            self.shows_local = False

    def view(self: Any, name: str) -> Tensor:
        parameter = self._parameters[name]
        return _local(parameter, grad_placement) if self.shows_local else parameter

    def bias(self: Any) -> Tensor | None:
        if not self.shows_local:
            return self._parameters["bias"]
        return self.weight.new_zeros(self.nf) if isinstance(self, Conv1D) else None  # Conv1D always adds one

    namespace: dict[str, Any] = {"bias": property(bias)} if without_bias else {}
    namespace |= {
        "forward": wraps(kind.forward)(forward),
        "__qualname__": kind.__qualname__,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), {**namespace, **{name: property(partial(view, name=name)) for name in names}})


def _local(parameter: DTensor, grad_placement: GradPlacement) -> Tensor:
    if isinstance(grad_placement, Partial) and torch.is_grad_enabled():
        # Replicate to Replicate is a no-op in forward; in backward, it all-reduces the partial gradients
        parameter = parameter.redistribute(placements=parameter.placements)
    return parameter.to_local(grad_placements=None if grad_placement is None else [grad_placement])
