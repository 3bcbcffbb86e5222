"""Splits a causal language model into stages: consecutive blocks, plus the embedding (first) and the head (last).

A stage is a pruned copy of the transformers model: modules of other stages are replaced by placeholders, mostly
identities, so the model's own ``forward`` still makes positions, masks and caches. Parameters keep their names.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drawbar.errors import UserError
from drawbar.parallel.model_plan import PipelinePlan

T = TypeVar("T")


class StageInput(nn.Module):
    """Replaces the token embedding: returns the hidden states received from the previous stage."""

    hidden_BLH: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        assert self.hidden_BLH is not None, "a later stage is called with hidden states"
        return self.hidden_BLH


class Zero(nn.Module):
    """Replaces an embedding that is added to the token embedding; returns 0."""

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.zeros((), device=numbers.device)


def blocks_of_stages(model: nn.Module, plan: PipelinePlan, stages: int, chosen: Sequence[int] | None) -> list[int]:
    """Number of blocks in each stage.

    Args:
        chosen: the number of blocks in each stage as given by the user (``parallel.cuts``); None to minimize the sum of
            squares of the stages' parameter counts, with the embedding on the first stage and the head on the last.

    Raises:
        UserError: there are fewer blocks than stages, or the cuts do not fit.
    """
    blocks: Any = model.get_submodule(plan.blocks)
    if stages > len(blocks):
        raise UserError(
            f"the model has {len(blocks)} blocks, which is too few for {stages} stages",
            where="parallel.pipeline",
            remedy="set a smaller parallel.pipeline (an interleaved schedule has two stages on each rank)",
        )
    if chosen is not None:
        if len(chosen) != stages or sum(chosen) != len(blocks):
            raise UserError(
                f"the cuts {list(chosen)} are {len(chosen)} stages with {sum(chosen)} blocks; "
                f"there are {stages} stages, and the model has {len(blocks)} blocks",
                where="parallel.cuts",
                remedy=f"give {stages} numbers that sum to {len(blocks)}, or leave it out",
            )
        return list(chosen)
    sizes = [_size(block) for block in blocks]
    sizes[0] += sum(_size(model.get_submodule(name)) for name in (plan.embedding, *plan.before))
    sizes[-1] += sum(_size(model.get_submodule(name)) for name in (*plan.after, plan.head))
    return _balanced(sizes, stages)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Number of consecutive blocks in each stage that minimizes the sum of squares of the stages' sizes.

    Dynamic programming: the best split of ``n`` blocks into ``s`` stages follows from the best splits of fewer blocks.
    """
    total = [0, *accumulate(sizes)]
    # after s rounds, for s stages: blocks → (cost, blocks of each stage)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (cost, counts) in best.items():
            for stop in range(start + 1, len(sizes) + 1):
                candidate = (cost + (total[stop] - total[start]) ** 2, [*counts, stop - start])
                if stop not in longer or candidate[0] < longer[stop][0]:
                    longer[stop] = candidate
        best = longer
    return best[len(sizes)][1]


def is_tied(model: nn.Module, plan: PipelinePlan) -> bool:
    """Whether embedding and head share a weight, of which first and last stage then each have a copy."""
    return getattr(model.get_submodule(plan.head), "weight", 0) is model.get_submodule(plan.embedding).weight


def build_stage(model: nn.Module, plan: PipelinePlan, blocks_per_stage: Sequence[int], stage: int) -> nn.Module:
    """Build one stage: a copy of the model with only this stage's blocks. The first stage also has the embedding, the
    last the head.

    It is called like the full model, with ``input_ids`` as a keyword; later stages also take the hidden states
    (B, L, H), as the only positional argument. It returns hidden states; the last stage, the logits (B, L, V).

    Args:
        model: the full transformers model, on the meta device or not.
    """
    starts = [0, *accumulate(blocks_per_stage)]
    start, stop = list(pairwise(starts))[stage]
    stage_module = deepcopy(model)
    _keep_blocks(stage_module, plan, start, stop)
    received = None
    if stage > 0:
        received = StageInput()
        stage_module.set_submodule(plan.embedding, received)
        for name in plan.before:
            replacement = Zero() if isinstance(stage_module.get_submodule(name), nn.Embedding) else nn.Identity()
            stage_module.set_submodule(name, replacement)
    if stage < len(blocks_per_stage) - 1:
        for name in (*plan.after, plan.head):
            stage_module.set_submodule(name, nn.Identity())
    _add_stage_hooks(stage_module, received)
    return stage_module


def _keep_blocks(stage_module: nn.Module, plan: PipelinePlan, start: int, stop: int) -> None:
    """Remove the blocks of other stages. The rest keep their names, but are numbered from 0 for caches and masks."""
    blocks: Any = stage_module.get_submodule(plan.blocks)
    # iterating and slicing go by order, not by name
    blocks._modules = OrderedDict((str(number), blocks[number]) for number in range(start, stop))
    for number, block in enumerate(blocks):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    config: Any = stage_module.config
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = stop - start
    if kinds is not None:
        config.layer_types = kinds[start:stop]


def _add_stage_hooks(stage_module: nn.Module, received: StageInput | None) -> None:
    def take(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if received is not None:
            (received.hidden_BLH,) = args
        return (), kwargs

    def give(module: nn.Module, args: Any, outputs: Any) -> Tensor:
        if received is not None:
            received.hidden_BLH = None  # otherwise the graph of the last micro-batch would outlive the step
        return outputs[0] if isinstance(outputs, tuple) else outputs.logits

    stage_module.register_forward_pre_hook(take, with_kwargs=True)
    stage_module.register_forward_hook(give)


class LocalStages(nn.Module):
    """The stages of one rank as one module. Parameters and buffers have their full-model names.

    Args:
        stage_modules: from :func:`build_stage`.
        model: the full model.
    """

    def __init__(self, stage_modules: Sequence[nn.Module], model: nn.Module, plan: PipelinePlan) -> None:
        super().__init__()
        self.stage_modules = nn.ModuleList(stage_modules)
        # the head's copy of a tied weight is named as in the full model
        self._renamed = {f"{plan.head}.weight": f"{plan.embedding}.weight"} if is_tied(model, plan) else {}

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, or its placeholder. Muon finds the head with this method, as in a transformers model."""
        last: Any = self.stage_modules[-1]
        return last.get_output_embeddings()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.stage_modules:
            yield from self._named(part.named_parameters(prefix, recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for part in self.stage_modules:
            yield from self._named(part.named_buffers(prefix, recurse, remove_duplicate))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        states = [part.state_dict(*args, **kwargs) for part in self.stage_modules]
        return {name: tensor for state in states for name, tensor in self._named(state.items())}

    def _named(self, items: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        return ((self._renamed.get(name, name), value) for name, value in items)
