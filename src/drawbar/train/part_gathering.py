"""Puts a checkpoint together on every disk before a run resumes, where nodes share no disk and each disk has only some
of its parts (``Manifest.disks``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from drawbar.checkpoint.checked_files import read_manifest
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.folder_moves import TMP
from drawbar.checkpoint.format import MANIFEST_FILE, REPLACED, STATE_FILE, STEP_NAME, Manifest, Unusable, step_name
from drawbar.checkpoint.inspection import damaged_files
from drawbar.checkpoint.load import folders_in, read_state, run_on_all_ranks
from drawbar.checkpoint.space import check_space
from drawbar.distributed.file_exchange import FileExchange
from drawbar.distributed.process_group import Distributed
from drawbar.runtime.log import logger
from drawbar.train.shared_disks import Disks
from drawbar.util.atomic_files import link_or_copy, sync, write_durably

T = TypeVar("T")

_SUFFIXES = ("", REPLACED, TMP)
"""Suffixes of the folders in which a step's files may be. A temporary folder counts, too: if all ranks were killed
after some disks had renamed theirs, the others have a temporary folder with all that belongs there."""


@dataclass(frozen=True)
class _LocalCopy:
    """What one disk has of a step."""

    folder: str
    """The name of the folder."""
    manifest: Manifest
    intact: frozenset[str]
    """The files that match their checksums."""

    def has(self, name: str, manifest: Manifest) -> bool:
        """Whether the file is there as ``manifest`` lists it; that differs from this copy's manifest in ``state.json``
        alone (``_key``)."""
        return name in self.intact and (name != STATE_FILE or self.manifest.files[name] == manifest.files[name])


@dataclass(frozen=True)
class _Union:
    """One checkpoint, and which of its files each disk has."""

    manifest: Manifest
    copies: dict[int, _LocalCopy]
    """What each disk has of it, by the rank that writes there."""

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """For each file, the ranks whose disks have it."""
        return {
            name: [rank for rank, copy in self.copies.items() if copy.has(name, self.manifest)]
            for name in self.manifest.sizes()
        }

    def missing(self) -> list[str]:
        """The files that are on no disk."""
        return [name for name, ranks in self.holders.items() if not ranks]

    def lacking(self, rank: int) -> list[str]:
        """The files that a disk lacks."""
        copy = self.copies.get(rank)
        return [name for name in self.manifest.sizes() if copy is None or not copy.has(name, self.manifest)]

    def sent_by(self, source: int, leaders: tuple[int, ...]) -> dict[int, list[str]]:
        """For each rank in ``leaders``, the files that ``source`` sends to it. Disks that have the same files share the
        sending."""
        sent: dict[int, list[str]] = {}
        for place, target in enumerate(leaders):
            for number, name in enumerate(self.lacking(target)):
                holders = self.holders[name]
                if holders[(place + number) % len(holders)] == source:
                    sent.setdefault(target, []).append(name)
        return sent


def gather_parts(run_dir: Path, resume: str, disks: Disks, world: Distributed) -> None:
    """Put together, on every disk, the newest checkpoint of which the disks have all parts, the best one, and the one
    that ``resume`` names. Damaged files are replaced by intact ones of other disks. Collective.

    Checkpoints that are whole on one disk, or in parts on a shared one, are left as they are. A disk that has nothing
    of the run gets its configuration, too: without it, its folder would not be a run.

    Raises:
        UserError: a disk is too small, or fails; on every rank.
    """
    directory = CheckpointDirectory(run_dir / "checkpoints")
    gathering = _Gathering(directory, disks, world)
    steps = gathering.find_steps()
    if steps:
        gathering.copy_config(run_dir / "config.yaml")
    newest = next((step for step in reversed(steps) if gathering.put_together(step)), None)
    if newest is None:
        return
    number = resume.removeprefix("step-")
    wanted = {int(number)} if number.isdecimal() else set[int]()
    state = gathering.on_disks("looking for the best checkpoint", lambda: _read_state(directory.path, newest))
    best = next(values for values in state if values is not None)["progress"]["best_step"]
    for step in (wanted | {best}) & {*steps} - {newest}:
        gathering.put_together(step)


def _read_state(path: Path, step: int) -> dict[str, Any]:
    return read_state(path / step_name(step))


class _Gathering:
    """The checkpoints of one run on the disks of all nodes. Public methods are collective; most private ones run inside
    ``on_disks``, on the ranks that write to a disk."""

    def __init__(self, directory: CheckpointDirectory, disks: Disks, world: Distributed) -> None:
        self._directory = directory
        self._disks = disks
        self._world = world
        self._exchange: FileExchange | None = None

    def on_disks(self, activity: str, work: Callable[[], T]) -> list[T | None]:
        """Call ``work`` on the ranks that write to a disk. Returns the results of all ranks (None for those that do not
        write), on every rank. An error of one is raised on all."""
        result = run_on_all_ranks(
            self._directory.path, self._world, activity, lambda: work() if self._disks.is_disk_leader else None
        )
        return self._world.all_gather(result)

    def find_steps(self) -> list[int]:
        """The steps, ascending, of which some disk has a folder whose parts are on several disks by its manifest."""
        found = self.on_disks("looking for parts of checkpoints", self._own_steps)
        return sorted({step for steps in found for step in steps or ()})

    def _own_steps(self) -> set[int]:
        names = {name.removesuffix(suffix) for suffix in _SUFFIXES for name in folders_in(self._directory.path)}
        steps = {int(match[1]) for name in names if (match := STEP_NAME.fullmatch(name))}
        return {step for step in steps if self._folders(step)}

    def _folders(self, step: int) -> list[tuple[Path, Manifest]]:
        """The folders of a step on this disk whose manifest is that of a checkpoint on several disks."""
        found = []
        for suffix in _SUFFIXES:
            folder = self._directory.path / (step_name(step) + suffix)
            try:
                manifest = read_manifest(folder)
            except Unusable:
                continue
            if manifest.disks is not None and manifest.step == step:
                found.append((folder, manifest))
        return found

    def copy_config(self, path: Path) -> None:
        """Write the configuration of the run on the disks that have none."""
        texts = self.on_disks("reading the configuration", lambda: path.read_text("utf-8") if path.exists() else "")
        text = next((text for text in texts if text), "")

        def write() -> None:
            if text and not path.exists():
                with self._directory.explain_write_errors(path.name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_durably(path, text)

        self.on_disks("writing the configuration", write)

    def put_together(self, step: int) -> bool:
        """Make a checkpoint complete on every disk; return whether the disks have all of it together."""
        name = step_name(step)
        copies = self.on_disks(f"verifying what this disk has of {name}", partial(self._own_copies, step))
        union = _choose_union({rank: found for rank, found in enumerate(copies) if found is not None})
        if union is None:
            return False
        missing = union.missing()
        if missing:
            more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
            logger.warning(
                "%s cannot be put together: no node's disk has an intact %s%s", name, ", ".join(missing[:3]), more
            )
            return False
        leaders = self._disks.disk_leaders
        if any(union.lacking(rank) or union.copies[rank].folder != name for rank in leaders):
            logger.info("putting %s together on the disks of all nodes", name)
            self._complete(name, union)
        return True

    def _own_copies(self, step: int) -> list[_LocalCopy]:
        copies = []
        for folder, manifest in self._folders(step):
            damaged = damaged_files(folder, manifest)
            for name, reason in damaged.items():
                if (folder / name).exists():
                    logger.warning("%s: %s", folder, reason)
            copies.append(_LocalCopy(folder.name, manifest, frozenset(manifest.sizes().keys() - damaged.keys())))
        return copies

    def _complete(self, name: str, union: _Union) -> None:
        if self._exchange is None:
            self._exchange = FileExchange(self._world, self._disks.disk_leaders)
        exchange, activity = self._exchange, f"putting {name} together"
        own = union.copies.get(self._world.rank)
        lacking = union.lacking(self._world.rank)
        self.on_disks(activity, lambda: self._begin(name, union.manifest, own, lacking))
        self.on_disks(activity, lambda: self._receive(name, union, exchange))
        self.on_disks(activity, lambda: self._directory.finish_write(name, partial(_finish, union.manifest)))

    def _begin(self, name: str, manifest: Manifest, own: _LocalCopy | None, lacking: list[str]) -> None:
        """Make a temporary folder, with links to the files that this disk has."""
        directory = self._directory
        check_space(directory.path, sum(manifest.sizes()[file] for file in lacking))
        if own is not None and own.folder.endswith(TMP):
            directory.finish_write(name, lambda folder: None)
        folder = directory.begin_write(name)
        with directory.explain_write_errors(name, folder):
            for file in manifest.sizes().keys() - {*lacking}:
                link_or_copy(self._source(name, own) / file, folder / file)

    def _source(self, name: str, own: _LocalCopy | None) -> Path:
        """The folder with what this disk has, once ``_begin`` has renamed a temporary one."""
        assert own is not None
        return self._directory.path / (name if own.folder.endswith(TMP) else own.folder)

    def _receive(self, name: str, union: _Union, exchange: FileExchange) -> None:
        rank, leaders = self._world.rank, self._disks.disk_leaders
        sent = union.sent_by(rank, leaders)
        own = union.copies.get(rank)
        outgoing = {target: [self._source(name, own) / file for file in files] for target, files in sent.items()}
        folder = self._directory.path / (name + TMP)
        with self._directory.explain_write_errors(name, folder):
            for path in exchange.exchange(outgoing, folder):
                sync(path)


def _finish(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    sync(folder / MANIFEST_FILE)
    sync(folder)


def _choose_union(found: dict[int, list[_LocalCopy]]) -> _Union | None:
    """Choose which of the step's checkpoints to put together: the first whose files are all there, else the first.

    Copies with different ``state.json`` but equal other files belong together: an evaluation is added to the state of a
    complete checkpoint on one disk after another, and the ranks may be killed in between."""
    keyed = {rank: {_key(copy): copy for copy in reversed(copies)} for rank, copies in found.items()}
    manifests = {copy.manifest.to_json(): (key, copy) for copies in keyed.values() for key, copy in copies.items()}
    unions = [
        _Union(copy.manifest, {rank: copies[key] for rank, copies in keyed.items() if key in copies})
        for key, copy in manifests.values()
    ]
    return next((union for union in unions if not union.missing()), unions[0] if unions else None)


def _key(copy: _LocalCopy) -> str:
    """Identifies a checkpoint by its manifest without the entry of ``state.json``."""
    files = {name: entry for name, entry in copy.manifest.files.items() if name != STATE_FILE}
    return copy.manifest.model_copy(update={"files": files}).model_dump_json()
