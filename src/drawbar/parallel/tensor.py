"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with DTensor, according to a ``ModelParallelPlan``."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.pytorch_utils import Conv1D

from drawbar.errors import UserError
from drawbar.parallel.model_plan import ModelParallelPlan, Style
from drawbar.parallel.sequence import shard_sequence_in_blocks, sum_input_gradients_once
from drawbar.parallel.styles import (
    Colwise,
    DTensorColwise,
    DTensorRowwise,
    Embedding,
    Rowwise,
    Vocabulary,
    use_local,
)
from drawbar.util.module_patterns import matching

T = TypeVar("T")
Styled = Mapping[str, tuple[nn.Module, Style]]
"""Modules and their styles, by module name."""


@dataclass(frozen=True)
class FusedLayout:
    """The concatenated weights of several linear layers in one tensor (queries, keys, values). Each rank needs a shard
    of each.

    DTensor supports only contiguous shards, so each rank's shards are stored next to one another. Files keep the
    single-process order.
    """

    dim: int
    parts: int
    """Number of linear layers."""
    degree: int
    """Number of ranks that they are sharded over."""

    def to_sharded(self, logical: Tensor) -> Tensor:
        """Reorder from the single-process layout (layer, rank, …) to (rank, layer, …). The shape does not change."""
        return self._swapped(logical, self.parts, self.degree)

    def to_logical(self, sharded: Tensor) -> Tensor:
        """The inverse of ``to_sharded``, for a parameter, its gradient or its optimizer state."""
        return self._swapped(sharded, self.degree, self.parts)

    def pieces(self, start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Split rows ``start`` to ``stop`` of the sharded tensor (rows along ``dim``) into ranges that are also
        contiguous in the logical tensor: (first sharded row, first logical row, number of rows) of each.

        Args:
            size: size of the full tensor along ``dim``.
        """
        width = size // (self.parts * self.degree)  # rows of one layer on one rank
        while start < stop:
            number, within = divmod(start, width)
            rank, layer = divmod(number, self.parts)
            length = min(width - within, stop - start)
            yield start, (layer * self.degree + rank) * width + within, length
            start += length

    def _swapped(self, tensor: Tensor, outer: int, inner: int) -> Tensor:
        pieces = tensor.unflatten(self.dim, (outer, inner, -1)).transpose(self.dim, self.dim + 1)
        return pieces.reshape(tensor.shape).contiguous()


def fused_layouts(model: nn.Module) -> dict[str, FusedLayout]:
    """The parameters that ``tensor_parallel`` reorders, by name."""
    return {
        f"{name}.{own}" if name else own: fused
        for name, module in model.named_modules()
        for own, fused in getattr(module, "fused_layouts", {}).items()
    }


def tensor_parallel(model: nn.Module, plan: ModelParallelPlan, mesh: DeviceMesh, sequence: bool = False) -> None:
    """Shard a model over the ranks of ``mesh``, in place. Parameters keep their names, and tied ones stay tied.

    Every parameter becomes a ``DTensor``: sharded according to the plan, or replicated. Inputs and outputs of the model
    are plain tensors, the same on every rank (except inside ``sharded_logits``).

    Args:
        model: the full model, on the meta device or with the same weights on every rank; or one stage of a pipeline.
        mesh: one-dimensional.
        sequence: shard the activations of the repeated blocks, outside attention and feed-forward, along the sequence.

    Raises:
        UserError: the model has no tensor plan, or the degree does not divide its heads or sizes.
    """
    if plan.tensor is None:
        raise UserError(plan.tensor_refusal, where="parallel.tensor", remedy="set parallel.tensor=1")
    if sequence and plan.sequence_blocks is None:
        raise UserError(plan.sequence_refusal, where="parallel.sequence", remedy="set parallel.sequence=false")
    styles = {
        name: (module, style)
        for name, module, style in matching(model.named_modules(), plan.tensor)
        # a LoRA wrapper has no weight: its parts have their own styles
        if "weight" in module._parameters or (style == "replicated" and module._parameters)
    }
    fused = {name: parts for name, _, parts in matching(model.named_modules(), plan.fused)}
    check_degree({**plan.divisible_sizes, **_sizes(styles, fused)}, mesh.size())
    _shard_parameters(model, styles, fused, mesh)
    repeated = {} if plan.sequence_blocks is None else {f"{plan.sequence_blocks}.*": None}
    blocks = [block for _, block, _ in matching(model.named_modules(), repeated)]
    _convert(model, styles, blocks, mesh, sequence)
    for _, module, attributes in matching(model.named_modules(), plan.divided_attributes):
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())


def _convert(model: nn.Module, styles: Styled, blocks: Sequence[nn.Module], mesh: DeviceMesh, sequence: bool) -> None:
    """Make every module compute with its local shards; ``blocks``: those in which activations may be sharded."""
    styled = {id(module) for module, _ in styles.values()}
    sublayers = [child for block in blocks for child in block.children() if styled & set(map(id, child.modules()))]
    summing_sublayers = sublayers if sequence or _all_styled(styled, sublayers) else []
    inside = {id(module) for block in (blocks if sequence else ()) for module in block.modules()}
    for name, module in model.named_modules():
        _, style = styles.get(name, (module, None))
        replicated = [own for own, parameter in module.named_parameters(recurse=False) if _is_replicated(parameter)]
        if replicated and style in (None, "replicated"):
            differ = style == "replicated" or id(module) in inside  # the inputs differ between ranks
            use_local(module, replicated, Partial() if differ else Replicate())
    in_sublayers = {id(module) for sublayer in summing_sublayers for module in sublayer.modules()}
    made = {
        name: _make(style, module, id(module) in in_sublayers, sequence) for name, (module, style) in styles.items()
    }
    parallelize_module(model, mesh, {name: maker for name, maker in made.items() if maker is not None})
    if sequence and blocks:
        shard_sequence_in_blocks(blocks, sublayers, mesh)
    elif not sequence:
        sum_input_gradients_once(summing_sublayers, mesh)


def _all_styled(styled: Collection[int], sublayers: Sequence[nn.Module]) -> bool:
    """Whether every module with parameters in these sublayers has a style. If gradients are summed only at the
    sublayer's input, a parameter of a module without a style (an adapter's A) would keep only this rank's part of its
    gradient."""
    owners = (
        module for sublayer in sublayers for module in sublayer.modules() if list(module.parameters(recurse=False))
    )
    return all(id(module) in styled for module in owners)


def _is_replicated(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)


def _make(style: Style, module: nn.Module, in_sublayer: bool, sequence: bool) -> ParallelStyle | None:
    """The torch style for ``style``.

    Args:
        in_sublayer: whether the module is in an attention or feed-forward that sums its input's gradient once for all
            its modules.
        sequence: whether the outputs of such a sublayer are sharded along the sequence.
    """
    is_plain = type(module).forward in _PLAIN
    colwise, rowwise = (Colwise, Rowwise) if is_plain else (DTensorColwise, DTensorRowwise)
    match style:
        case "colwise" | "fused_colwise" | "head_bias":
            return colwise(sums_input_gradient=not in_sublayer)
        case "colwise_gather_output":
            return colwise(gathers=True, sums_input_gradient=not in_sublayer)
        case "rowwise":
            return rowwise(scatters=in_sublayer and sequence)
        case "rowwise_split_input":
            return rowwise(splits=True, scatters=in_sublayer and sequence)
        case "embedding":
            return Embedding()
        case "vocabulary":
            return Vocabulary()
        case "replicated":
            return None


_PLAIN = (nn.Linear.forward, Conv1D.forward, nn.Embedding.forward)
"""Forwards that may compute with plain tensors: see ``parallel.styles``."""
_ROWWISE = ("rowwise", "rowwise_split_input")


def _shard_dim(module: nn.Module, style: Style) -> int | None:
    """The dim along which a module's weight is sharded; None if it is replicated."""
    if style == "replicated":
        return None
    if style in ("embedding", "vocabulary"):
        return 0
    if style == "head_bias":
        return 1
    inputs, outputs = (0, 1) if isinstance(module, Conv1D) else (1, 0)
    return inputs if style in _ROWWISE else outputs


