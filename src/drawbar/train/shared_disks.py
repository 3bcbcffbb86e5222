"""Which nodes of a run share a disk: there, one rank finds, commits and deletes checkpoints."""

import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drawbar.checkpoint.space import check_writable
from drawbar.config.schema.run_config import CheckpointSection
from drawbar.distributed.process_group import Distributed
from drawbar.errors import UserError
from drawbar.runtime.log import logger


@dataclass(frozen=True)
class Disks:
    """Which ranks write configuration, tokenizer and checkpoints: one for each distinct disk. (Rank 0 alone
    writes metrics, scores and status. Every rank writes its own log, profile and part of a checkpoint.)"""

    rank: int
    leader_of: tuple[int, ...]
    """For each rank, the leader of its disk: the lowest rank that sees it."""

    @cached_property
    def disk_leaders(self) -> tuple[int, ...]:
        """The ranks that find, commit and delete checkpoints, one per file system; rank 0 is the first."""
        return tuple(sorted(set(self.leader_of)))

    @property
    def is_disk_leader(self) -> bool:
        """Whether this rank is one of ``disk_leaders``."""
        return self.leader_of[self.rank] == self.rank

    @property
    def shared(self) -> bool:
        """Whether all nodes see the same run directory."""
        return len(self.disk_leaders) == 1

    @property
    def ranks_by_disk(self) -> tuple[tuple[int, ...], ...]:
        """For each disk, in the order of ``disk_leaders``, the ranks that see it."""
        return tuple(
            tuple(rank for rank, other in enumerate(self.leader_of) if other == leader) for leader in self.disk_leaders
        )


def find_shared_disks(folder: Path, world: Distributed, config: CheckpointSection | None = None) -> Disks:
    """Find out which nodes share ``folder``: each creates a file in it, and checks for the files of nodes with lower
    ranks.

    Raises:
        UserError: a node cannot write there; or they share no disk, and parts are to be copied to an object store.
    """
    disks = _find(folder, world)
    if config is not None and config.layout == "parts" and config.remote is not None and not disks.shared:
        raise UserError(
            f"the folder of runs is on {len(disks.disk_leaders)} disks here, and none of them would have all parts of "
            "a checkpoint, to copy it to an object store",
            where="checkpoint.layout=parts, checkpoint.remote",
            remedy="set checkpoint.layout=whole, checkpoint.remote=null, or run.dir to a folder of a shared disk",
        )
    return disks


def check_disk_count(config: CheckpointSection, disks: Disks, begins_at_step_0: bool) -> None:
    """Compare ``checkpoint.copies`` with the number of disks.

    Args:
        begins_at_step_0: whether the run does. One that has a checkpoint must not end because a node is lost.

    Raises:
        UserError: there are fewer disks, and the run begins at step 0.
    """
    count = len(disks.disk_leaders)
    if config.layout != "parts" or disks.shared or config.copies <= count:
        return
    what = f"parts of checkpoints are to be on {config.copies} disks, and the nodes have {count}"
    if begins_at_step_0:
        remedy = f"set checkpoint.copies={count}, or use more nodes"
        raise UserError(what, where="checkpoint.copies", remedy=remedy)
    logger.warning("%s: each disk gets all parts until there are more", what)


def _find(folder: Path, world: Distributed) -> Disks:
    if not world.rank_info.spans_nodes:
        return Disks(world.rank, (0,) * world.size)
    leads_node = world.rank_info.local_rank == 0
    node_leaders = [rank for rank, found in enumerate(world.all_gather(leads_node)) if found]
    tag = world.from_rank0(uuid.uuid4, "looking for a shared disk")
    own = folder / f".{tag}-{world.rank}"
    if leads_node:
        check_writable(folder)  # first: its error says more than that of touch()
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    world.barrier("looking for a shared disk")
    # only one rank of a node looks: a network file system may show another process of the node something else
    seen = next(rank for rank in node_leaders if (folder / f".{tag}-{rank}").exists()) if leads_node else None
    seen_by_rank = world.all_gather(seen)
    if leads_node:
        own.unlink()  # everybody has looked
    node_leader_of = [max(leader for leader in node_leaders if leader <= rank) for rank in range(world.size)]
    found = (seen_by_rank[leader] for leader in node_leader_of)
    return Disks(world.rank, tuple(leader for leader in found if leader is not None))
