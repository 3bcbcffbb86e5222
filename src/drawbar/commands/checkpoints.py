"""List, verify and prune the checkpoints of a run."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Unusable, step_name
from drawbar.checkpoint.inspection import (
    CheckpointSummary,
    names_set_aside,
    number_of_writers,
    problems,
    summaries,
    unlisted_files,
)
from drawbar.checkpoint.object_store import ObjectStore
from drawbar.checkpoint.read import explain_read_errors
from drawbar.checkpoint.remote_checkpoints import Objects, RemoteCheckpoints
from drawbar.checkpoint.space import readable
from drawbar.config.io.source import read_file, run_folder
from drawbar.config.schema.run_config import CheckpointSection
from drawbar.config.schema.section import check_store_url
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from drawbar.tracking.table import print_table
from drawbar.train.run_dir_lock import lock_run_dir
from drawbar.util.best_score import BEST_FILE, BestScore


def list_copies(url: str, as_json: bool) -> None:
    """Print the checkpoints in a run's folder of an object store as a table, or as one JSON object per line.

    Raises:
        UserError: the URL cannot be used, or the store does not answer.
    """
    store = _store(url)
    remote = RemoteCheckpoints(store)
    found = [_summary_of_copy(remote, step, objects) for step, objects in remote.all().items()]
    if not found and not store.exists("config.yaml"):
        raise UserError(
            f"there is no run in {url}: neither a checkpoint nor a config.yaml",
            where=url,
            remedy="check that the bucket exists; RUN is CHECKPOINT.REMOTE/RUN.NAME",
        )
    print_summaries(found, _best_copied_step(store, url), f"{url}/checkpoints", as_json)
    if not found and not as_json:
        print(f"{url} has no checkpoints yet")


def _best_copied_step(store: ObjectStore, url: str) -> int | None:
    """The step named in the store's ``best.json``; None if there is none, or, with a warning, if it is damaged."""
    name = f"checkpoints/{BEST_FILE}"
    try:
        return BestScore.from_json(store.read(name)).step
    except FileNotFoundError:
        return None
    except ValueError:
        logger.warning("%s is damaged: it does not say which checkpoint is the best one (%s/%s)", BEST_FILE, url, name)
        return None


def _summary_of_copy(remote: RemoteCheckpoints, step: int, objects: Objects) -> CheckpointSummary:
    manifest, problem = None, None
    try:
        manifest = remote.check(step, objects)
    except Unusable as reason:
        problem = str(reason)
    return CheckpointSummary(
        folder=Path(step_name(step)),
        step=step,
        parts=number_of_writers(manifest),
        size=sum(objects.values()),
        saved_at=remote.saved_at(step, objects),
        problem=problem,
    )


def verify_copies(url: str, wanted: int | None) -> int:
    """Read every byte of the checkpoints, or of one, in a run's folder of an object store, and print what is wrong;
    return the exit code. Each checkpoint is copied to a temporary folder on this machine's disk.

    Raises:
        UserError: the URL cannot be used, the store does not answer or has no such step, or the disk is too small.
    """
    remote = RemoteCheckpoints(_store(url))
    found = {step: objects for step, objects in remote.all().items() if wanted in (None, step)}
    if not found:
        raise UserError(
            f"{url} has no checkpoint" if wanted is None else f"{url} has no checkpoint of step {wanted}",
            where=url,
            remedy="`drawbar checkpoint list` shows the existing ones; RUN is CHECKPOINT.REMOTE/RUN.NAME",
        )
    damaged = False
    for step, objects in found.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                remote.download(step, objects, CheckpointDirectory(Path(folder)))
            print(f"{step_name(step)}: every byte is as it was written")
        except Unusable as reason:
            damaged = True
            print(f"{step_name(step)}: damaged\n  {reason}")
        sys.stdout.flush()
    return ExitCode.FAILED if damaged else ExitCode.DONE


def _store(url: str) -> ObjectStore:
    try:
        return ObjectStore(check_store_url(url))
    except ValueError as error:
        raise UserError(str(error), where="RUN", remedy="write it as s3://bucket/runs/NAME") from error


def list_checkpoints(run: Path, as_json: bool) -> None:
    """Print the checkpoints of a run as a table, or as one JSON object per line.

    Raises:
        UserError: there is no such run, or the disk cannot be read.
    """
    directory = _directory(run)
    best, damage = _best_step(directory)
    if damage is not None:
        logger.warning("%s (%s)", damage.what, damage.where)
    found = summaries(directory)
    print_summaries(found, best, str(directory.path), as_json)
    if as_json:
        return
    if not found:
        print(f"{directory.path} has no checkpoints yet")
    for name in names_set_aside(directory):
        print(f"{name}: a run could not use it, and set it aside")


def print_summaries(found: list[CheckpointSummary], best: int | None, place: str, as_json: bool) -> None:
    """Print checkpoints as a table, or as one JSON object per line.

    Args:
        best: the step of the best one, if there is one.
        place: the folder or URL that contains them.
    """
    if found and not as_json:
        columns = ["step", "saved", "", "state", "parts", "size"]
        print_table("Checkpoints", columns, [_row(summary, best) for summary in found], left=4)
    for summary in found if as_json else []:
        values = asdict(summary) | {"folder": f"{place}/{summary.folder.name}", "best": summary.step == best}
        print(json.dumps(values), flush=True)


