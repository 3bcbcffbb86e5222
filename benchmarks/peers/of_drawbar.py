"""drawbar, as its users run it: a configuration and ``Trainer(config).fit()``."""

import json
from pathlib import Path
from typing import Any

import drawbar
from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload, drawbar_settings


class RecordSteps(drawbar.Callback):
    """Stamps each step once everything that was due at it is done."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_start(self, run: drawbar.RunHandle) -> None:
        self.recorder.begin()

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        self.recorder.step(info.result.loss)


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    """Options: ``overrides`` (more settings of drawbar), ``task`` (a class, as ``module:Class``)."""
    work, how = Workload.of(workload), Settings(**settings)
    config = drawbar.load_config(None, overrides(work, how, folder)).config
    recorder = Recorder(work)
    drawbar.Trainer(config, callbacks=[RecordSteps(recorder)]).fit()
    found = recorder.result()
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = {name: value for line in lines for name, value in line.items() if name.startswith("eval/")}
    return {**found, "held_out_loss": scores.get("eval/validation/loss")}


def overrides(workload: Workload, how: Settings, folder: str) -> list[str]:
    rows = workload.rows // rank_and_size()[1] // how.micro_batches
    return [
        *drawbar_settings(workload, Path(folder)),
        f"task.model={workload.model_path}",
        f"precision={how.precision}",
        f"parallel.compile={'true' if how.compiled else 'false'}",
        f"parallel.strategy={how.strategy}",
        *([f"train.micro_batch={rows}"] if how.micro_batches > 1 else []),
        *how.options.get("overrides", []),
    ]
