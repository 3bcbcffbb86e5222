"""Finds the starting point of a run with ``checkpoint.remote``: the newest checkpoint on its disk or in its store."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import OtherFormat, Unusable, step_name
from drawbar.checkpoint.inspection import verify_every_byte
from drawbar.checkpoint.object_store import ObjectStoreError
from drawbar.checkpoint.remote_checkpoints import Objects, RemoteCheckpoints
from drawbar.checkpoint.remote_owner import check_store_writable, wait_until_owner_ended
from drawbar.config.io.compare import check_same
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.errors import UserError
from drawbar.runtime.log import logger
from drawbar.train.checkpoint_uploader import known_owner, open_store, start_uploader
from drawbar.train.remote_run_files import CONFIG, RemoteRunFiles
from drawbar.train.run_dir_lock import lock_run_dir
from drawbar.train.rundir import NothingToFork, RunStart, is_of_this_run
from drawbar.train.stop import Stop
from drawbar.util.atomic_files import write_durably
from drawbar.util.best_score import BestScore


def find_start_on_disk_or_store(find: Callable[[], RunStart], config: RunConfig, resume: str) -> RunStart:
    """Find the starting point of the run. If the object store (``checkpoint.remote``) has a newer usable checkpoint
    than the disk, download it first, with the other files of the run. Called on rank 0.

    Args:
        find: ``find_start``, with its arguments.
        config: the configuration of the run to start; for a fork, its own.
        resume: as for ``find_start``.

    Raises:
        UserError: as ``find_start``; or another process trains the run; the run's copy is unusable, or is of a run with
            other settings; or the store does not answer, and the disk has no checkpoint either.
    """
    if config.checkpoint.remote is None:
        return find()
    nothing: NothingToFork | None = None
    try:
        start = find()
    except NothingToFork as error:  # on an empty machine, the same command resumes the fork from the store
        start, nothing = RunStart(), error
    own = _local_step(start, config.run_dir)
    try:
        has_fetched = _RemoteRun(config).fetch_newer(own, resume)
    except ObjectStoreError as error:
        if own < 0:
            raise UserError(
                f"the store of this run's checkpoints cannot be used: {error.what}",
                where=error.where,
                remedy=f"{error.remedy}; or train without copies: checkpoint.remote=null",
                exit_code=error.exit_code,
            ) from error
        logger.warning("the run resumes from its own disk, as the store does not answer: %s", error.what)
        return start
    if nothing is not None and not has_fetched:
        raise nothing
    return find() if has_fetched else start


def finish_uploads(config: RunConfig, world: Distributed, stop: Stop) -> None:
    """Upload what an earlier process of a complete run has not uploaded. Collective. Raises as ``start_uploader``."""
    uploader = start_uploader(config, world, stop)
    with world.barrier_after("copying the last checkpoint"):
        if uploader is not None:
            uploader.close()


def _local_step(start: RunStart, run_dir: Path) -> int:
    """The step of the run's own checkpoint that it would start from; -1 if it has none."""
    if start.checkpoint is None or not is_of_this_run(start.checkpoint, run_dir):
        return -1
    return int(start.checkpoint.name.removeprefix("step-").partition(".")[0])


