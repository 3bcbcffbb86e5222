"""Where each rank stands on the device mesh: pipeline × replicate × shard × context × tensor.

Ranks that talk most are neighbours: tensor-parallel ranks are numbered next to one another, pipeline stages furthest
apart. All but the tensor, context and pipeline axes are data parallel: they read different rows.
"""

import math
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drawbar.config.schema import ParallelSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks there are along each axis of the mesh."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @staticmethod
    def of(parallel: ParallelSection, world_size: int) -> "ParallelDims":
        """The degrees of ``world_size`` ranks; ``config.rules.check_world`` refuses what does not divide."""
        data = world_size // (parallel.pipeline * parallel.context * parallel.tensor)
        replicate = parallel.replicate if parallel.strategy == "fsdp" else data
        return ParallelDims(parallel.pipeline, replicate, data // replicate, parallel.context, parallel.tensor)

    @property
    def size(self) -> int:
        return math.prod(astuple(self))

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: how many parts a global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis → where this rank stands along it."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def dp_rank(self, rank: int) -> int:
        """Which part of a global batch this rank reads; that of all ranks that hold parts of one model."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def seed_rank(self, rank: int) -> int:
        """What a rank's random numbers depend on. Tensor-parallel ranks draw the same: some activations stand on all
        of them, and dropout must leave them equal."""
        return rank // self.tp

    def is_dp_leader(self, rank: int) -> bool:
        """Whether the rank speaks for those that hold parts of one model: it has the loss, on the last stage."""
        at = self.coordinates(rank)
        return at["tp"] == 0 and at["cp"] == 0 and at["pp"] == self.pp - 1


def replicas(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of this rank along the axes on which ranks hold the same buffers: all but the pipeline's."""
    return [mesh.get_group(axis) for axis in AXES if axis != "pp" and mesh[axis].size() > 1]


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """The mesh with all five axes; every rank calls it, after joining its ``Distributed``."""
    return init_device_mesh(device.type, astuple(dims), mesh_dim_names=AXES)
