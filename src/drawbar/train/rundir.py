"""The run directory: locking it, and finding the checkpoint to resume from."""

import errno
import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from drawbar.checkpoint.directory import CheckpointDirectory, Survey
from drawbar.checkpoint.format import OtherFormat, Unusable
from drawbar.checkpoint.load import explain_read_errors
from drawbar.config.io.compare import Difference, check_same
from drawbar.config.io.load_config import dump_yaml, load_config
from drawbar.config.schema.run_config import RUN_NAME, RunConfig, RunSection
from drawbar.errors import UserError
from drawbar.launch.job_files import FOLDER as LAUNCH_FOLDER
from drawbar.runtime.log import logger
from drawbar.util.atomic_files import write_durably

LOCK_FILE = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Error numbers that flock raises on a file system without locks."""
CONFIG_DRAFT = "config.yaml.tmp"
"""What a process that was killed may leave behind: see ``write_durably``."""


@dataclass(frozen=True)
class RunStart:
    """Where a run begins."""

    checkpoint: Path | None = None
    """The checkpoint to resume or fork from; None to start at step 0."""
    forked: bool = False
    """The checkpoint is another run's, and the configuration may differ from that run's."""
    unusable: Mapping[Path, Unusable] = field(default_factory=dict)
    """Unusable checkpoints, to be moved aside before the run resumes, each with the reason."""
    changed_length: Sequence[Difference] = ()
    """Settings of the training length (steps, epochs) that differ from those stored in the run directory."""
    refusal: UserError | None = None
    """Why the run cannot begin: it has checkpoints, and none can be used. Another node's disk may have a better one."""
    eval_mode: str | None = None
    """The ``eval.mode`` stored in the run directory; None for a run that does not exist yet."""


def find_start(config: RunConfig, resume: str, fork: str | None) -> RunStart:
    """Decide, before anything is written, where the run begins: on rank 0, or on one rank for each disk.

    Args:
        resume: ``auto`` (resume from the run directory's newest complete checkpoint), ``never``, or a checkpoint.
        fork: name of a new run, which begins from a checkpoint of the run ``config`` and may have other settings.

    Raises:
        UserError: the run directory holds other files, a run of other settings, with ``never`` a run that can go on, or
            a newer drawbar's checkpoint; or the disk cannot be read.
    """
    target = config if fork is None else renamed(config, fork)
    with explain_read_errors(config.run_dir):
        start = _find(config, resume) if fork is None else _find_fork(config, resume, target)
        return replace(start, eval_mode=_eval_mode(target))


def _eval_mode(config: RunConfig) -> str | None:
    written = config.run_dir / "config.yaml"
    return load_config(written, task=type(config.task)).config.eval.mode if written.exists() else None


def _find(config: RunConfig, resume: str) -> RunStart:
    folder = config.run_dir
    if not (folder / "config.yaml").exists():
        _check_no_stranger(folder)
        return RunStart() if resume in ("auto", "never") else RunStart(CheckpointDirectory(folder).resolve(resume))
    checkpoints = CheckpointDirectory(folder / "checkpoints")
    found = checkpoints.survey()
    refusal = _refusal(found, checkpoints.path)
    if resume == "never" and (found.newest is not None or refusal is None):
        raise UserError(
            f"the run {config.run.name} exists already",
            where=str(folder),
            remedy="choose another run.name, delete the folder, or leave out --resume never to go on with it",
        )
    changed = check_same(folder, config)
    if resume == "never":
        return RunStart(None, unusable=found.unusable)
    if found.newest is not None and refusal is not None:
        raise refusal
    if resume == "auto":
        return RunStart(found.newest, unusable=found.unusable, changed_length=changed, refusal=refusal)
    chosen = checkpoints.resolve(resume).resolve()
    if chosen.parent != checkpoints.path.resolve():  # from elsewhere: the same command, given again, resumes this run
        return RunStart(found.newest or chosen, unusable=found.unusable, changed_length=changed)
    if refusal is not None:
        raise refusal
    if found.newest is None or chosen != found.newest.resolve():
        raise UserError(
            f"{resume} is not the newest checkpoint of {config.run.name}: going on from it would lose later steps",
            where="--resume",
            remedy="leave --resume out to go on from the newest, or add --fork NEWNAME to branch off from this one",
        )
    return RunStart(found.newest, unusable=found.unusable, changed_length=changed)