class _RemoteRun:
    """A run's folder in the object store, at startup."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = open_store(config)
        self._remote = RemoteCheckpoints(self._store)
        self._run_files = RemoteRunFiles(self._store, config.run_dir)
        self._directory = CheckpointDirectory(config.run_dir / "checkpoints")

    def fetch_newer(self, own: int, resume: str) -> bool:
        """Download the newest usable checkpoint, if it is newer than step ``own``; return whether there was one. Newer
        damaged ones are set aside."""
        wait_until_owner_ended(self._store, known_owner(self._config))
        complete = self._remote.complete()
        newer = {step: objects for step, objects in complete.items() if step > own}
        if not newer:
            if own < 0:
                check_store_writable(self._store)  # before starting a run that could not be copied there
            return False
        if resume == "never":
            raise UserError(
                f"the run {self._config.run.name} exists already: the store has its step {max(newer)}",
                where=self._store.url,
                remedy="choose another run.name, delete that folder, or omit --resume never to resume it",
            )
        settings = self._check_same_run(max(newer))
        with self._run_dir_for(settings):
            self._run_files.fetch()
            self._fetch_best(complete)
            unusable = self._fetch_newest(newer)
            if len(unusable) == len(newer) and own < 0:
                raise self._refusal("none can be used", unusable)
        self._remote.set_aside(unusable)
        return len(unusable) < len(newer)

    def _check_same_run(self, newest: int) -> str:
        """The ``config.yaml`` in the store, whose newest step is ``newest``. Raises UserError if it is missing or
        belongs to another run."""
        text = self._run_files.config()
        if text is None:
            raise UserError(
                "the store has checkpoints of this run, but no config.yaml",
                where=self._store.url,
                remedy="restore it from the run directory, or choose another run.name",
            )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(text)
            try:
                check_same(Path(folder), self._config, stored_step=newest)
            except UserError as error:
                what = error.what.replace(folder, self._store.url)
                remedy = None if error.remedy is None else error.remedy.replace(folder, self._store.url)
                raise UserError(what, where=self._store.url, remedy=remedy) from error
        return text.decode()

    @contextmanager
    def _run_dir_for(self, settings: str) -> Iterator[None]:
        """Context manager in which the run directory exists. A new one is locked and has ``config.yaml``; if the copy
        is then refused, all but its lock file is deleted; if the store fails, downloaded files are kept. No-op for an
        existing run: the caller holds its lock."""
        folder = self._config.run_dir
        if (folder / CONFIG).exists():
            yield
            return
        folder.mkdir(parents=True, exist_ok=True)
        with lock_run_dir(folder):
            before = set(folder.iterdir())
            write_durably(folder / CONFIG, settings)  # first: a folder with a config.yaml is a run
            try:
                yield
            except ObjectStoreError:
                raise  # keep downloaded files: they need not be downloaded again
            except UserError:
                for path in sorted(set(folder.iterdir()) - before, key=lambda path: path.name != CONFIG):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                raise

    def _fetch_newest(self, newer: dict[int, Objects]) -> dict[int, Unusable]:
        """Download the newest usable checkpoint; return the damaged ones that were skipped, with the reasons.

        Raises:
            UserError: a checkpoint of another format comes first; older ones are not tried.
        """
        unusable: dict[int, Unusable] = {}
        for step, objects in reversed(newer.items()):
            try:
                if self._directory.verified_folder(step, verify_every_byte) is None:
                    logger.info("copying %s from %s", step_name(step), self._store.url)
                    self._remote.download(step, objects, self._directory)
            except OtherFormat as reason:
                raise self._refusal("a newer one cannot be used", {**unusable, step: reason}) from None
            except Unusable as reason:
                logger.warning("%s of %s is damaged and is skipped: %s", step_name(step), self._store.url, reason)
                unusable[step] = reason
                continue
            break
        return unusable

    def _fetch_best(self, complete: Mapping[int, Objects]) -> None:
        """Download the best checkpoint, which later commands need, if the disk lacks it; only warn if it is damaged.
        Called before the newest one is downloaded: once that is on the disk, nothing more is downloaded."""
        try:
            best = BestScore.from_json(self._run_files.best() or b"")
        except ValueError:
            return
        if best.step not in complete:
            return
        try:
            if self._directory.verified_folder(best.step, verify_every_byte) is None:
                self._remote.download(best.step, complete[best.step], self._directory)
        except Unusable as reason:
            logger.warning("the best checkpoint in %s cannot be used: %s", self._store.url, reason)
            return
        self._directory.set_best(best.step, best.metric, best.score)

    def _refusal(self, what: str, unusable: Mapping[int, Unusable]) -> UserError:
        lines = [f"{step_name(step)}: {reason}" for step, reason in unusable.items()]
        return UserError(
            "\n    ".join([f"of the copies of this run's checkpoints {what}, and none was changed:", *lines]),
            where=self._store.url,
            remedy="restore one, use the drawbar version that wrote them, or start a new run under another run.name",
        )