def _sizes(styles: Styled, fused: Mapping[str, int]) -> dict[str, int]:
    """The sizes that the degree must divide: all except the vocabulary, whose shards may differ in size."""
    found = {}
    for name, (module, style) in styles.items():
        dim = _shard_dim(module, style)
        if dim is not None and style not in ("embedding", "vocabulary"):
            weight = module._parameters["weight"]
            assert weight is not None
            found[f"the width of {name}"] = weight.shape[dim] // fused.get(name, 1)
    return found


def _shard_parameters(model: nn.Module, styles: Styled, fused: Mapping[str, int], mesh: DeviceMesh) -> None:
    """Turn every parameter into a ``DTensor``."""
    placements: dict[nn.Parameter, Shard] = {}
    orders: dict[nn.Parameter, FusedLayout] = {}
    for name, (module, style) in styles.items():
        for own, parameter in module.named_parameters(recurse=False):
            dim = _shard_dim(module, style)
            if own == "bias":
                dim = None if style in _ROWWISE or dim is None else 0
            if dim is not None:
                placements[parameter] = Shard(dim)
                if name in fused:
                    orders[parameter] = FusedLayout(dim, fused[name], mesh.size())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for own, parameter in module.named_parameters(recurse=False):
            order = orders.get(parameter)
            if parameter not in made:
                full = parameter.detach() if order is None else order.to_sharded(parameter.detach())
                # every rank has the same weights, or none yet: nothing to communicate
                part = distribute_tensor(full, mesh, [placements.get(parameter, Replicate())], src_data_rank=None)
                made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(own, made[parameter])
            if order is not None:
                module.fused_layouts = {**getattr(module, "fused_layouts", {}), own: order}


def check_degree(numbers: Mapping[str, int], degree: int) -> None:
    """Check that the degree divides all of these numbers.

    Raises:
        UserError: it does not; the message names the number, and the degrees that divide all of them.
    """
    works = math.gcd(*numbers.values()) if numbers else 1
    degrees = [number for number in range(1, works + 1) if works % number == 0]
    for what, number in numbers.items():
        if number % degree:
            raise UserError(
                f"{what} is {number}, which {degree} tensor-parallel ranks cannot share evenly",
                where="parallel.tensor",
                remedy=f"set parallel.tensor to {_either(degrees)}",
            )


def _either(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