def _refusal(found: Survey, folder: Path) -> UserError | None:
    """Why a run must not resume automatically: it would lose checkpoints that it cannot read. Damaged ones are no
    reason if an older one is intact."""
    newer = [reason for reason in found.unusable.values() if isinstance(reason, OtherFormat)]
    if found.newest is not None:
        if not newer:
            return None
        what = "a newer checkpoint of the run cannot be used"
        remedy = f"use that version of drawbar, or branch off: --resume {found.newest.name} --fork NEWNAME"
    elif found.unusable or found.set_aside:
        what = "no checkpoint of the run can be used"
        remedy = (
            f"{'use that version of drawbar, ' if newer else ''}restore one from a copy, or give the path of another "
            "one (--resume PATH); or begin at step 0: under another run.name, or here by --resume never, which sets "
            "these checkpoints aside"
        )
    else:
        return None
    lines = [f"{path.name}: {reason}" for path, reason in found.unusable.items()]
    lines += [f"{path.name}: set aside before" for path in found.set_aside]
    return UserError("\n    ".join([f"{what}, and nothing was changed:", *lines]), where=str(folder), remedy=remedy)


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The same configuration for a run of another name.

    Raises:
        UserError: no run can have this name.
    """
    try:
        run = RunSection.model_validate({**config.run.model_dump(), "name": name})
    except ValidationError as error:
        raise UserError(
            f"{name!r} cannot be the name of a run",
            where="--fork",
            remedy=f"use {RUN_NAME}",
        ) from error
    return config.model_copy(update={"run": run})


def _find_fork(config: RunConfig, resume: str, target: RunConfig) -> RunStart:
    source = config.run_dir
    if (target.run_dir / "config.yaml").exists():  # the same command again: go on with the fork
        start = _find(target, "auto")
        if start.checkpoint is not None or start.refusal is not None:
            return start
    else:
        _check_no_stranger(target.run_dir)
    checkpoints = CheckpointDirectory(source / "checkpoints")
    checkpoint = checkpoints.latest() if resume in ("auto", "never") else checkpoints.resolve(resume)
    if checkpoint is None:
        raise UserError(
            f"there is nothing to fork: {source} has no complete checkpoint",
            where="--fork",
            remedy="set run.dir and run.name to the run to begin from; or leave out --fork, and delete that folder if "
            "it is a run of other settings",
        )
    return RunStart(checkpoint, forked=True)


def _check_no_stranger(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", where="run.dir, run.name", remedy="choose another run.name")
    if folder.is_dir() and set(os.listdir(folder)) - {LOCK_FILE, CONFIG_DRAFT, LAUNCH_FOLDER}:
        raise UserError(
            f"{folder} holds files, but no drawbar run (there is no config.yaml)",
            where="run.dir, run.name",
            remedy="choose another run.name, or move the files away",
        )


def lock_run_dir(folder: Path, patience: float = 5.0) -> IO[str]:
    """Lock an existing run directory for this process, until it ends or the file is closed.

    Args:
        patience: seconds to wait for a process that is about to end: a killed run's ranks need a moment to notice.

    Raises:
        UserError: another process is training this run.
    """
    lock = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 - held until the run ends
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning("%s is on a file system without locks: see that one process alone trains it", folder)
                break
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            lock.seek(0)
            raise UserError(
                f"the run {folder.name} is being trained now, by {lock.read().strip() or 'another process'}",
                where=str(folder),
                remedy="wait for it, stop it, or choose another run.name",
            ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def write_config(config: RunConfig) -> None:
    """Write ``config.yaml``, whole or not at all: from here on the directory is a run."""
    write_durably(config.run_dir / "config.yaml", dump_yaml(without_rebuild(config)))


def without_rebuild(config: RunConfig) -> RunConfig:
    """The configuration with ``data.rebuild`` off: a run encodes its data anew when it begins, not when it goes on."""
    return config.model_copy(update={"data": config.data.model_copy(update={"rebuild": False})})