def _row(summary: CheckpointSummary, best: int | None) -> list[str]:
    saved = summary.saved_at
    return [
        str(summary.step),
        "–" if saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(saved)),
        "best" if summary.step == best else "",
        "complete" if summary.problem is None else f"damaged: {summary.problem}",
        str(summary.parts) if summary.parts else "–",
        readable(summary.size),
    ]


def verify_checkpoints(run: Path, step: int | None) -> int:
    """Read every byte of a run's checkpoints, or of one of them, and print what is wrong; return the exit code.

    Raises:
        UserError: there is no such run or step, or the disk cannot be read.
    """
    directory = _directory(run)
    found = [summary for summary in summaries(directory) if step in (None, summary.step)]
    if not found:
        raise UserError(
            f"{run} has no checkpoint" if step is None else f"{run} has no checkpoint of step {step}",
            where=str(directory.path),
            remedy="`drawbar checkpoint list` shows the existing ones",
        )
    damaged = 0
    if step is None and (damage := _best_step(directory)[1]) is not None:
        print(f"{BEST_FILE}: damaged\n  {damage.what}")
        damaged = 1
    for summary in found:
        with explain_read_errors(summary.folder):
            wrong, foreign = problems(summary.folder), unlisted_files(summary.folder)
        if wrong and not summary.folder.exists():
            continue  # the run has deleted it in the meantime
        damaged += bool(wrong)
        print(f"{summary.folder.name}: {'damaged' if wrong else 'every byte is as it was written'}")
        for line in [*wrong, *(f"{name} is not part of it" for name in foreign)]:
            print(f"  {line}")
        sys.stdout.flush()
    return ExitCode.FAILED if damaged else ExitCode.DONE


def prune_checkpoints(run: Path, keep: int | None, dry_run: bool, may_delete: Callable[[str], bool]) -> None:
    """Delete all complete checkpoints except the newest and the best one, as a run does after each save.

    Args:
        keep: how many of the newest to keep; None for the number in the run's configuration.
        may_delete: called with a question for the user; returns whether to delete.

    Raises:
        UserError: there is no such run, it is being trained, its newest checkpoint is damaged, or the disk fails.
    """
    directory = _directory(run)
    with nullcontext() if dry_run else lock_run_dir(run):
        keep = keep or _configured_keep(run)
        best, damage = _best_step(directory)
        if damage is not None:
            raise UserError(
                f"nothing was deleted, as {damage.what}",
                where=damage.where,
                remedy="delete that file, to keep only the newest checkpoints, whichever is the best; or continue the "
                "run: its next save rewrites the file",
            ) from damage
        steps = directory.steps()
        doomed = [step for step in steps[:-keep] if step != best]
        if not doomed:
            print("there is nothing to delete")
            return
        found = summaries(directory)
        _refuse_damaged(found[-1].folder)
        sizes = {summary.step: summary.size for summary in found}
        named = f"step{'s' if len(doomed) > 1 else ''} {', '.join(map(str, doomed))}"
        what = f"{readable(sum(sizes[step] for step in doomed))} of {named}"
        if dry_run:
            print(f"would delete {what}")
        elif may_delete(f"delete {what}?"):
            directory.rotate(keep, set() if best is None else {best})
            _expect_gone(directory, doomed)
            print(f"deleted {what}")


def _expect_gone(directory: CheckpointDirectory, doomed: list[int]) -> None:
    left = sorted({*doomed} & {*directory.steps()})
    if left:
        raise UserError(
            f"the checkpoints of these steps could not be deleted: {', '.join(map(str, left))}",
            where=str(directory.path),
            remedy="see the warnings above; what was deleted is gone, and the rest is complete",
            exit_code=ExitCode.FAILED,
        )


def _refuse_damaged(newest: Path) -> None:
    """Raise UserError if the newest checkpoint is damaged: the run would then resume from an older one."""
    with explain_read_errors(newest):
        wrong = problems(newest)
    if wrong:
        raise UserError(
            f"nothing was deleted, as the newest checkpoint is damaged: {wrong[0]}",
            where=str(newest),
            remedy="delete that checkpoint, or continue the run, which sets it aside and uses an older one",
        )


def _directory(run: Path) -> CheckpointDirectory:
    if not (run / "checkpoints").is_dir():  # otherwise, that is enough: a run may have lost its config.yaml
        run_folder(run)  # raises UserError if this is not a run
    return CheckpointDirectory(run / "checkpoints")


def _best_step(directory: CheckpointDirectory) -> tuple[int | None, UserError | None]:
    """The step of the best checkpoint, if there is one; and what is wrong with ``best.json``, if anything.

    Raises:
        UserError: the disk cannot be read.
    """
    try:
        best = directory.best_record()
    except UserError as error:
        if error.exit_code != ExitCode.WRONG_REQUEST:
            raise
        return None, error
    return None if best is None else best.step, None


def _configured_keep(run: Path) -> int:
    path = run / "config.yaml"
    values = read_file(path).values.get("checkpoint", {}) if path.exists() else {}
    try:
        return CheckpointSection.model_validate(values).keep
    except ValidationError as error:
        raise UserError(
            "the configuration of the run does not say how many checkpoints it keeps",
            where=str(path),
            remedy="give the number, as in --keep 3",
        ) from error
