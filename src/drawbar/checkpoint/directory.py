"""A run's ``checkpoints/`` folder: each checkpoint in it is complete or absent, whenever the process is killed."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drawbar.checkpoint.format import OtherFormat, Snapshot, Unusable, step_name
from drawbar.checkpoint.load import (
    REPLACED,
    check_sizes,
    complete_checkpoints,
    explain_read_errors,
    explain_unusable,
    folders_in,
    refusal,
    step_folders,
    verify,
)
from drawbar.checkpoint.save import write_amended, write_files
from drawbar.checkpoint.space import REMEDIES, free_bytes, readable
from drawbar.errors import ExitCode, UserError
from drawbar.util.atomic_files import retried, sync, write_durably
from drawbar.util.best_score import BEST_FILE, BestScore

logger = logging.getLogger("drawbar")

TMP = ".tmp"
"""Suffix of what is still being written."""
DELETING = ".deleting"
"""Suffix of what is being deleted, so that half of a checkpoint never carries the name of a whole one."""
UNUSABLE = ".unusable"
"""Suffix of what was set aside: it stays for people to look at, and is never counted, used or deleted."""

_LEFTOVER = re.compile(r"(step-\d{8,}(\.replaced)?|best\.json)\.(tmp|deleting)")


@dataclass(frozen=True)
class Survey:
    """A run's checkpoints, as far as the newest usable one."""

    newest: Path | None
    """The newest checkpoint that matches its checksums."""
    unusable: dict[Path, Unusable]
    """What is wrong with those that are newer."""
    set_aside: list[Path]
    """Those that an earlier start found unusable."""


