"""Replicas: ranks that hold the same shard of a tensor. They are never synchronized again, so one bit's difference
grows."""

from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from drawbar.distributed.process_group import Distributed

ShardKey = tuple[str, tuple[tuple[int, int], ...]]
"""A tensor's name, and its place on each axis of the mesh that shards it."""


def unequal_replicas(
    tensors: Mapping[str, Tensor], world: Distributed, ties: Sequence[Sequence[str]] = ()
) -> dict[str, list[list[int]]]:
    """Find the tensors that differ, in any bit, between ranks that hold the same shard. Collective.

    Args:
        tensors: this rank's, by a name that is the same on all ranks.
        ties: names of the same tensor on different ranks, such as a pipeline's copies of a tied weight.

    Returns:
        On rank 0, for each tensor that differs, the ranks of each version, beginning with the version that most have;
        an empty dict elsewhere.
    """
    digests = {_shard_key(name, tensor): _digest(tensor) for name, tensor in tensors.items()}
    first_names = {name: names[0] for names in ties for name in names}
    seen: dict[ShardKey, dict[bytes, list[int]]] = {}
    for rank, report in enumerate(world.gather(digests) or []):
        for (name, place), digest in report.items():
            seen.setdefault((first_names.get(name, name), place), {}).setdefault(digest, []).append(rank)
    return {name: sorted(found.values(), key=len, reverse=True) for (name, _), found in seen.items() if len(found) > 1}


def _shard_key(name: str, tensor: Tensor) -> ShardKey:
    if not isinstance(tensor, DTensor):
        return name, ()
    at = tensor.device_mesh.get_coordinate() or []
    cut = [(axis, at[axis]) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return name, tuple(cut)


def _digest(tensor: Tensor) -> bytes:
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    numbers = shard.detach().cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_128_digest(numbers.numpy())
