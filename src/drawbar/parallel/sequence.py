"""Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198): between tensor-parallel layers, each rank has a
shard of the sequence, so norms and residuals are neither stored nor computed twice.

Attention and the feed-forward network each gather the sequence first, and then scatter the sum of the ranks' outputs
along it. The embedding, the last norm and the head see the full sequence, as masks are made for its full length.
Without gradients (evaluation, generation) nothing is sharded.

Tensor-parallel ranks share one RNG state, but in the blocks each uses its own: shards may differ in length, so
dropout would advance a shared generator by different amounts, and the ranks' RNG states would diverge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

SEQUENCE = Shard(1)


@dataclass
class _SequenceSharding:
    """The mesh, and the full sequence length of the current forward pass, which gathering needs."""

    mesh: DeviceMesh
    length: int = 0

    def scatter(self, x_BLH: Tensor) -> Tensor:
        """This rank's shard, which may be empty if the sequence is very short."""
        self.length = x_BLH.shape[1]
        return DTensor.from_local(x_BLH, self.mesh, [Replicate()]).redistribute(placements=[SEQUENCE]).to_local()

    def gather(self, x_BlH: Tensor, gradient: Placement) -> Tensor:
        """The full sequence, gathered from the shards of all ranks (l tokens each).

        Args:
            gradient: the placement of the result's gradient.
        """
        batch, _, width = x_BlH.shape
        shape, stride = torch.Size((batch, self.length, width)), (self.length * width, width, 1)
        cut = DTensor.from_local(x_BlH.contiguous(), self.mesh, [SEQUENCE], shape=shape, stride=stride)
        whole: Tensor = cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])
        return whole.contiguous()  # torch 2.11 returns the ranks' shards concatenated in memory


class _PerRankRng:
    """Uses a per-rank RNG seed between ``begin`` and ``end``; ``end`` restores the RNG state shared by all ranks."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._generator: Any = torch.cuda if device.type == "cuda" else torch
        self._rank = rank
        self._shared = torch.empty(0)

    @torch.compiler.disable
    def begin(self) -> None:
        seed = int(torch.randint(2**62, ()))  # on the host: the same on all ranks, different each time
        self._shared = self._generator.get_rng_state()
        self._generator.manual_seed(seed + self._rank)

    @torch.compiler.disable
    def end(self) -> None:
        self._generator.set_rng_state(self._shared)


def shard_sequence_in_blocks(blocks: Sequence[nn.Module], sublayers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard activations along the sequence from the first of these blocks to the last, in place.

    Args:
        blocks: consecutive repeated blocks, whose first argument is the hidden states (B, L, H).
        sublayers: the attention and feed-forward modules of the blocks, which need the full sequence; their
            row-parallel linear layers scatter it again.
    """
    cut = _SequenceSharding(mesh)
    randomness = _PerRankRng(torch.device(mesh.device_type), mesh.get_local_rank())

    def scatter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        randomness.begin()
        return _on_states(cut.scatter, args, kwargs)

    def gather(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # the linear layers inside return partial gradients, which the backward of this gather sums once
        return _on_states(lambda x: cut.gather(x, Partial()), args, kwargs) if torch.is_grad_enabled() else None

    def finish(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        randomness.end()
        if isinstance(output, tuple):
            return (cut.gather(output[0], Replicate()), *output[1:])
        return cut.gather(output, Replicate())

    blocks[0].register_forward_pre_hook(scatter, with_kwargs=True)
    for sublayer in sublayers:
        sublayer.register_forward_pre_hook(gather, with_kwargs=True)
    blocks[-1].register_forward_hook(finish)


def sum_input_gradients_once(sublayers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Without sequence shards: sum the partial gradients of each sublayer's input in one all-reduce, instead of one per
    linear layer that takes it (queries, keys, values), in place.

    Args:
        sublayers: as in ``shard_sequence_in_blocks``; their column-parallel linear layers must not sum.
    """

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return _on_states(partial(with_summed_gradient, mesh=mesh), args, kwargs) if torch.is_grad_enabled() else None

    for sublayer in sublayers:
        sublayer.register_forward_pre_hook(enter, with_kwargs=True)


def with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity for a tensor that all ranks have; its gradient is summed over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def _on_states(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block or sublayer, with ``function`` applied to the hidden states."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}
