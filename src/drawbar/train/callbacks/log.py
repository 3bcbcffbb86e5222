"""Metrics every few steps, and model FLOPs utilization (MFU): the fraction of the devices' peak FLOP/s."""

from statistics import fmean

import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.models.model_flops import peak_flops, training_flops_per_token
from drawbar.tracking.meters import peak_memory
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.callbacks.nan_check import check_finite
from drawbar.train.run import Run
from drawbar.train.step import StepInfo


class LogCallback(Callback):
    """Logs metrics every few steps. The loss is that of the step's own global batch, so a resumed run logs the same."""

    def __init__(self, run: Run) -> None:
        self._every = run.config.tracking.log_every
        self._run = run
        self._mfu = mfu_of_one_token_per_second(run.engine, run.config, run.world)
        self._data_waits: list[float] = []

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._run.meter.add(info.num_tokens)
        self._data_waits.append(info.data_wait_seconds)
        self._run.console.advance(info.step)
        is_due = info.step % self._every == 0 or info.step == 1 or info.last
        if is_due or info.step == self._run.saver.first_step:
            check_finite(info, self._run)
        if is_due:
            values = self._values(info)
            with self._run.world.working(f"logging step {info.step}"):
                self._run.trackers.log(info.step, values)
                self._run.console.log(info.step, values)
            self._data_waits.clear()

    def _values(self, info: StepInfo) -> dict[str, float]:
        speed = self._run.meter.read()
        mfu = {} if self._mfu is None else {"train/mfu": speed * self._mfu}
        failed = self._run.saver.failed_saves
        return {
            "train/loss": float(info.result.loss),
            "train/lr": info.result.lr,
            "train/grad_norm": float(info.result.grad_norm),
            "train/weight": info.result.num_targets,
            "train/epoch": self._run.loader.epoch,
            "train/skipped": info.progress.skipped,
            f"train/{'tokens' if self._run.loader.counts_tokens else 'samples'}_per_second": speed,
            **mfu,
            **({"train/failed_saves": failed} if failed else {}),
            "train/data_wait_seconds": fmean(self._data_waits),
            "train/peak_memory_gib": peak_memory(self._run.world.device) / 2**30,
        }


def mfu_of_one_token_per_second(engine: Engine, config: RunConfig, world: Distributed) -> float | None:
    """The factor that converts tokens per second to model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). In packed rows each token counts as attending to ``data.sequence_length`` tokens; in other rows, which
    are short, attention is neglected.

    Returns:
        None if the operations of the model or the peak of the device are not known, and in fp32, for which vendors
        give several kinds of peaks.
    """
    if world.device.type != "cuda" or config.precision == "fp32":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    attended = config.data.sequence_length if config.data.batching == "packed" else 0
    flops = training_flops_per_token(engine.meta_model, attended)
    return None if peak is None or flops is None else flops / (peak * world.size)
