"""Where a run starts (step 0, a checkpoint, a fork), and the files that record it: ``config.yaml``, ``origin.json``."""

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drawbar.checkpoint.directory import CheckpointDirectory, NewestUsable
from drawbar.checkpoint.format import STEP_NAME, OtherFormat, Unusable, step_name
from drawbar.checkpoint.inspection import verify_every_byte
from drawbar.checkpoint.read import explain_read_errors, is_of_other_run, unusable_error, verify_except_parts
from drawbar.config.io.compare import Difference, changed_schedule, check_same
from drawbar.config.io.load_config import dump_yaml, load_config
from drawbar.config.schema.run_config import RUN_NAME, RunConfig, RunSection
from drawbar.errors import UserError
from drawbar.models.folder import INITIAL_MODEL
from drawbar.runtime.log import logger
from drawbar.util.atomic_files import write_durably
from drawbar.util.run_dir import LAUNCH_FOLDER, LOCK_FILE

ORIGIN_FILE = "origin.json"
"""The run's id, which its checkpoints have, too; and the checkpoint of another run that it started from, if it did: it
restarts there until it has its own checkpoint."""
CONFIG_DRAFT = "config.yaml.tmp"
"""Temporary file that a killed process may leave behind: see ``write_durably``."""
_BEFORE_CONFIG = {LOCK_FILE, CONFIG_DRAFT, ORIGIN_FILE, f"{ORIGIN_FILE}.tmp", LAUNCH_FOLDER}
"""Files that may exist in the directory of a run that has no ``config.yaml`` yet."""

_FORK_REMEDY = (
    "set run.dir and run.name to the run to begin from; or leave out --fork, and delete that folder if it is a run of "
    "other settings"
)


class NothingToFork(UserError):
    """The run to fork from has no checkpoint on this disk. An object store may have the fork itself."""


@dataclass(frozen=True)
class RunStart:
    """Where a run starts."""

    checkpoint: Path | None = None
    """The checkpoint to resume or fork from; None to start at step 0."""
    forked: bool = False
    """Whether this starts a fork: the checkpoint is another run's, and the configuration may differ from that run's.
    False if the fork resumes from its own checkpoint, and for ``--resume PATH`` without ``--fork``, even if PATH is a
    checkpoint of another run."""
    weights_only: bool = False
    """Do not load the optimizer state from the checkpoint, which is another run's. Step, schedule and position in the
    data continue."""
    unusable: Mapping[Path, Unusable] = field(default_factory=dict)
    """Unusable checkpoints, to be moved aside before the run resumes, each with the reason."""
    changed_schedule: Sequence[Difference] = ()
    """Settings of the number of steps or of the learning rate schedule that differ from those of the resumed run or,
    for a fork, of its source."""
    refusal: UserError | None = None
    """The error if no start is usable: the run has checkpoints, or started from one, but none can be used."""
    older: Sequence[Path] = ()
    """Older checkpoints to fall back on, in this order, if reading the tensors reveals damage. Empty if the user named
    the checkpoint."""
    eval_mode: str | None = None
    """The ``eval.mode`` stored in the run directory; None for a run that does not exist yet."""

    def next_older_start(self, reason: Unusable) -> "RunStart":
        """The start from the next older checkpoint, after this one proved unusable.

        Raises:
            UserError: there is none, or the checkpoint is of another format.
        """
        assert self.checkpoint is not None
        unusable = {**self.unusable, self.checkpoint: reason}
        if not self.older or isinstance(reason, OtherFormat):
            checkpoints = CheckpointDirectory(self.checkpoint.parent)
            if self.forked or isinstance(reason, OtherFormat) or checkpoints.older_than(self.checkpoint):
                raise unusable_error(self.checkpoint, reason)
            raise _none_usable(NewestUsable(None, unusable, []), checkpoints.path)
        logger.warning("the checkpoint %s is damaged and is skipped: %s", self.checkpoint, reason)
        if self.forked:  # a fork leaves the other run's checkpoints in place
            unusable = {}
        return replace(self, checkpoint=self.older[0], older=self.older[1:], unusable=unusable)


