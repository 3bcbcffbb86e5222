"""A run's ``checkpoints/`` folder: each checkpoint in it is complete or absent, whenever the process is killed.

A suffix marks each folder that is being written, replaced or deleted, so that a folder without one is complete.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drawbar.checkpoint.format import REPLACED, Damaged, OtherFormat, Snapshot, Unusable, step_name
from drawbar.checkpoint.read import (
    check_sizes,
    complete_checkpoints,
    explain_read_errors,
    explain_unusable,
    folders_in,
    run_given_error,
    step_folders,
    unusable_error,
    verify_except_parts,
)
from drawbar.checkpoint.space import REMEDIES, DiskFault, free_text
from drawbar.checkpoint.write import write_files, write_with_changed_state
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
class NewestUsable:
    """Result of the search for a run's newest usable checkpoint."""

    newest: Path | None
    """The newest checkpoint that matches its checksums."""
    unusable: dict[Path, Unusable]
    """The newer checkpoints, none of which can be used, with the reason."""
    set_aside: list[Path]
    """Checkpoints that an earlier start found unusable and renamed."""


class CheckpointDirectory:
    """The checkpoints of one run. One process begins, finishes and deletes them (of a checkpoint in parts, every rank
    writes its own part); any number may read."""

    def __init__(self, path: Path, check_owner: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.check_owner = check_owner
        """Called before each change; raises UserError if this process must not write here any more."""

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. A cheap check: files and sizes, no checksums."""
        return list(self._complete())

    def _complete(self) -> dict[int, Path]:
        """Step → folder of the complete checkpoints."""
        with explain_read_errors(self.path):
            return complete_checkpoints(self.path)

    def find_newest_usable(self, verify: Callable[[Path], object] = verify_except_parts) -> NewestUsable:
        """Verify the checkpoints, newest first, up to the first that matches its checksums.

        Args:
            verify: raises Unusable and OSError. By default, of part files only the size is checked: their blocks are
                verified when they are read.

        Raises:
            UserError: the disk cannot be read.
        """
        unusable: dict[Path, Unusable] = {}
        with explain_read_errors(self.path):
            set_aside = [self.path / name for name in sorted(folders_in(self.path)) if UNUSABLE in name]
            for _, folder in step_folders(self.path):
                try:
                    verify(folder)
                    return NewestUsable(folder, unusable, set_aside)
                except Unusable as reason:
                    unusable[folder] = reason
        return NewestUsable(None, unusable, set_aside)

    def latest(self) -> Path | None:
        """The newest checkpoint that matches its checksums; damaged ones are named in a warning and skipped.

        Raises:
            UserError: the disk cannot be read, or a newer checkpoint is of another format.
        """
        found = self.find_newest_usable()
        for folder, reason in found.unusable.items():
            if isinstance(reason, OtherFormat):
                raise unusable_error(folder, reason)
            how = "is damaged" if isinstance(reason, Damaged) else "cannot be used here"
            logger.warning("the checkpoint %s %s and is skipped: %s", folder, how, reason)
        return found.newest

    def verified_folder(self, step: int, verify: Callable[[Path], object]) -> Path | None:
        """The checkpoint of a step; None if there is no complete one, or, with a warning, if ``verify`` raises Unusable
        or OSError."""
        folder = self._complete().get(step)
        try:
            if folder is not None:
                verify(folder)
        except (Unusable, OSError) as reason:
            logger.warning("the checkpoint %s is left out: %s", folder, reason)
            return None
        return folder

    def best_record(self) -> BestScore | None:
        """The content of ``best.json``; None where no evaluation has chosen a checkpoint.

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
            return BestScore.from_json(text)
        except ValueError as error:
            steps = ", ".join(map(str, self.steps()))
            raise UserError(
                f"{BEST_FILE} is damaged: it does not say which checkpoint is the best one",
                where=str(file),
                remedy=f"name a checkpoint: latest, or one of these steps: {steps}; or delete that file. "
                "The next save of the run writes it anew",
            ) from error

    def kept_as_best(self) -> set[int]:
        """The step that ``best.json`` names, if there is one, which no rotation may delete. Where that file is damaged,
        all steps, as any of them may be the best one: the next save writes it anew."""
        try:
            best = self.best_record()
        except UserError:
            return set(self.steps())
        return set() if best is None else {best.step}

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
            verify_except_parts(folder)
        return folder

    def update_best(self, step: int | None, metric: str, score: float | None, begin: bool) -> None:
        """Make ``best.json`` name the best step, unless that has no checkpoint.

        Args:
            begin: whether to write the file if there is none yet. An existing one must not keep naming an older step.
        """
        if step not in self.steps() or score is None:
            return
        try:
            known = self.best_record()
        except UserError:  # damaged
            begin = True
            known = None
        if known != BestScore(step=step, metric=metric, score=score) and (begin or known is not None):
            self.set_best(step, metric, score)

    def set_best(self, step: int, metric: str, score: float) -> None:
        """Record which checkpoint is the best one. Raises ValueError for a step without one."""
        self.check_owner()
        if step not in self.steps():
            raise ValueError(f"{self.path} has no complete checkpoint of step {step}")
        with self.explain_write_errors(BEST_FILE):
            best = BestScore(step=step, metric=metric, score=score)
            write_durably(self.path / BEST_FILE, best.to_json())

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
            if found is None:
                self._refuse_damaged(int(which))
        else:
            found = next((path for path in (Path(which), self.path / which) if path.is_dir()), None)
            for run in (found, self.path.parent.parent / which):
                if run is not None and (run / "checkpoints").is_dir():
                    raise run_given_error(run)
        if found is not None:
            return found
        steps = ", ".join(map(str, complete))
        words = "latest" if which == "best" else "latest, best"
        raise UserError(
            f"there is no checkpoint '{which}'" + ("" if steps else ": this folder has no complete one yet"),
            where=str(self.path),
            remedy=f"give {words}, the path of a checkpoint, or one of these steps: {steps}"
            if steps
            else "train until the run has written one, or give the path of a checkpoint",
        )

    def _refuse_damaged(self, step: int) -> None:
        """Raise the UserError of a step whose checkpoint is there and cannot be used."""
        folder = self.path / step_name(step)
        if folder.is_dir():
            with explain_unusable(folder):
                check_sizes(folder)

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint; it appears under its name when every byte of it is on the disk.

        Args:
            snapshot: it must share nothing with the live run (``host_copies``).

        Raises:
            UserError: the disk is full, a quota or limit is reached, or the folder is not writable. The
                checkpoints written before are untouched.
        """
        self.write_folder(step_name(snapshot.step), partial(write_files, snapshot=snapshot))

    def update_state(self, step: int, changes: dict[str, Any]) -> None:
        """Change entries in the state of a complete checkpoint, atomically; tensors are not written again.

        Raises:
            UserError: as ``write`` does.
        """
        old = self.path / step_name(step)
        self.write_folder(old.name, lambda folder: write_with_changed_state(folder, old, changes))

    def write_folder(self, name: str, write_content: Callable[[Path], None]) -> None:
        """Write a checkpoint atomically: ``write_content`` makes and fills a temporary folder, which is then renamed to
        ``name``.

        Raises:
            UserError: as ``write`` does.
        """
        tmp = with_suffix(self.path / name, TMP)
        self.check_owner()
        with self.explain_write_errors(name, tmp):
            self.path.mkdir(parents=True, exist_ok=True)
            remove(tmp)
        self.finish_write(name, write_content)

    def begin_write(self, name: str) -> Path:
        """A new, empty folder in which several processes write the checkpoint ``name``: see ``write``.

        Raises:
            UserError: as ``write`` does.
        """
        tmp = with_suffix(self.path / name, TMP)
        self.check_owner()
        with self.explain_write_errors(name, tmp):
            self.path.mkdir(parents=True, exist_ok=True)
            remove(tmp)
            tmp.mkdir()
        return tmp

    def folder_of_parts(self, step: int) -> Path:
        """Where the parts of a step are written, between ``begin_write`` and ``finish_write``."""
        return with_suffix(self.path / step_name(step), TMP)

    def older_than(self, checkpoint: Path | None) -> list[Path]:
        """The checkpoints before one of this folder, newest first; none for None. Checkpoints that cannot be read at
        the moment are included: opening one raises that error, so that a run does not silently resume from a still
        older one."""
        if checkpoint is None:
            return []
        with explain_read_errors(self.path):
            folders = list(step_folders(self.path))
        number = next((step for step, folder in folders if folder.name == checkpoint.name), 0)
        older: dict[int, Path] = {}
        for step, folder in folders:
            if step < number and step not in older and _is_complete(folder, unknown=True):
                older[step] = folder
        return list(older.values())

    def finish_write(self, name: str, write_content: Callable[[Path], None]) -> None:
        """Let ``write_content`` add the last files to the folder of ``begin_write``, or make and fill it where that was
        not called; then rename it to ``name``.

        Raises:
            UserError: as ``write`` does.
        """
        final = self.path / name
        tmp = with_suffix(final, TMP)
        with self.explain_write_errors(name, tmp):
            write_content(tmp)
            self.check_owner()
            replaced = _rename_to_replaced(final)
            tmp.rename(final)
            sync(self.path)
        if replaced is not None:
            delete(replaced)

    def discard(self, name: str) -> None:
        """Remove what was written of the checkpoint ``name`` since ``begin_write``; only warn where that cannot be
        done."""
        delete(with_suffix(self.path / name, TMP))

    def rotate(self, keep: int, protect: set[int]) -> None:
        """Delete all checkpoints that ``steps`` has, but the ``keep`` (at least 1) newest and the protected steps."""
        self.check_owner()
        try:
            complete = complete_checkpoints(self.path)
        except OSError as error:
            logger.warning("old checkpoints stay, as %s cannot be read: %s", self.path, error.strerror)
            return
        for step in list(complete)[:-keep]:
            if step not in protect:
                delete(complete[step])

    def set_aside(self, unusable: Mapping[Path, Unusable]) -> None:
        """Rename unusable checkpoints, so that they are neither counted nor replaced. Raises as ``write`` does."""
        for folder, reason in unusable.items():
            aside = with_suffix(folder, UNUSABLE)
            with self.explain_write_errors(folder.name, done="set aside"):
                while aside.exists():  # a step may be damaged, made again, and damaged again
                    aside = with_suffix(aside, UNUSABLE)
                folder.rename(aside)
                sync(self.path)
            logger.warning("the checkpoint %s cannot be used and is set aside as %s: %s", folder, aside.name, reason)

    def remove_leftovers(self) -> None:
        """Remove what a killed process left behind. Only the process that writes may call it. Raises as ``write``."""
        for entry in list(self.path.iterdir()) if self.path.is_dir() else []:
            if _LEFTOVER.fullmatch(entry.name):
                logger.info("removing %s, left behind by a process that was killed, or by a failed save", entry)
                delete(entry)
        for step, folder in list(step_folders(self.path)):
            if folder.name.endswith(REPLACED):
                self._finish_replacement(folder, self.path / step_name(step))

    def _finish_replacement(self, replaced: Path, final: Path) -> None:
        """Finish an interrupted replacement: delete the old checkpoint, or rename it back if there is no new one."""
        if not final.exists():
            with self.explain_write_errors(replaced.name, done="renamed back"):
                replaced.rename(final)
        elif _is_complete(final, unknown=False):
            delete(replaced)

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
    def explain_write_errors(self, name: str, tmp: Path | None = None, done: str = "written") -> Iterator[None]:
        """Turn an OSError while writing ``name`` into a DiskFault, and remove the incomplete ``tmp``."""
        try:
            yield
        except OSError as error:
            free = free_text(self.path)  # before it grows
            if tmp is not None:
                delete(tmp)
            raise DiskFault(
                f"{name} could not be {done}: {error.strerror}{free}",
                where=str(self.path),
                remedy=REMEDIES.get(error.errno or 0, "check the disk, or use another one (run.dir)"),
                exit_code=ExitCode.FAILED,
            ) from error


def _is_complete(folder: Path, unknown: bool) -> bool:
    """Whether a checkpoint has all its files; returns ``unknown`` where it cannot be read at the moment."""
    try:
        check_sizes(folder)
    except Unusable:
        return False
    except OSError:
        return unknown
    return True


def _rename_to_replaced(final: Path) -> Path | None:
    """Rename the checkpoint ``final``, if it exists, so that a new one can take its name. Returns its new path, under
    which readers still find it; None where there was no such checkpoint."""
    if not final.exists():
        return None
    replaced = with_suffix(final, REPLACED)
    if replaced.exists():
        delete(replaced)
    final.rename(replaced)
    return replaced


def delete(path: Path) -> None:
    """Delete a folder or file. Only warns where it cannot: that is no reason to end a run."""
    try:
        if path.name.endswith((TMP, DELETING)):
            remove(path)
            return
        doomed = with_suffix(path, DELETING)
        remove(doomed)
        path.rename(doomed)
        remove(doomed)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error.strerror)


def remove(path: Path) -> None:
    """Remove a folder or file, if there is one. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def with_suffix(path: Path, suffix: str) -> Path:
    """``step-00000004`` → ``step-00000004.tmp``."""
    return path.with_name(path.name + suffix)
