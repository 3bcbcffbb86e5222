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
    """Which ranks write configuration, tokenizer and checkpoints: one for each distinct disk. (Metrics, scores and
    status rank 0 alone writes; its log, its profile and its part of a checkpoint every rank itself.)"""

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


def check_copies(config: CheckpointSection, disks: Disks, begins_at_step_0: bool) -> None:
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
    leads = world.rank_info.local_rank == 0
    leaders = [rank for rank, found in enumerate(world.all_gather(leads)) if found]
    tag = world.from_rank0(uuid.uuid4, "looking for a shared disk")
    own = folder / f".{tag}-{world.rank}"
    if leads:
        check_writable(folder)  # first: its error says more than that of touch()
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    world.barrier("looking for a shared disk")
    # only the leaders look: a network file system may show another process of the node something else
    writer = next(rank for rank in leaders if (folder / f".{tag}-{rank}").exists()) if leads else None
    writers = world.all_gather(writer)
    if leads:
        own.unlink()  # everybody has looked
    leader_of = [max(leader for leader in leaders if leader <= rank) for rank in range(world.size)]
    return Disks(world.rank, tuple(writer for leader in leader_of if (writer := writers[leader]) is not None))