def find_start(config: RunConfig, resume: str, fork: str | None, weights_only: bool = False) -> RunStart:
    """Decide where the run starts, before anything is written. Called on rank 0.

    Args:
        resume: ``auto`` (resume from the run directory's newest complete checkpoint), ``never``, or a checkpoint.
        fork: name of a new run that starts from a checkpoint of the run ``config`` and may have other settings.
        weights_only: ignore the optimizer state of that checkpoint, or of the one that ``resume`` names.

    Raises:
        UserError: the run directory holds other files, a run with other settings, a checkpoint of a newer drawbar or,
            with ``never``, a run that can be resumed; ``weights_only`` is given for a run that resumes from its own
            checkpoint; or the disk cannot be read.
    """
    target = config if fork is None else renamed(config, fork)
    with explain_read_errors(config.run_dir):
        if weights_only and fork is None and not _names_another(resume, config.run_dir):
            raise UserError(
                "--weights-only needs a checkpoint of another run, and none is named",
                where="--weights-only",
                remedy="add --fork NEWNAME for a new run from this run's weights, or leave out --weights-only",
            )
        if fork is None:
            start = _find(config, resume, weights_only)
        else:
            start = _find_fork(config, resume, target, weights_only)
        from_other_run = start.checkpoint is not None and not is_of_this_run(start.checkpoint, target.run_dir)
        takes_weights_only = from_other_run and (weights_only or start.weights_only)
        return replace(start, eval_mode=_eval_mode(target), weights_only=takes_weights_only)


def _names_another(resume: str, run_dir: Path) -> bool:
    """Whether ``resume`` is a checkpoint of another run."""
    if resume in ("auto", "never"):
        return False
    return not is_of_this_run(CheckpointDirectory(run_dir / "checkpoints").resolve(resume), run_dir)


