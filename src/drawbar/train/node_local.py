"""Runs whose nodes share no disk: each node has its own run directory, with complete checkpoints, or with parts of them
and copies of other nodes' parts.

So the run survives the loss of nodes, the first included. On resume, when nodes may be reordered or replaced, the
newest checkpoint that the disks have, alone or together, is used, and is copied to the disks that lack it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drawbar.checkpoint.directory import BEST_FILE, CheckpointDirectory
from drawbar.checkpoint.format import MANIFEST_FILE, FileEntry, file_entry
from drawbar.checkpoint.load import read_state
from drawbar.config.io.load_config import SCRIPT_FILE
from drawbar.distributed.process_group import Distributed
from drawbar.models.folder import INITIAL_MODEL
from drawbar.runtime.log import logger
from drawbar.train.memory_probe import MICRO_BATCH_FILE
from drawbar.train.part_gathering import gather_parts
from drawbar.train.rundir import RunStart
from drawbar.train.shared_disks import Disks
from drawbar.util.atomic_files import sync

_METRICS = "metrics.jsonl"
_RUN_FILES = (
    "config.yaml",
    "task.json",
    SCRIPT_FILE,
    MICRO_BATCH_FILE,
    _METRICS,
    "tokenizer/*",
    f"{INITIAL_MODEL}/*",
    "tracking/*.json",
    f"checkpoints/{BEST_FILE}",
)
"""Files of the run that are copied between disks together with the checkpoints."""
_SEARCHING = "looking for the newest checkpoint"
_COPYING = "copying the run to the disks that lack it"


@dataclass(frozen=True)
class _DiskState:
    """The files of the run on one file system: newest and best checkpoint, and the other files."""

    start: RunStart
    step: int
    """-1 for none."""
    checkpoints: dict[Path, tuple[bytes, list[str]]]
    """Of the newest and of the best one, by folder: manifest (equal manifests: equal checkpoints) and file names."""
    files: dict[Path, FileEntry]
    """The other files of the run (``_RUN_FILES``)."""

    @property
    def sort_key(self) -> tuple[int, int]:
        """Larger is better: the newest step, then the size of ``metrics.jsonl``, to which only rank 0 adds lines."""
        return self.step, max((file.size for path, file in self.files.items() if path.name == _METRICS), default=0)


def find_start_on_all_disks(
    find: Callable[[], RunStart],
    disks: Disks,
    world: Distributed,
    runs: Iterable[Path] = (),
    resume: str = "auto",
    lock: Callable[[], None] = lambda: None,
) -> RunStart:
    """Find where the run begins, and copy that checkpoint and the best one to every disk that lacks them.

    Args:
        find: decides for one disk.
        runs: the run directories that it looks at. Where nodes share no disk, checkpoints there of which each disk has
            some parts are first put together on all disks.
        resume: as for ``find_start``.
        lock: called before a disk is looked at: nobody else may write there.

    Raises:
        UserError: there are checkpoints, and none can be used (every rank raises this).
    """

    def lock_and_find() -> RunStart:
        lock()
        return find()

    if disks.shared:
        start = world.from_rank0(lock_and_find, _SEARCHING)
    else:
        with world.working(_SEARCHING):
            if disks.is_disk_leader:
                lock()
        for run in runs:
            gather_parts(run, resume, disks, world)
        start = _choose_start(find, disks, world)
    if start.refusal is not None:
        raise start.refusal
    return start


def _choose_start(find: Callable[[], RunStart], disks: Disks, world: Distributed) -> RunStart:
    """Choose the start of the disk with the newest checkpoint, and copy that to all disks. In the start that is
    returned, ``unusable`` are those of this rank's disk."""
    with world.working(_SEARCHING):
        own = _describe_disk(find()) if disks.is_disk_leader else None
    shared = world.all_gather(own)
    disk_states = {rank: disk_state for rank, disk_state in enumerate(shared) if disk_state is not None}
    source = max(disk_states, key=lambda rank: (disk_states[rank].sort_key, -rank))
    newest = disk_states[source]
    if newest.start.checkpoint is None:
        refused = [disk_state.start for disk_state in disk_states.values() if disk_state.start.refusal is not None]
        if refused:
            return refused[0]
        logger.info("each node has a disk of its own, and none has a checkpoint of this run: it begins anew")
    for target, disk_state in disk_states.items():
        if disk_state.step < newest.step:
            logger.info(
                "the disk of rank %d lacks %s, and gets it from rank %d", target, newest.start.checkpoint, source
            )
        if target != source:
            _copy_missing_files(disk_state, newest, source, target, world)
    damaged = {} if own is None else own.start.unusable
    left = {path: reason for path, reason in damaged.items() if path not in newest.checkpoints}
    return replace(newest.start, unusable=left, older=())  # the other disks may lack older ones


def _describe_disk(start: RunStart) -> _DiskState:
    if start.checkpoint is None:
        return _DiskState(start, -1, {}, {})
    directory = CheckpointDirectory(start.checkpoint.parent)
    progress = read_state(start.checkpoint)["progress"]
    step, best_step = progress["step"], progress["best_step"]  # not from best.json, which may be damaged or out of date
    # where the newest is the best one, it was verified when it was found
    best = directory.verified_folder(best_step) if best_step not in (None, step) else None
    checkpoints = {}
    for folder in (start.checkpoint, best):
        if folder is not None:
            names = sorted(path.name for path in folder.iterdir())
            checkpoints[folder] = ((folder / MANIFEST_FILE).read_bytes(), names)
    source_run_dir = directory.path.parent
    files = [path for pattern in _RUN_FILES for path in sorted(source_run_dir.glob(pattern)) if path.is_file()]
    return _DiskState(start, step, checkpoints, {path: file_entry(path) for path in files})


def _copy_missing_files(
    disk_state: _DiskState, newest: _DiskState, source: int, target: int, world: Distributed
) -> None:
    """Copy every missing or different file from rank ``source`` to rank ``target``. The other ranks wait."""
    for folder, (manifest, names) in newest.checkpoints.items():
        if folder in disk_state.checkpoints and disk_state.checkpoints[folder][0] == manifest:
            continue
        send = partial(_send, names, source, target, world)
        with world.barrier_after(_COPYING):
            if world.rank == target:
                CheckpointDirectory(folder.parent).write_folder(folder.name, send)
            elif world.rank == source:
                send(folder)
    with world.barrier_after(_COPYING):
        for path, entry in newest.files.items():
            if disk_state.files.get(path) != entry and world.rank in (source, target):
                path.parent.mkdir(parents=True, exist_ok=True)
                world.send_file(path, source, target)


def _send(names: list[str], source: int, target: int, world: Distributed, folder: Path) -> None:
    """Copy the files ``names`` of ``folder`` on rank ``source`` into a new ``folder`` on rank ``target``."""
    if world.rank == target:
        folder.mkdir()
    for name in names:
        world.send_file(folder / name, source, target)
    if world.rank == target:
        for name in names:
            sync(folder / name)
        sync(folder)