class CheckpointDirectory:
    """The checkpoints of one run. One process of each disk writes; any number may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. A cheap check: files and sizes, no checksums."""
        return list(self._complete())

    def _complete(self) -> dict[int, Path]:
        with explain_read_errors(self.path):
            return complete_checkpoints(self.path)

    def survey(self) -> Survey:
        """Verify the checkpoints, newest first, up to the first that matches its checksums.

        Raises:
            UserError: the disk cannot be read.
        """
        unusable: dict[Path, Unusable] = {}
        with explain_read_errors(self.path):
            set_aside = [self.path / name for name in sorted(folders_in(self.path)) if UNUSABLE in name]
            for _, folder in step_folders(self.path):
                try:
                    verify(folder)
                    return Survey(folder, unusable, set_aside)
                except Unusable as reason:
                    unusable[folder] = reason
        return Survey(None, unusable, set_aside)

    def latest(self) -> Path | None:
        """The newest checkpoint that matches its checksums; damaged ones are named in a warning and skipped.

        Raises:
            UserError: the disk cannot be read, or a newer checkpoint is of another format.
        """
        found = self.survey()
        for folder, reason in found.unusable.items():
            if isinstance(reason, OtherFormat):
                raise refusal(folder, reason)
            logger.warning("the checkpoint %s is damaged and is skipped: %s", folder, reason)
        return found.newest

    def intact(self, step: int) -> Path | None:
        """The checkpoint of a step; None if no complete one is found, or, with a warning, if its check fails."""
        folder = self._complete().get(step)
        try:
            if folder is not None:
                verify(folder)
        except (Unusable, OSError) as reason:
            logger.warning("the checkpoint %s is left out: %s", folder, reason)
            return None
        return folder

    def best_record(self) -> BestScore | None:
        """What ``best.json`` says; None where no evaluation has chosen a checkpoint.

        Raises:
            UserError: it cannot be read, or is damaged.
        """
        file = self.path / BEST_FILE
        with explain_read_errors(self.path):
            try:
                text = retried(file.read_bytes)
            except FileNotFoundError:
                return None
        try:
            return BestScore.model_validate_json(text)
        except ValidationError as error:
            steps = ", ".join(map(str, self.steps()))
            raise UserError(
                f"{BEST_FILE} is damaged: it does not say which checkpoint is the best one",
                where=str(file),
                remedy=f"name a checkpoint: latest, or one of these steps: {steps}. A run that goes on writes it anew",
            ) from error

    def best(self) -> Path | None:
        """The best checkpoint; None where no evaluation has chosen one, or it is kept no longer.

        Raises:
            UserError: the best checkpoint cannot be used, or ``best.json`` is damaged, or the disk cannot be read.
        """
        record = self.best_record()
        if record is None:
            return None
        folder = self._complete().get(record.step, self.path / step_name(record.step))
        if not folder.exists():
            logger.warning("%s names step %d, whose checkpoint is gone", self.path / BEST_FILE, record.step)
            return None
        with explain_unusable(folder):
            verify(folder)
        return folder

    def set_best(self, step: int, metric: str, score: float) -> None:
        """Record the best checkpoint. Write it first: raises ValueError for a step that is not complete."""
        if step not in self.steps():
            raise ValueError(f"step {step} has no complete checkpoint in {self.path}")
        with self._explained(BEST_FILE):
            best = BestScore(step=step, metric=metric, score=score)
            write_durably(self.path / BEST_FILE, best.model_dump_json(indent=2))

    def resolve(self, which: str) -> Path:
        """The checkpoint that ``latest``, ``best``, a step number, a path or a folder name here stands for.

        Raises:
            UserError: there is none; the message names those that there are.
        """
        complete = self._complete()
        if which == "latest":
            found = self.latest()
        elif which == "best":
            found = self.best()
        elif which.isdecimal():
            found = complete.get(int(which))
        else:
            found = next((path for path in (Path(which), self.path / which) if path.is_dir()), None)
            if found is not None and (found / "checkpoints").is_dir():
                raise _is_a_run(found)
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
        self.publish(step_name(snapshot.step), partial(write_files, snapshot=snapshot))

    def amend(self, step: int, changes: dict[str, Any]) -> None:
        """Change entries of the state of a checkpoint that is complete. It is as safe as writing one, and quick.

        Raises:
            UserError: as ``write`` does.
        """
        old = self.path / step_name(step)
        self.publish(old.name, lambda folder: write_amended(folder, old, changes))

    def publish(self, name: str, fill: Callable[[Path], None]) -> None:
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
        try:
            complete = complete_checkpoints(self.path)
        except OSError as error:
            logger.warning("old checkpoints stay, as %s cannot be read: %s", self.path, error.strerror)
            return
        for step in list(complete)[:-keep]:
            if step not in protect:
                _delete(complete[step])

    def set_aside(self, unusable: Mapping[Path, Unusable]) -> None:
        """Rename checkpoints that cannot be used, so that nothing counts or replaces them."""
        for folder, reason in unusable.items():
            aside = _beside(folder, UNUSABLE)
            while aside.exists():  # a step may be damaged, made again, and damaged again
                aside = _beside(aside, UNUSABLE)
            folder.rename(aside)
            logger.warning("the checkpoint %s cannot be used and is set aside as %s: %s", folder, aside.name, reason)
        if unusable:
            sync(self.path)

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
        """End a replacement that was cut short: the old checkpoint is deleted, or, without a new one, renamed back."""
        if not final.exists():
            replaced.rename(final)
        elif _has_all_files(final):
            _delete(replaced)

    def describe_newest(self) -> str:
        """A sentence on the checkpoint that the run can resume from, for the error of a failed save."""
        try:
            newest = self.latest()
        except UserError as error:
            return f"What was saved before is untouched, but {error.what}."
        if newest is None:
            return "There is no complete checkpoint yet."
        return f"The newest complete checkpoint, {newest.name}, is intact: the same command resumes from it."

    @contextmanager
    def _explained(self, name: str, tmp: Path | None = None) -> Iterator[None]:
        """Turn a failed write of ``name`` into a UserError, and remove what it had left in ``tmp``."""
        try:
            yield
        except OSError as error:
            free = readable(free_bytes(self.path))
            if tmp is not None:
                _delete(tmp)
            raise UserError(
                f"{name} could not be written: {error.strerror} ({free} free)",
                where=str(self.path),
                remedy=REMEDIES.get(error.errno or 0, "check the disk, or use another one (run.dir)"),
                exit_code=ExitCode.FAILED,
            ) from error


def _is_a_run(folder: Path) -> UserError:
    """The error for a run where one of its checkpoints is asked for."""
    checkpoints = folder / "checkpoints"
    steps = CheckpointDirectory(checkpoints).steps()
    return UserError(
        f"{folder} is a run, and not one of its checkpoints",
        where=str(folder),
        remedy=f"give its newest: {checkpoints / step_name(steps[-1])}" if steps else "it has no complete one yet",
    )


def _has_all_files(folder: Path) -> bool:
    try:
        check_sizes(folder)
    except Unusable:
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
