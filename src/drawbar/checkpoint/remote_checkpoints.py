"""``RemoteCheckpoints``: copies of a run's checkpoints in an object store, where there is no rename.

A copy has the files of the checkpoint under their own names, below ``checkpoints/step-00001000/``. Its manifest is the
commit: it is written when all other objects are there, and deleted before any of them. Only one process may write, see
``RemoteOwner``; any number may read.

A checkpoint that changes after it was copied (its state, when its step is evaluated) is copied again without a moment
in which the store has none: changed files are first written under a temporary name (``state.json.1f2e3d4c…``, by their
checksum), then comes the new manifest, then they are written under their own names. A reader tries the temporary name
first.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import (
    CHECKSUMS_SUFFIX,
    MANIFEST_FILE,
    STEP_NAME,
    Damaged,
    Manifest,
    Unusable,
    step_name,
)
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.object_store import ObjectStore
from drawbar.checkpoint.space import check_space
from drawbar.util.atomic_files import sync

logger = logging.getLogger("drawbar")

FOLDER = "checkpoints"
SET_ASIDE = f"{MANIFEST_FILE}.unusable"
"""The new name of an unusable copy's manifest: the copy is then ignored, but stays for people to inspect."""
_LARGEST_MANIFEST = 256 * 2**20
"""Upper limit on the bytes of a manifest, which has about 200 for each file of the checkpoint."""

Objects = dict[str, int]
"""Bytes of each object of one checkpoint, by its name in the folder."""


class ChangedDuringCopy(Exception):
    """The local checkpoint was deleted or replaced while it was uploaded: try again."""


