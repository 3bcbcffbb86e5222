"""A profile of some steps."""

import torch

from drawbar.runtime.log import logger
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.run import Run
from drawbar.train.step import StepInfo


class ProfileCallback(Callback):
    """Records a torch.profiler trace of some steps, one file per rank, for chrome://tracing or Perfetto."""

    def __init__(self, run: Run) -> None:
        config, world = run.config.tracking.profile, run.world
        assert config is not None
        self._start = config.start
        self._last = config.start + config.steps - 1
        self._world = world
        self._path = run.config.run_dir / "profile" / f"rank-{world.rank:04d}.json"
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self, run: RunHandle) -> None:
        self._begin_if_next(run.step)

    def _begin_if_next(self, step: int) -> None:
        if step + 1 == self._start:
            self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._profiler.start()

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step == self._last:
            self._finish()
        self._begin_if_next(info.step)

    def on_train_end(self, run: RunHandle) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with self._world.barrier_after("writing the profile"):
            try:
                profiler.stop()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:
                logger.warning("the profile could not be written; the run continues: %s", error)
                return
        logger.info("profile of steps %d to %d: %s", self._start, self._last, self._path)
