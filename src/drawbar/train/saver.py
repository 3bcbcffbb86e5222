"""Saves in background threads, and handles failed saves."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import clear_frames

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import RESOLVED, RUN, step_name
from drawbar.checkpoint.space import DiskFault, ensure_free_space
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import Loader
from drawbar.distributed.interrupt import SIGNAL_SECONDS
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.pulse import Kind
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger
from drawbar.train.checkpoint_layouts import CheckpointLayout, PartsLayout, WholeTensorsLayout, choose_layout
from drawbar.train.checkpoint_uploader import start_uploader
from drawbar.train.run_dir_lock import RunDirLock, RunDirLost
from drawbar.train.rundir import run_id
from drawbar.train.step import RunProgress
from drawbar.train.stop import Reason, Stop
from drawbar.util.atomic_files import sync


class SignalLeadTime:
    """Warns once if a save takes longer than the time between the job's signal and its time limit.

    Args:
        environ: without ``SIGNAL_SECONDS`` in it, the time limit is unknown, and nothing is compared.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        seconds = environ.get(SIGNAL_SECONDS)
        self._seconds = None if seconds is None else float(seconds)

    def compare(self, save_seconds: float) -> None:
        """Call after each save.

        Args:
            save_seconds: time from the start of the copy to host memory until the checkpoint was complete on disk,
                without the wait for an earlier save.
        """
        if self._seconds is not None and save_seconds > self._seconds:
            logger.warning(
                "a save takes %.4g s until it is on the disk, but this job is signalled to save only %.4g s before its "
                "time limit: the steps after its last regular checkpoint would be lost. Set cluster.signal_seconds to "
                "more than %.4g: the current step and any save in progress must finish first",
                save_seconds,
                self._seconds,
                2 * save_seconds,
            )
            self._seconds = None