def is_of_this_run(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is in the run's checkpoint folder, which may be a link to another disk."""
    return checkpoint.resolve().parent == (run_dir / "checkpoints").resolve()


def run_dir_of(checkpoint: Path | None, run_dir: Path) -> Path:
    """The run directory that a checkpoint belongs to: ``run_dir`` (also without a checkpoint), or another run's."""
    if checkpoint is None or is_of_this_run(checkpoint, run_dir):
        return run_dir
    return checkpoint.resolve().parent.parent


def _eval_mode(config: RunConfig) -> str | None:
    written = config.run_dir / "config.yaml"
    return load_config(written, task=type(config.task)).config.eval.mode if written.exists() else None


def _find(config: RunConfig, resume: str, weights_only: bool) -> RunStart:
    start = _find_in_run(config, resume, weights_only)
    if resume != "auto" or start.checkpoint is not None or start.refusal is not None:
        return start
    return replace(_read_origin(config.run_dir), changed_schedule=start.changed_schedule)


def _find_in_run(config: RunConfig, resume: str, weights_only: bool = False) -> RunStart:
    """A start from a checkpoint of the run itself, or from the one that ``resume`` names."""
    folder = config.run_dir
    checkpoints = CheckpointDirectory(folder / "checkpoints")
    if not (folder / "config.yaml").exists():
        _check_no_other_files(folder)
        return RunStart() if resume in ("auto", "never") else RunStart(checkpoints.resolve(resume))
    # read every byte before a run starts over, so that damage found by a resume is found here, too; and if the object
    # store may have an intact copy, as nothing is fetched once the restore has started
    is_thorough = resume == "never" or config.checkpoint.remote is not None
    run = run_id(folder)
    verify = partial(_verify_own, run, verify_every_byte if is_thorough else verify_except_parts)
    found = checkpoints.find_newest_usable(verify)
    refusal = _refusal(found, checkpoints.path)
    if resume == "never" and (found.newest is not None or refusal is None):
        raise UserError(
            f"the run {config.run.name} exists already",
            where=str(folder),
            remedy="choose another run.name, delete the folder, or omit --resume never to resume it",
        )
    changed = check_same(folder, config)
    if resume == "never":
        return RunStart(None, unusable=found.unusable)
    if found.newest is not None and refusal is not None:
        raise refusal
    if resume == "auto":
        older = [path for path in checkpoints.older_than(found.newest) if not is_of_other_run(path, run)]
        return RunStart(found.newest, unusable=found.unusable, changed_schedule=changed, refusal=refusal, older=older)
    chosen = checkpoints.resolve(resume).resolve()
    if chosen.parent != checkpoints.path.resolve():  # from elsewhere: the same command, run again, resumes this run
        _check_same_origin(folder, chosen, weights_only)
        return RunStart(found.newest or chosen, unusable=found.unusable, changed_schedule=changed)
    if refusal is not None:
        raise refusal
    if found.newest is None or chosen != found.newest.resolve():
        raise UserError(
            f"{resume} is not the newest checkpoint of {config.run.name}: resuming from it would lose later steps",
            where="--resume",
            remedy="omit --resume to resume from the newest, or add --fork NEWNAME to branch off from this one",
        )
    return RunStart(found.newest, unusable=found.unusable, changed_schedule=changed)


def _verify_own(run: str | None, verify: Callable[[Path], object], checkpoint: Path) -> None:
    """Raises Unusable for a checkpoint that somebody has copied here, or that another process has written here, whose
    run directory of the same name was deleted."""
    verify(checkpoint)
    if is_of_other_run(checkpoint, run):
        raise Unusable("another run wrote it; to begin there, name it with --resume and the run with run.name")


def _check_same_origin(run_dir: Path, named: Path, weights_only: bool) -> None:
    """Refuse a checkpoint of another run other than the one this run started from, if that still exists; and refuse
    ``weights_only`` if the run started with the optimizer state as well."""
    began = _read_origin(run_dir)
    if began.checkpoint is None:
        return
    if began.checkpoint.resolve() != named:
        how, where = f"from another checkpoint: {began.checkpoint}", "--resume"
    elif weights_only and not began.weights_only:
        how, where = "with the optimizer state of that checkpoint", "--weights-only"
    else:
        return
    raise UserError(
        f"the run {run_dir.name} exists already, and started {how}",
        where=where,
        remedy=f"choose another run.name to start over, or omit {where} to resume the run",
    )


def _refusal(found: NewestUsable, folder: Path) -> UserError | None:
    """Why a run must not resume automatically: it would lose checkpoints that it cannot read. Damaged ones do not count
    if an older one is intact."""
    if found.newest is None:
        return _none_usable(found, folder) if found.unusable or found.set_aside else None
    if not any(isinstance(reason, OtherFormat) for reason in found.unusable.values()):
        return None
    remedy = f"use that drawbar version, or branch off: --resume {found.newest.name} --fork NEWNAME"
    return _unusable("a newer checkpoint of the run cannot be used", found, folder, remedy)


def _none_usable(found: NewestUsable, folder: Path) -> UserError:
    is_newer = any(isinstance(reason, OtherFormat) for reason in found.unusable.values())
    remedy = (
        f"{'use that version of drawbar, ' if is_newer else ''}restore one from a copy, or give the path of another "
        "one (--resume PATH); or begin at step 0: under another run.name, or here by --resume never, which sets "
        "these checkpoints aside"
    )
    return _unusable("no checkpoint of the run can be used", found, folder, remedy)


def _unusable(what: str, found: NewestUsable, folder: Path, remedy: str) -> UserError:
    lines = [f"{path.name}: {reason}" for path, reason in found.unusable.items()]
    lines += [f"{path.name}: set aside before" for path in found.set_aside]
    return UserError("\n    ".join([f"{what}, and nothing was changed:", *lines]), where=str(folder), remedy=remedy)


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The same configuration for a new run under another name.

    Raises:
        UserError: the name is not a valid run name, or is the run's own.
    """
    if name == config.run.name:
        raise UserError(
            f"the new run would have the name of the run that it starts from: {name}",
            where="--fork",
            remedy="give the new run another name; or omit --fork to resume the run itself",
        )
    try:
        run = RunSection.model_validate({**config.run.model_dump(), "name": name})
    except ValidationError as error:
        raise UserError(
            f"{name!r} is not a valid run name",
            where="--fork",
            remedy=f"use {RUN_NAME}",
        ) from error
    return config.model_copy(update={"run": run})


def _find_fork(config: RunConfig, resume: str, target: RunConfig, weights_only: bool) -> RunStart:
    source = config.run_dir
    if (target.run_dir / "config.yaml").exists():  # the same command again: resume the fork
        _check_same_fork(source, resume, weights_only, target)
        start = _find_in_run(target, "auto")
        if start.checkpoint is None and start.refusal is None and resume == "auto":
            start = replace(_read_origin(target.run_dir), refusal=None)  # if it is gone, the fork starts over
        if start.checkpoint is not None or start.refusal is not None:
            return start
    else:
        _check_no_other_files(target.run_dir)
    checkpoints = CheckpointDirectory(source / "checkpoints")
    checkpoint = _checkpoint_to_fork(checkpoints, resume)
    older = checkpoints.older_than(checkpoint) if resume in ("auto", "never") else []
    return RunStart(checkpoint, forked=True, older=older, changed_schedule=changed_schedule(source, target))


def _checkpoint_to_fork(checkpoints: CheckpointDirectory, resume: str) -> Path:
    if resume not in ("auto", "never"):
        if checkpoints.steps() or Path(resume).is_dir():
            return checkpoints.resolve(resume)
    elif newest := checkpoints.latest():
        return newest
    what = f"there is nothing to fork: {checkpoints.path.parent} has no complete checkpoint"
    raise NothingToFork(what, where="--fork", remedy=_FORK_REMEDY)


def _check_same_fork(source: Path, resume: str, weights_only: bool, target: RunConfig) -> None:
    """Refuse to resume a run of the fork's name that started from another checkpoint than the command names. A command
    that names no step (``auto``, ``never``, ``latest``) resumes regardless of the source's progress since."""
    path = target.run_dir / ORIGIN_FILE
    try:
        origin = json.loads(path.read_text("utf-8"))
        if "checkpoint" not in origin:
            raise FileNotFoundError
        began = (target.run_dir.resolve().parent / origin["checkpoint"]).resolve()
        is_fork, without_optimizer = bool(origin["forked"]), bool(origin.get("weights_only", False))
        found = f"which began from {began.name} of {began.parent.parent}{' (weights only)' * without_optimizer}"
    except FileNotFoundError:
        began, is_fork, without_optimizer, found = target.run_dir, False, False, "which did not begin as a fork"
    except (ValueError, KeyError, TypeError, AttributeError):
        began, is_fork, without_optimizer, found = target.run_dir, False, False, f"and its {ORIGIN_FILE} is damaged"
    wanted = f"the newest checkpoint of {source}"
    same = is_fork and began.parent.parent == source.resolve()
    is_lost = resume == "best" and not CheckpointDirectory(source / "checkpoints").steps()  # the best is unknown
    if resume not in ("auto", "never", "latest") and not is_lost:
        named = _named_checkpoint(source, resume)
        wanted = f"{named.name} of {source}"
        same = is_fork and began == named
    if same and (without_optimizer or not weights_only):
        return
    wanted += " (weights only)" * weights_only
    raise UserError(
        f"there is a run {target.run.name} already, {found}; --fork asks for {wanted}",
        where="--fork",
        remedy=f"give the new run another name; or resume that run: run.name={target.run.name} without --fork",
    )


def _named_checkpoint(source: Path, resume: str) -> Path:
    """The checkpoint that ``resume`` names, by step or path, whether or not the run still keeps it."""
    folder = source / "checkpoints"
    if resume.isdecimal():
        return (folder / step_name(int(resume))).resolve()
    if STEP_NAME.fullmatch(Path(resume).name):
        return (folder / resume if Path(resume).name == resume else Path(resume)).resolve()
    return CheckpointDirectory(folder).resolve(resume).resolve()


def _check_no_other_files(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", where="run.dir, run.name", remedy="choose another run.name")
    if folder.is_dir() and [name for name in os.listdir(folder) if not _is_before_config(name)]:
        raise UserError(
            f"{folder} contains files, but no drawbar run (there is no config.yaml)",
            where="run.dir, run.name",
            remedy="choose another run.name, or move the files away",
        )


def _is_before_config(name: str) -> bool:
    """Whether this file may be in the directory of a run that has no ``config.yaml`` yet."""
    # a killed process may have left a draft of the initial model, which has the same prefix
    return name in _BEFORE_CONFIG or name.startswith(INITIAL_MODEL)


def run_id(run_dir: Path) -> str | None:
    """The id of a run; None where its directory does not say."""
    try:
        return str(json.loads((run_dir / ORIGIN_FILE).read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_origin(run_dir: Path, start: RunStart) -> None:
    """Record the run's id, and the checkpoint of another run that this one starts from. A start at step 0 removes an
    earlier record of a checkpoint; a start from the run's own checkpoint keeps it."""
    path, checkpoint = run_dir / ORIGIN_FILE, start.checkpoint and start.checkpoint.resolve()
    if checkpoint is not None and is_of_this_run(checkpoint, run_dir) and path.exists():
        return
    origin: dict[str, Any] = {"run": run_id(run_dir) or uuid.uuid4().hex}
    if checkpoint is not None and not is_of_this_run(checkpoint, run_dir):
        runs = run_dir.resolve().parent  # a path relative to it stays valid if the folder of all runs is moved
        named = os.path.relpath(checkpoint, runs) if checkpoint.is_relative_to(runs) else str(checkpoint)
        origin |= {"checkpoint": named, "forked": start.forked, "weights_only": start.weights_only}
    write_durably(path, json.dumps(origin, ensure_ascii=False, indent=2) + "\n")


def _read_origin(run_dir: Path) -> RunStart:
    """Where a run without its own checkpoint started; a refusal if that checkpoint is gone."""
    path = run_dir / ORIGIN_FILE
    if not path.exists():
        return RunStart()
    try:
        origin = json.loads(path.read_text("utf-8"))
        if "checkpoint" not in origin:
            return RunStart()
        checkpoint, forked = run_dir.resolve().parent / origin["checkpoint"], bool(origin["forked"])
        weights_only = bool(origin.get("weights_only", False))
        CheckpointDirectory(run_dir / "checkpoints").resolve(str(checkpoint))
    except (UserError, ValueError, KeyError, TypeError) as error:
        what = error.what if isinstance(error, UserError) else repr(error)
        refusal = UserError(
            f"the run {run_dir.name} has no checkpoint yet, and the one that it started from cannot be used: {what}",
            where=str(path),
            remedy="restore it, give another one (--resume PATH), or delete the run's folder to start at step 0",
        )
        return RunStart(refusal=refusal)
    return RunStart(checkpoint, forked, weights_only)


def write_config(config: RunConfig, start: RunStart) -> None:
    """Write ``config.yaml`` atomically: from here on the directory is a run. Before that, record where a new run
    starts."""
    _write_origin(config.run_dir, start)
    write_durably(config.run_dir / "config.yaml", dump_yaml(without_data_rebuild(config)))


def without_data_rebuild(config: RunConfig) -> RunConfig:
    """The configuration with ``data.rebuild`` off: a run rebuilds its data when it starts, not when it resumes."""
    return config.model_copy(update={"data": config.data.model_copy(update={"rebuild": False})})
