"""Runs whose nodes have disks of their own: each keeps a run directory, and the first node's has the checkpoints.

A run that goes on may have another first node, or a new one. So every node says which checkpoint it has; the newest
counts, and goes to the nodes that lack it. At each save the other nodes note who has the checkpoint: if that node is
missing the next time, the run says so instead of beginning anew.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import MANIFEST_FILE
from drawbar.checkpoint.load import read_state
from drawbar.checkpoint.save import sync
from drawbar.checkpoint.space import check_writable
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.dist import World
from drawbar.runtime.env import node_name
from drawbar.runtime.files import write_whole
from drawbar.runtime.log import logger
from drawbar.train.rundir import Start

NOTE_FILE = "saved-by.json"
"""On a node without the checkpoints: which node has them, and the newest one's step."""
_RUN_FILES = ("config.yaml", "task.json", "metrics.jsonl", "tokenizer/*")
"""What goes with a checkpoint, besides its own files."""


@dataclass(frozen=True)
class Disks:
    """Where the run directory is, as one rank sees it."""

    shared: bool
    """All nodes see the same one."""
    keeper: bool
    """This rank looks after the run directory on its disk."""
    first_host: str = ""
    """The machine of rank 0, which writes the checkpoints."""


@dataclass(frozen=True)
class _Offer:
    """What a keeper has."""

    host: str
    start: Start
    step: int
    """-1 for none."""
    manifest: bytes
    """Of the checkpoint: two with the same manifest are the same."""
    files: tuple[Path, ...]
    """Of the run and its checkpoint."""
    noted: tuple[int, str]
    """The newest checkpoint that this node knows of and does not have: its step (-1 for none), and the host."""


def look_at_disks(folder: Path, world: World) -> Disks:
    """Whether all nodes see the same ``folder``: rank 0 writes there, and the others look."""
    if not world.place.spans_nodes:
        return Disks(shared=True, keeper=world.first)
    probe = folder / world.from_first(lambda: f".{uuid.uuid4()}")
    if world.first:
        check_writable(folder)  # before a bare error of touch(), and it makes the folder
        probe.touch()
    world.barrier("looking for a shared disk")
    seen = probe.exists()
    shared = world.sum(not seen) == 0  # everybody has looked
    if world.first:
        probe.unlink()
    keeper = world.first or (world.place.local_rank == 0 and not seen)
    return Disks(shared, keeper, world.nodes[0])


def find_start_everywhere(find: Callable[[], Start], run_dir: Path, disks: Disks, world: World) -> Start:
    """Where the run begins. Afterwards every node has that checkpoint.

    Args:
        find: decides for one disk.

    Raises:
        UserError: no node has a checkpoint, though there were some.
    """
    if disks.shared:
        return world.from_first(find)
    offers = world.gather(_offer(find(), run_dir) if disks.keeper else None)
    source, best, lacking = world.from_first(lambda: _choose(offers or [], run_dir))
    for target in lacking:
        logger.info("the node of rank %d lacks %s, and gets it from rank %d's", target, best.start.checkpoint, source)
        _copy(best, run_dir, source, target, world)
    return best.start


def note_save(run_dir: Path, step: int, disks: Disks) -> None:
    """Note on this node that the first one saves. Not for the first."""
    if disks.keeper:
        write_whole(run_dir / NOTE_FILE, json.dumps({"step": step, "host": disks.first_host}))


def _offer(start: Start, run_dir: Path) -> _Offer:
    noted = (-1, "")
    if (run_dir / NOTE_FILE).exists():
        note = json.loads((run_dir / NOTE_FILE).read_text())
        noted = (note["step"], note["host"])
    if start.checkpoint is None:
        return _Offer(node_name(), start, -1, b"", (), noted)
    origin = start.checkpoint.parent.parent
    files = [path for pattern in _RUN_FILES for path in sorted(origin.glob(pattern)) if path.is_file()]
    files += sorted(start.checkpoint.iterdir())
    manifest = (start.checkpoint / MANIFEST_FILE).read_bytes()
    return _Offer(node_name(), start, read_state(start.checkpoint)["progress"]["step"], manifest, tuple(files), noted)


def _choose(offers: list[_Offer | None], run_dir: Path) -> tuple[int, _Offer, list[int]]:
    """Which rank's offer counts, the offer, and the ranks whose disks lack it."""
    keepers = {rank: offer for rank, offer in enumerate(offers) if offer is not None}
    source = max(keepers, key=lambda rank: (keepers[rank].step, -rank))
    best = keepers[source]
    hosts = sorted({offer.host for offer in keepers.values()})
    noted, host = max(offer.noted for offer in keepers.values())
    is_missing = noted > best.step and host not in hosts  # else it never came to be, or is damaged
    if is_missing and best.step == -1:
        raise UserError(
            f"no node of this job has a checkpoint of {run_dir}: {host} has them, up to step {noted}",
            where=", ".join(hosts),
            remedy=f"give the job {host} again, or copy {run_dir} from there to one of these nodes; "
            f"or remove {run_dir} everywhere, to begin anew",
            exit_code=ExitCode.FAILED,
        )
    if is_missing:
        logger.warning("%s may have step %d, but is not in this job: going on from %d", host, noted, best.step)
    lacking = [rank for rank, offer in keepers.items() if offer.manifest != best.manifest]
    return source, best, lacking


def _copy(best: _Offer, run_dir: Path, source: int, target: int, world: World) -> None:
    checkpoint = best.start.checkpoint
    assert checkpoint is not None
    if world.rank not in (source, target):
        return
    for path in best.files:
        if path.parent != checkpoint:
            path.parent.mkdir(parents=True, exist_ok=True)
            world.send_file(path, source, target)
    own = [path for path in best.files if path.parent == checkpoint]
    if world.rank == source:
        for path in own:
            world.send_file(path, source, target)
        return

    def receive(folder: Path) -> None:
        folder.mkdir()
        for path in own:
            world.send_file(folder / path.name, source, target)
        sync(folder)

    directory = CheckpointDirectory(checkpoint.parent)
    directory.place(checkpoint.name, receive)
    record = directory.best_record()
    directory.rotate(1, protect=set() if record is None else {record.step})  # a copy is only there to go on from