class AsyncWriter:
    """One background thread that writes one checkpoint at a time.

    Call ``wait()`` before the next copy of the state, so that host memory never holds two snapshots::

        writer.wait()
        snapshot = Snapshot(step, host_copies(model), …)
        writer.submit(partial(directory.write, snapshot))

    A process that exits finishes its last write; a killed process leaves a ``.tmp`` folder.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write once the previous one has ended."""
        self.wait()
        self._pending = self._thread.submit(write)

    def submit_after_success(self, write: Callable[[], None]) -> None:
        """Queue a write to run if the previous one succeeds, without waiting for it; ``write`` must not hold a
        snapshot."""
        before = self._pending

        def in_turn() -> None:
            if before is not None:
                before.result()
            write()

        self._pending = self._thread.submit(in_turn)

    def is_writing(self) -> bool:
        """Whether a write is running or queued. Thread-safe."""
        pending = self._pending
        return pending is not None and not pending.done()

    def wait(self) -> None:
        """Wait until nothing is being written. A failed write does not raise here: see ``pop_error``."""
        if self._pending is None:
            return
        # Forget the write only once it has ended: Ctrl-C may interrupt the wait, and its error must not be lost.
        wait_for([self._pending])
        ended, self._pending = self._pending, None
        error = ended.exception()
        if error is not None:
            _drop_snapshot(error)
            self._error = self._error or error

    @property
    def has_failed(self) -> bool:
        """Whether ``pop_error`` has an error."""
        return self._error is not None

    def pop_error(self, kind: type[BaseException] = BaseException) -> BaseException | None:
        """Return and clear the error of the first failed write if it is of this kind; else return None."""
        if not isinstance(self._error, kind):
            return None
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait for the last write, then end the thread."""
        self.wait()
        self._thread.shutdown()


def _drop_snapshot(error: BaseException | None) -> None:
    """Clear the frames of a failed write: they hold its snapshot, and the next one needs that memory. A closure would
    still keep the snapshot, so pass a ``partial`` to ``submit``.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Saver:
    """Saves in background threads: on all ranks if checkpoints are written in parts, else on rank 0. Training waits for
    the copy to host memory, and for an earlier save that is still being written.

    A failed save requests a stop, so that all ranks end after the same step, after trying to save that one. With
    ``checkpoint.on_error: warn``, a save that fails with a disk error is only skipped: the previous save remains the
    newest. The failed step cannot be the best one: the progress reverts to the best step and score before it
    (``confirm_best``).

    Args:
        shares_disk: whether all nodes see the run directory.
        progress: the run's progress when this process starts. If the run resumes from its own checkpoint, that step
            counts as saved.
        validation: the validation data.
        lock: of the run directory. If that is lost, the last step is saved in another one.
        make_run_dir: makes that one.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Loader,
        world: Distributed,
        shares_disk: bool,
        stop: Stop,
        progress: RunProgress,
        validation: Split | None,
        lock: RunDirLock,
        make_run_dir: Callable[[str], Path],
    ) -> None:
        self._config = config.checkpoint
        self._lock = lock
        self._make_run_dir = make_run_dir
        self._run = run_id(config.run_dir)
        self._resolved = {  # in a checkpoint's state: ``RESOLVED``
            "precision": config.precision,
            "muon_precision": config.optim.muon_precision,
            "cross_entropy": engine.cross_entropy,
            "padding_free": config.data.padding_free,
        }
        self._directory = CheckpointDirectory(config.run_dir / "checkpoints", lock.check)
        self._metrics = config.run_dir / "metrics.jsonl"
        self._metric = config.eval.metric
        self._validation = None if validation is None else validation.samples.fingerprint
        self._engine = engine
        self._loader = loader
        self._world = world
        self._stop = stop
        self._layout: CheckpointLayout = (
            PartsLayout(self._directory, engine, world)
            if choose_layout(self._config.layout, engine, shares_disk) == "parts"
            else WholeTensorsLayout(self._directory, engine, world)
        )
        self._uploader = start_uploader(config, world, stop)
        self._writer = AsyncWriter()
        self._signal_lead_time = SignalLeadTime()
        self._failed: set[int] = set()
        world.end_only_after(self._writer.is_writing)
        resumed = world.from_rank0(lambda: progress.step in self._directory.steps(), "looking at the checkpoints")
        self._last_saved: RunProgress | None = replace(progress) if resumed else None
        self._saved_before_last = self._before_amendment = self._last_saved
        self._confirmed_best = (progress.best_step, progress.best_score)  # of the newest save known to have succeeded
        self.first_step = progress.step + 1
        """First step that this process makes."""

    @property
    def last_saved_progress(self) -> RunProgress | None:
        """Progress of the newest save, by this process or by the run that it resumed; the save may still be running or
        have failed. None if there is no checkpoint yet, and once all ranks have agreed to stop after a failed save."""
        return None if self._stop.reason is Reason.UNSAVED else self._last_saved

    @property
    def failed_saves(self) -> int:
        """Number of failed saves that were skipped, as far as this process knows."""
        return len(self._failed)

    def has_saved(self, progress: RunProgress) -> bool:
        """Whether this progress is that of the newest save, once all writes have ended. With ``checkpoint.on_error:
        warn``, a failed save does not count. With ``stop`` it may count: call ``wait``, which raises its error.
        Collective."""
        return self.newest(progress) == progress

    def newest(self, progress: RunProgress) -> RunProgress | None:
        """Progress of the newest save, once all writes have ended: see ``has_saved``. ``progress`` is that of the run,
        and changes as in ``confirm_best``. Collective."""
        self._wait_and_agree(progress)
        return self.last_saved_progress

    def confirm_best(self, progress: RunProgress) -> None:
        """Make sure that the best step has a checkpoint: if its save failed and was skipped, reset the best step and
        score in ``progress`` to those before it. Call it before comparing a new score with the best one. Waits for that
        save, once. Collective."""
        saved = self.last_saved_progress
        if saved is None or not self._config.keep_best or self._config.on_error == "stop":
            return
        if progress.best_step == saved.step != self._confirmed_best[0]:
            self._wait_and_agree(progress)

    def amend_newest(self, progress: RunProgress) -> bool:
        """Update the progress and the position in the data in the newest checkpoint, which has this step, and wait for
        it. Returns whether that has worked, on all ranks. Collective."""
        self.save(progress)
        with self._world.barrier_after(self._writing, Kind.SAVE):
            self._writer.wait()
        return all(self._world.all_gather(not self._writer.has_failed))

    def check_savable(self) -> None:
        """Raise UserError if a resumed run could not load what would be saved."""
        self._engine.check_savable()

    def save(self, progress: RunProgress) -> None:
        """Save this step; if it already has a checkpoint, update only the progress and the position in the data.
        Changes the best step and score in ``progress`` as ``confirm_best`` does. Collective."""
        if self.last_saved_progress is not None and self.last_saved_progress.step == progress.step:
            self._before_amendment, self._last_saved = self.last_saved_progress, replace(progress)
            changes = {"progress": progress.state(), "data": self._loader.state()}
            if self._world.is_rank0:
                amend = partial(self._directory.update_state, progress.step, changes)
                self._writer.submit_after_success(self._background_write(progress, amend))
            return
        assert self._engine.step == progress.step, "a checkpoint has the weights of its step"
        self.check_savable()
        self._wait_and_agree(progress)  # never two copies in host memory
        begin = time.monotonic()
        values = {
            "progress": progress.state(),
            "data": self._loader.state(),
            "world_size": self._world.size,
            RUN: self._run,
            RESOLVED: self._resolved,
            "validation": self._validation,
            "base": None if self._engine.base is None else self._engine.base.digest,
        }
        write = self._layout.copy(
            progress.step, values, partial(self._ensure_free_space, progress.step, progress.best_step)
        )
        self._saved_before_last, self._last_saved = self._last_saved, replace(progress)
        self._before_amendment = self._last_saved
        if write is not None:
            self._writer.submit(self._background_write(progress, partial(self._timed, begin, write)))

    def _wait_and_agree(self, progress: RunProgress) -> None:
        """Wait until all writes have ended, and agree with all ranks on whether the newest save failed and is skipped;
        if so, its step is no longer the best one. Collective."""
        with self._world.barrier_after(self._writing, Kind.SAVE):
            self._writer.wait()
        is_held = partial(self._lock.is_still_held, self._stop.fail)
        if not self._world.from_rank0(is_held, "looking at the run directory"):
            self._save_elsewhere()
        if self._config.on_error == "stop":
            return  # ``wait`` raises the error
        own = self._writer.pop_error(DiskFault)
        faults = [fault for fault in self._world.all_gather(None if own is None else str(own)) if fault is not None]
        saved = self._last_saved
        if saved is None:
            return
        if not faults:
            self._confirmed_best = (saved.best_step, saved.best_score)
            return
        if saved.step not in self._failed:  # it was another rank's disk
            self._warn_of_skipped_save(saved.step, faults[0])
        step = saved.step
        if self._world.from_rank0(lambda: step in self._directory.steps(), "looking at the checkpoints"):
            self._last_saved = self._before_amendment  # which alone, or what follows the save, has failed
            return
        self._last_saved = self._saved_before_last
        # a run that is still at that step is about to save it again. ``evaluations_since_best`` is unchanged, as the
        # model did improve
        if self._config.keep_best and progress.best_step == saved.step != progress.step:
            progress.best_step, progress.best_score = self._confirmed_best

    def _save_elsewhere(self) -> None:
        """Save in a new run directory from here on. Collective."""
        run_dir = self._world.from_rank0(lambda: self._make_run_dir(self._lock.rescue_name), "making a run directory")
        self._lock = RunDirLock(run_dir)  # not taken, so it cannot be lost: only this process knows the directory
        self._directory.path, self._directory.check_owner = run_dir / "checkpoints", self._lock.check
        self._run, self._last_saved = run_id(run_dir), None
        self._writer.pop_error()  # of a save in the directory that is lost

    def _ensure_free_space(self, step: int, best_step: int | None, needed_bytes: int) -> None:
        """Raise DiskFault if the checkpoint of a step does not fit on the disk."""
        delete_older = partial(self._delete_older, step_name(step), best_step)
        ensure_free_space(self._directory.path, step_name(step), needed_bytes, delete_older)

    def _delete_older(self, name: str, best_step: int | None) -> None:
        """Delete leftovers of failed saves, and the checkpoints that a rotation after them would have deleted."""
        with self._directory.explain_write_errors(name):
            self._directory.remove_leftovers()
        self._directory.rotate(self._config.keep, self._protected(best_step))

    def _timed(self, begin: float, write: Callable[[], None]) -> None:
        write()
        if self._world.is_rank0:
            self._signal_lead_time.compare(time.monotonic() - begin)

    def _background_write(self, progress: RunProgress, write: Callable[[], None]) -> Callable[[], None]:
        """``_write`` with its arguments, including the current values of ``progress``, for the background thread."""
        return partial(self._write, progress.step, progress.best_step, progress.best_score, write)

    def _write(self, step: int, best_step: int | None, best_score: float | None, write: Callable[[], None]) -> None:
        """Runs in the background thread: write or amend a step's checkpoint, or this rank's part of it."""
        try:
            if self._world.is_rank0:
                with suppress(OSError):  # a failing metrics file must not cost a checkpoint
                    sync(self._metrics)  # first: a run resumed from this step does not rewrite these lines
            write()
            if self._world.is_rank0:
                self._mark_best_and_rotate(step, best_step, best_score)
        except RunDirLost as error:
            self._stop.fail(error)
            raise
        except Exception as error:
            if self._is_tolerated(error):
                self._warn_of_skipped_save(step, str(error))
            else:
                reason = error.what if isinstance(error, UserError) else repr(error)
                logger.warning("the save of step %d failed; the run saves its current step and ends: %s", step, reason)
                self._stop.request(Reason.UNSAVED)
            raise

    def _is_tolerated(self, error: BaseException) -> bool:
        return self._config.on_error == "warn" and isinstance(error, DiskFault)

    def _warn_of_skipped_save(self, step: int, fault: str) -> None:
        self._failed.add(step)
        logger.warning("the save of step %d failed; the run continues (checkpoint.on_error: warn): %s", step, fault)

    def _mark_best_and_rotate(self, step: int, best_step: int | None, best_score: float | None) -> None:
        self._directory.update_best(best_step, self._metric, best_score, begin=self._config.keep_best)
        self._directory.rotate(self._config.keep, self._protected(best_step) | {step})
        if self._uploader is not None:
            self._uploader.notify()

    def _protected(self, best_step: int | None) -> set[int]:
        """Steps that rotation must not delete. ``best_step`` may not be on the disk yet; until it is, the previous best
        is protected, too."""
        uploading = set() if self._uploader is None else self._uploader.protected
        if not self._config.keep_best:
            return uploading
        return uploading | self._directory.kept_as_best() | ({best_step} if best_step is not None else set())

    def wait(self) -> None:
        """Wait until the newest save is on every disk. Collective. A UserError of any save is raised on all ranks,
        other errors only on their own rank."""
        with self._world.barrier_after(self._writing, Kind.SAVE):  # ranks that write nothing wait here
            self._writer.wait()
            error = self._with_resume_hint(self._writer.pop_error())
        for failure in self._world.all_gather(error if isinstance(error, UserError) else None):
            if failure is not None:
                raise failure
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until this rank's writes are on its disk, then end the background thread. Raises the error of a save."""
        with self._world.working(self._writing, Kind.SAVE):
            self._writer.close()
            if self._uploader is not None:
                self._uploader.close()
                if self._last_saved is not None:  # a checkpoint may have been kept only until it was uploaded
                    self._directory.rotate(self._config.keep, self._protected(self._last_saved.best_step))
            error = self._with_resume_hint(self._writer.pop_error())
        if error is not None and not self._is_tolerated(error):
            raise error

    def _with_resume_hint(self, error: BaseException | None) -> BaseException | None:
        """The error, with the checkpoints to resume from appended: a later save may have succeeded. It names this rank,
        as every rank may raise it."""
        if not isinstance(error, UserError):
            return error
        what = f"{error.what}. {self._directory.describe_newest()}"
        hinted = UserError(what, where=error.where, remedy=error.remedy, exit_code=error.exit_code)
        hinted.origin = error.origin or self._world.describe()
        return hinted

    @property
    def _writing(self) -> str:
        return "saving" if self._last_saved is None else f"writing the checkpoint of step {self._last_saved.step}"
