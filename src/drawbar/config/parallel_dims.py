"""``ParallelDims``: sizes of the device mesh's axes (pipeline × replicate × shard × context × tensor), and the
coordinates of each rank.

Ranks that communicate most are neighbours: tensor-parallel ranks have adjacent numbers, pipeline stages are furthest
apart. The replicate and shard axes are data parallel: ranks that differ along one of these read different rows.
"""

import math
from dataclasses import astuple, dataclass

from drawbar.config.schema.run_config import ParallelSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks along each axis of the mesh."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @staticmethod
    def of(parallel: ParallelSection, world_size: int) -> "ParallelDims":
        """The degrees for ``world_size`` ranks, if these divide evenly (``config.rules.rule_table.check_world``)."""
        data = world_size // parallel.model_ranks
        replicate = parallel.replicate if parallel.features.shards_parameters else data
        return ParallelDims(parallel.pipeline, replicate, data // replicate, parallel.context, parallel.tensor)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(astuple(self))

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, over which a global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one replica, not counting sharding over data-parallel ranks."""
        return self.pp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis → coordinate of the rank."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def dp_rank(self, rank: int) -> int:
        """The part of a global batch that this rank reads; the same for all ranks that hold parts of one model."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def seed_rank(self, rank: int) -> int:
        """Mixed into the RNG seed. Tensor-parallel ranks share it: some activations are replicated on all
        of these ranks, and dropout must leave these activations equal."""
        return rank // self.tp

    def is_dp_leader(self, rank: int) -> bool:
        """Whether this is the data-parallel leader: tp rank 0, cp rank 0, last pipeline stage. It has the loss."""
        at = self.coordinates(rank)
        return at["tp"] == 0 and at["cp"] == 0 and at["pp"] == self.pp - 1

    def is_stage_leader(self, rank: int) -> bool:
        """Whether this is the first of the ranks that hold the same pipeline stage."""
        return all(number == 0 for axis, number in self.coordinates(rank).items() if axis != "pp")