class RemoteCheckpoints:
    """The checkpoints below ``store``. Methods raise UserError where the store does not answer."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def all(self) -> dict[int, Objects]:
        """The objects of every step, complete or not, ascending."""
        found: dict[int, Objects] = {}
        for path, size in self._store.sizes(FOLDER).items():
            folder, _, name = path.partition("/")
            match = STEP_NAME.fullmatch(folder)
            if match and folder == step_name(int(match[1])) and name and "/" not in name:
                found.setdefault(int(match[1]), {})[name] = size
        return dict(sorted(found.items()))

    def complete(self) -> dict[int, Objects]:
        """The steps that have a manifest, ascending; ``check`` finds out whether the other objects are there."""
        return {step: objects for step, objects in self.all().items() if MANIFEST_FILE in objects}

    def check(self, step: int, objects: Objects) -> Manifest:
        """Check that every file of a copy is there in the right size, and return its manifest. Raises Unusable."""
        if MANIFEST_FILE not in objects:
            raise Damaged(f"{MANIFEST_FILE} is missing: its upload has not ended")
        manifest = Manifest.from_json(self._read_manifest(step, objects))
        if manifest.step != step:
            raise Damaged(f"{MANIFEST_FILE} is that of step {manifest.step}")
        for name, size in manifest.sizes().items():
            found = objects.get(_stored_name(name, manifest, objects))
            if found is None:
                raise Damaged(f"{name} is missing")
            if found != size:
                raise Damaged(f"{name} has {found} bytes instead of {size}")
        return manifest

    def saved_at(self, step: int, objects: Objects) -> float | None:
        """When a step was written (its manifest, which comes last), in seconds since 1970; None where the store does
        not say."""
        newest = MANIFEST_FILE if MANIFEST_FILE in objects else next(iter(objects))
        return self._store.modified(f"{_folder(step)}/{newest}")

    def _read_manifest(self, step: int, objects: Objects) -> bytes:
        if objects[MANIFEST_FILE] > _LARGEST_MANIFEST:
            raise Damaged(f"{MANIFEST_FILE} has {objects[MANIFEST_FILE]} bytes")
        return self._store.read(f"{_folder(step)}/{MANIFEST_FILE}")

    def download(self, step: int, objects: Objects, directory: CheckpointDirectory) -> None:
        """Download a checkpoint to ``directory``, where it appears once every byte is verified. A damaged local
        checkpoint of the same step is set aside.

        Raises:
            Unusable: the copy in the store is damaged, or of another format.
            UserError: the disk is full, or not writable.
        """
        manifest = self.check(step, objects)
        check_space(directory.path, sum(manifest.sizes().values()))

        def write_content(folder: Path) -> None:
            folder.mkdir()
            for name in manifest.sizes():
                self._get(f"{_folder(step)}/{_stored_name(name, manifest, objects)}", folder / name)
            (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
            for file in (*folder.iterdir(), folder):
                sync(file)
            wrong = problems(folder)
            if wrong:
                raise Damaged("; ".join(wrong))
            final = directory.path / step_name(step)
            if final.exists():  # damaged: with a usable local one, there is no download
                directory.set_aside({final: Damaged(f"an intact copy comes from {self._store.url}")})

        try:
            directory.write_folder(step_name(step), write_content)
        except Unusable:
            directory.discard(step_name(step))
            raise

    def _get(self, name: str, target: Path) -> None:
        try:
            self._store.get(name, target)
        except FileNotFoundError:
            raise Damaged(f"{target.name} is missing") from None

    def upload(self, folder: Path, prepare_commit: Callable[[], None]) -> bytes:
        """Upload a local checkpoint, unless the store has it already.

        Args:
            prepare_commit: called before anything is deleted, and again before the manifest is written. It uploads the
                run's other files, which must not be older than the checkpoint, and raises if another process has become
                the owner of the store's folder.

        Returns:
            The manifest that the store has now.

        Raises:
            ChangedDuringCopy: the local checkpoint was deleted or replaced. Nothing was committed; or, where the store
                had a copy before, the new manifest is, and some files still have their temporary names: the next upload
                finishes that.
        """
        try:
            return self._upload(folder, prepare_commit)
        except FileNotFoundError as error:
            raise ChangedDuringCopy from error

    def _upload(self, folder: Path, prepare_commit: Callable[[], None]) -> bytes:
        text = (folder / MANIFEST_FILE).read_bytes()
        manifest = Manifest.from_json(text)
        base = _folder(manifest.step)
        objects = self._store.sizes(base)
        changed, has_copy = self._changed(manifest, objects)
        if has_copy and not changed and objects.keys() == {MANIFEST_FILE, *manifest.sizes()}:
            return text
        began = time.monotonic()
        prepare_commit()
        if not has_copy:  # what a process that was killed has left may be of another checkpoint of this step
            self._store.delete(f"{base}/{name}" for name in sorted(objects, key=lambda name: name != MANIFEST_FILE))
        while changed:
            for name in changed:
                target = _temporary_name(name, manifest) if has_copy else name
                self._store.put(f"{base}/{target}", folder / name)
            copied, text = manifest, (folder / MANIFEST_FILE).read_bytes()
            manifest = Manifest.from_json(text)
            changed = _differences(copied, manifest)  # its step was evaluated meanwhile
        prepare_commit()
        self._store.write(f"{base}/{MANIFEST_FILE}", text)
        if has_copy:
            self._finish_update(base, folder, manifest, text)
        logger.info("%s is in %s, after %.1f s", step_name(manifest.step), self._store.url, time.monotonic() - began)
        return text

    def _changed(self, manifest: Manifest, objects: Objects) -> tuple[list[str], bool]:
        """The files of a local checkpoint that the store lacks or has with other content; and whether the store has a
        complete copy of that step."""
        names = list(manifest.sizes())
        if MANIFEST_FILE not in objects:
            return names, False
        try:
            stored = self.check(manifest.step, objects)
        except Unusable:
            return names, False
        return _differences(stored, manifest), True

    def _finish_update(self, base: str, folder: Path, manifest: Manifest, text: bytes) -> None:
        """Upload the files stored under temporary names again, under their own; then delete every object that the
        manifest does not list."""
        objects = self._store.sizes(base)
        for name in manifest.sizes():
            if _temporary_name(name, manifest) in objects:
                self._store.put(f"{base}/{name}", folder / name)
        if (folder / MANIFEST_FILE).read_bytes() != text:
            raise ChangedDuringCopy
        known = {MANIFEST_FILE, *manifest.sizes()}
        self._store.delete(f"{base}/{name}" for name in objects if name not in known)

    def rotate(self, keep: int, protect: set[int], check_owner: Callable[[], None]) -> None:
        """Delete incomplete copies, and all complete ones but the ``keep`` newest and the protected steps.
        ``check_owner`` raises if another process has become the owner."""
        found = self.all()
        complete = [step for step, objects in found.items() if MANIFEST_FILE in objects]
        doomed = {step for step in complete[:-keep] if step not in protect}
        doomed |= {step for step, objects in found.items() if not objects.keys() & {MANIFEST_FILE, SET_ASIDE}}
        for step in sorted(doomed):
            check_owner()
            names = sorted(found[step], key=lambda name: name != MANIFEST_FILE)  # the manifest first
            self._store.delete(f"{_folder(step)}/{name}" for name in names)

    def set_aside(self, unusable: Mapping[int, Unusable]) -> None:
        """Rename the manifests of unusable copies, so that they are neither counted nor used."""
        for step, reason in unusable.items():
            self._store.write(f"{_folder(step)}/{SET_ASIDE}", self._store.read(f"{_folder(step)}/{MANIFEST_FILE}"))
            self._store.delete([f"{_folder(step)}/{MANIFEST_FILE}"])
            logger.warning("%s/%s cannot be used and is set aside: %s", self._store.url, _folder(step), reason)


def _folder(step: int) -> str:
    return f"{FOLDER}/{step_name(step)}"


def _differences(old: Manifest, new: Manifest) -> list[str]:
    """The files of the new manifest that are missing from the old one, or have other content there."""
    return [name for name in new.sizes() if _checksum(name, old) != _checksum(name, new)]


def _checksum(name: str, manifest: Manifest) -> str | None:
    """Checksum of a file's content; for a part file, that of the file with its block checksums."""
    entry = manifest.files.get(name if name in manifest.files else name + CHECKSUMS_SUFFIX)
    return None if entry is None else entry.sha256


def _temporary_name(name: str, manifest: Manifest) -> str:
    return f"{name}.{_checksum(name, manifest)}"


def _stored_name(name: str, manifest: Manifest, objects: Objects) -> str:
    """The name under which the store has a file, temporary or not."""
    temporary = _temporary_name(name, manifest)
    return temporary if temporary in objects else name
