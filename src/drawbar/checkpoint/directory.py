"""A run's ``checkpoints/`` folder: each checkpoint in it is complete or absent, whenever the process is killed."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from drawbar.checkpoint.format import Damaged, Snapshot, step_name
from drawbar.checkpoint.load import REPLACED, check_sizes, complete_checkpoints, step_folders, verify
from drawbar.checkpoint.save import sync, write_amended, write_files
from drawbar.checkpoint.space import REMEDIES, free_bytes, readable
from drawbar.errors import ExitCode, UserError

logger = logging.getLogger("drawbar")

TMP = ".tmp"
"""Suffix of what is still being written."""
DELETING = ".deleting"
"""Suffix of what is being deleted, so that half of a checkpoint never carries the name of a whole one."""
BEST_FILE = "best.json"

_LEFTOVER = re.compile(r"(step-\d{8,}(\.replaced)?|best\.json)\.(tmp|deleting)")


class Best(BaseModel):
    """``best.json``: which checkpoint has the best score."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    step: int
    metric: str
    score: float


class CheckpointDirectory:
    """The checkpoints of one run. One process writes (rank 0); any number may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. A cheap check: files and sizes, no checksums."""
        return list(complete_checkpoints(self.path))

    def latest(self) -> Path | None:
        """The newest checkpoint that matches its checksums; damaged ones are named in a warning and skipped."""
        for _, folder in step_folders(self.path):
            if _is_intact(folder):
                return folder
        return None

    def best_record(self) -> Best | None:
        """What ``best.json`` says, or None where there is none that can be read."""
        file = self.path / BEST_FILE
        try:
            return Best.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except (ValidationError, OSError) as error:
            logger.warning("%s cannot be read and is ignored: %s", file, error)
            return None

    def best(self) -> Path | None:
        """The best checkpoint, where one is recorded and matches its checksums."""
        record = self.best_record()
        if record is None:
            return None
        folder = complete_checkpoints(self.path).get(record.step, self.path / step_name(record.step))
        return folder if _is_intact(folder) else None

    def set_best(self, step: int, metric: str, score: float) -> None:
        """Record the best checkpoint. Write it first: raises ValueError for a step that is not complete."""
        if step not in self.steps():
            raise ValueError(f"step {step} has no complete checkpoint in {self.path}")
        tmp = self.path / (BEST_FILE + TMP)
        with self._explained(BEST_FILE, tmp):
            tmp.write_bytes(Best(step=step, metric=metric, score=score).model_dump_json(indent=2).encode())
            sync(tmp)
            tmp.replace(self.path / BEST_FILE)
            sync(self.path)

    def resolve(self, which: str) -> Path:
        """The checkpoint that ``latest``, ``best``, a step number, a path or a folder name here stands for.

        Raises:
            UserError: there is none; the message names those that there are.
        """
        complete = complete_checkpoints(self.path)
        if which == "latest":
            found = self.latest()
        elif which == "best":
            found = self.best()
        elif which.isdecimal():
            found = complete.get(int(which))
        else:
            found = next((path for path in (Path(which), self.path / which) if path.is_dir()), None)
        if found is not None:
            return found
        steps = ", ".join(map(str, complete))
        raise UserError(
            f"there is no checkpoint '{which}'",
            where=str(self.path),
            remedy=f"give latest, best, the path of a checkpoint, or one of these steps: {steps}"
            if steps
            else "give the path of a checkpoint; this folder has no complete one",
        )

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint; it appears under its name when every byte of it is on the disk.

        Args:
            snapshot: it must share nothing with the live run (``host_copies``).

        Raises:
            UserError: the disk is full, a quota or limit is reached, or the folder is not writable. The
                checkpoints written before are untouched.
        """
        self.place(step_name(snapshot.step), lambda folder: write_files(folder, snapshot))

    def amend(self, step: int, changes: dict[str, Any]) -> None:
        """Change entries of the state of a checkpoint that is complete. It is as safe as writing one, and quick.

        Raises:
            UserError: as ``write`` does.
        """
        old = self.path / step_name(step)
        self.place(old.name, lambda folder: write_amended(folder, old, changes))

    def place(self, name: str, fill: Callable[[Path], None]) -> None:
        """Make the checkpoint ``name`` of what ``fill`` writes into a new folder. It appears when ``fill`` is done.

        Raises:
            UserError: as ``write`` does.
        """
        final = self.path / name
        tmp = _beside(final, TMP)
        with self._explained(name, tmp):
            self.path.mkdir(parents=True, exist_ok=True)
            _remove(tmp)
            fill(tmp)
            replaced = _make_way(final)
            tmp.rename(final)
            sync(self.path)
        if replaced is not None:
            _delete(replaced)

    def rotate(self, keep: int, protect: set[int]) -> None:
        """Delete all complete checkpoints but the ``keep`` (at least 1) newest and the protected steps."""
        complete = complete_checkpoints(self.path)
        for step in list(complete)[:-keep]:
            if step not in protect:
                _delete(complete[step])

    def clean(self) -> None:
        """Remove what a killed process left behind. Only the process that writes may call it."""
        for entry in list(self.path.iterdir()) if self.path.is_dir() else []:
            if _LEFTOVER.fullmatch(entry.name):
                logger.info("removing %s, left behind by a process that was killed", entry)
                _delete(entry)
        for step, folder in list(step_folders(self.path)):
            if folder.name.endswith(REPLACED):
                self._settle(folder, self.path / step_name(step))

    def _settle(self, replaced: Path, final: Path) -> None:
        """End a replacement that was cut short: the old checkpoint goes, or takes its name back."""
        if not final.exists():
            replaced.rename(final)
        elif _has_all_files(final):
            _delete(replaced)

    @contextmanager
    def _explained(self, name: str, tmp: Path) -> Iterator[None]:
        """Turn a failed write of ``name`` into a UserError, and remove what it had left in ``tmp``."""
        try:
            yield
        except OSError as error:
            free = readable(free_bytes(self.path))
            _delete(tmp)
            newest = self.latest()
            if newest is None:
                standing = "There is no complete checkpoint yet."
            else:
                standing = (
                    f"The newest complete checkpoint, {newest.name}, is intact: the same command resumes from it."
                )
            raise UserError(
                f"{name} could not be written: {error.strerror} ({free} free). {standing}",
                where=str(self.path),
                remedy=REMEDIES.get(error.errno or 0, "look after the disk, or use another one (run.dir)"),
                exit_code=ExitCode.FAILED,
            ) from error


def _is_intact(folder: Path) -> bool:
    try:
        verify(folder)
    except Damaged as damage:
        logger.warning("the checkpoint %s is damaged and is skipped: %s", folder, damage)
        return False
    return True


def _has_all_files(folder: Path) -> bool:
    try:
        check_sizes(folder)
    except Damaged:
        return False
    return True


def _make_way(final: Path) -> Path | None:
    """Move an older checkpoint of the same step aside, under a name that readers still find."""
    if not final.exists():
        return None
    replaced = _beside(final, REPLACED)
    if replaced.exists():
        _delete(replaced)
    final.rename(replaced)
    return replaced


def _delete(path: Path) -> None:
    """Delete a folder or file. Only warns where it cannot: that is no reason to end a run."""
    try:
        if path.name.endswith((TMP, DELETING)):
            _remove(path)
            return
        doomed = _beside(path, DELETING)
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error.strerror)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
