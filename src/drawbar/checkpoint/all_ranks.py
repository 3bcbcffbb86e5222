"""Checkpoints that all ranks read together: one error for all, and copies for nodes that do not see rank 0's disk."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import MANIFEST_FILE, Snapshot, Unusable, file_entry
from drawbar.checkpoint.read import explain_read_errors, open_snapshot
from drawbar.checkpoint.space import check_space
from drawbar.distributed.file_broadcast import FileBroadcast
from drawbar.distributed.process_group import Distributed
from drawbar.errors import UserError
from drawbar.util.atomic_files import draft_of

T = TypeVar("T")


@contextmanager
def read_on_all_ranks(path: Path, world: Distributed) -> Iterator[Snapshot]:
    """Context with what ``open_snapshot`` returns, on every rank. Nodes that do not see the files get a copy, which is
    deleted at the end, so read the tensors inside. Collective.

    Raises:
        Unusable: it is damaged, or of another format; on every rank.
        UserError: the disk cannot be read on some rank; on every rank.
    """
    with seen_by_all_nodes(path, MANIFEST_FILE, world) as folder:
        yield run_on_all_ranks(path, world, f"reading {path}", lambda: open_snapshot(folder))


def run_on_all_ranks(path: Path, world: Distributed, activity: str, work: Callable[[], T]) -> T:
    """Call ``work`` on every rank, and raise on all of them if it fails on any. Collective. ``work`` must call none of
    the collectives of ``world``, as it runs inside ``world.working``; where it calls those of another group, and fails
    on a rank before them, the others wait for that group's timeout.

    Args:
        path: of the checkpoint or folder that it reads.

    Raises:
        Unusable, UserError: on every rank, where ``work`` has raised one on any. An OSError becomes a UserError that
            says what could not be read (a ``work`` that writes must explain its own errors).
    """
    failure: Unusable | UserError | None = None
    with world.working(activity):
        try:
            with explain_read_errors(path):
                result = work()
        except (Unusable, UserError) as error:
            failure = error
    failures = [found for found in world.all_gather(failure) if found is not None]
    if failures:  # that a disk cannot be read counts first: it says nothing about the checkpoint
        raise next((found for found in failures if isinstance(found, UserError)), failures[0])
    return result


@contextmanager
def seen_by_all_nodes(folder: Path, mark: str, world: Distributed) -> Iterator[Path]:
    """Context with a folder of rank 0's disk, on every rank: the folder itself, or, on a node that does not see it, a
    copy beside its place, which is deleted at the end. Collective.

    Args:
        mark: a file in it whose content tells it from any other: where that is the same, the folder is.

    Raises:
        UserError: rank 0 cannot read it, or a node has no room for it; on every rank.
    """
    nodes = world.all_gather((_digest(folder / mark), world.rank_info.local_rank == 0))
    sees = [digest == nodes[0][0] for digest, _ in nodes]
    leaders = [max(rank for rank in range(other + 1) if nodes[rank][1]) for other in range(world.size)]
    targets = sorted({leaders[rank] for rank in range(world.size) if not sees[rank]} - {0})
    if not targets:
        yield folder
        return
    activity = f"copying {folder} to nodes that do not see it"
    found = run_on_all_ranks(folder, world, activity, lambda: _sizes(folder) if world.is_rank0 else {})
    sizes = world.all_gather(found)[0]
    broadcast = FileBroadcast(world, targets)
    draft = draft_of(folder) if world.rank in targets else None

    def make() -> None:
        if draft is not None:
            check_space(folder.parent, sum(sizes.values()))
            with CheckpointDirectory(folder.parent).explain_write_errors(folder.name, draft):
                draft.mkdir(parents=True)

    def send() -> None:
        if draft is not None:
            with CheckpointDirectory(folder.parent).explain_write_errors(folder.name, draft):
                broadcast.send(draft, sizes)
        elif world.is_rank0:
            broadcast.send(folder, sizes)

    try:
        for work in (make, send):
            run_on_all_ranks(folder, world, activity, work)
        drafts = world.all_gather(draft)
        yield folder if sees[world.rank] else drafts[leaders[world.rank]] or folder
        world.barrier(activity)  # other ranks of this node may still open what the next lines delete
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _digest(path: Path) -> str | None:
    """Of a file's content; None where it cannot be read."""
    try:
        return file_entry(path).sha256
    except OSError:
        return None
