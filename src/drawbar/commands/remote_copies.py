"""List and verify the copies of a run's checkpoints in an object store."""

import sys
import tempfile
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Unusable, step_name
from drawbar.checkpoint.inspection import CheckpointSummary, number_of_writers
from drawbar.checkpoint.object_store import ObjectStore
from drawbar.checkpoint.remote_checkpoints import Objects, RemoteCheckpoints
from drawbar.commands.checkpoints import print_summaries
from drawbar.config.schema.secrets import check_store_url
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from drawbar.util.best_score import BEST_FILE, BestScore


def list_copies(url: str, as_json: bool) -> None:
    """Print the checkpoints in a run's folder of an object store as a table, or as one JSON object a line.

    Raises:
        UserError: the URL cannot be used, or the store does not answer.
    """
    store = _store(url)
    remote = RemoteCheckpoints(store)
    found = [_summary(remote, step, objects) for step, objects in remote.all().items()]
    if not found and not store.exists("config.yaml"):
        raise UserError(
            f"there is no run in {url}: neither a checkpoint nor a config.yaml",
            where=url,
            remedy="see that the bucket exists; RUN is CHECKPOINT.REMOTE/RUN.NAME",
        )
    print_summaries(found, _best_step(store, url), f"{url}/checkpoints", as_json)
    if not found and not as_json:
        print(f"{url} has no checkpoints yet")


def _best_step(store: ObjectStore, url: str) -> int | None:
    """The step that ``best.json`` in the store names; None, with a warning, where it is damaged."""
    name = f"checkpoints/{BEST_FILE}"
    try:
        return BestScore.from_json(store.read(name)).step
    except FileNotFoundError:
        return None
    except ValueError:
        logger.warning("%s is damaged: it does not say which checkpoint is the best one (%s/%s)", BEST_FILE, url, name)
        return None


def _summary(remote: RemoteCheckpoints, step: int, objects: Objects) -> CheckpointSummary:
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
    """Read every byte of the checkpoints in a run's folder of an object store, or of one, and print what is wrong;
    return the exit code. Each is copied to a temporary folder on this machine's disk.

    Raises:
        UserError: the URL cannot be used, the store does not answer, or has no such step; or the disk is too small.
    """
    remote = RemoteCheckpoints(_store(url))
    found = {step: objects for step, objects in remote.all().items() if wanted in (None, step)}
    if not found:
        raise UserError(
            f"{url} has no checkpoint" if wanted is None else f"{url} has no checkpoint of step {wanted}",
            where=url,
            remedy="`drawbar checkpoint list` shows those that there are; RUN is CHECKPOINT.REMOTE/RUN.NAME",
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
        raise UserError(str(error), where="RUN", remedy="give it without that, as s3://bucket/runs/NAME") from error
