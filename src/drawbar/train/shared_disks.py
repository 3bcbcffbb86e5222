"""Nodes without a shared disk: the run directory is then that of rank 0."""

import uuid
from pathlib import Path

from drawbar.checkpoint.all_ranks import run_on_all_ranks
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.space import check_writable
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import node_name
from drawbar.errors import UserError


def check_nodes_share_disk(config: RunConfig, world: Distributed) -> bool:
    """Whether all nodes see the same folder of runs. If not, checkpoints must be on the disk of rank 0. Collective.

    Raises:
        UserError: a node cannot write there; the nodes share no disk, which ``checkpoint.layout: parts`` needs; or
            another node's disk has a newer checkpoint of this run.
    """
    if not world.rank_info.spans_nodes or _see_one_folder(Path(config.run.dir), world):
        return True
    if config.checkpoint.layout == "parts":
        raise UserError(
            "the nodes share no disk, and each process would write its part of a checkpoint to its own",
            where="checkpoint.layout=parts",
            remedy="set run.dir to a folder on a shared disk, or checkpoint.layout=whole, where only rank 0 writes",
        )
    directory = CheckpointDirectory(config.run_dir / "checkpoints")
    steps = run_on_all_ranks(directory.path, world, "looking at the checkpoints of each node", directory.steps)
    newest = world.all_gather((max(steps, default=-1), node_name()))
    step, node = max(newest, key=lambda one: one[0])
    if step > newest[0][0] and config.checkpoint.remote is None:  # otherwise rank 0 fetches what it lacks
        raise UserError(
            f"the nodes share no disk, and the newest checkpoint of this run, of step {step}, is on {node}, not on "
            f"{newest[0][1]}, where rank 0 is now",
            where=str(config.run_dir),
            remedy=f"run rank 0 on {node}, or copy the run directory; with run.dir on a shared disk, or copies in an "
            "object store (checkpoint.remote), rank 0 may be anywhere",
        )
    return False


def _see_one_folder(folder: Path, world: Distributed) -> bool:
    """Whether every node sees a file that rank 0 creates there."""
    leads_node = world.rank_info.local_rank == 0
    name = world.from_rank0(lambda: f".{uuid.uuid4()}", "looking for a shared disk")
    with world.barrier_after("looking for a shared disk"):
        if leads_node:
            check_writable(folder)  # first: its error is more specific than that of touch()
            folder.mkdir(parents=True, exist_ok=True)
        if world.is_rank0:
            (folder / name).touch()
    # only one rank per node looks: a network file system may show different contents to other processes
    found = world.all_gather(not leads_node or (folder / name).exists())
    if world.is_rank0:
        (folder / name).unlink()  # all ranks have looked
    return all(found)
