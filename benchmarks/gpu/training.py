"""One contender's training on the rows of a folder, and its figures."""

import importlib
import json
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

import drawbar
from benchmarks.common.statistic import Statistic
from benchmarks.gpu.device import fastest
from benchmarks.gpu.random_model import RandomWorkload, flops_per_token
from benchmarks.peers.of_drawbar import overrides
from benchmarks.peers.recorder import Recorder
from benchmarks.peers.workload import Settings

PEERS = {"loop by hand": "hand_written", "Trainer": "hf_trainer", "Lightning": "with_lightning"}
WARM_UP, TRACED = 3, 1
"""Steps before those that are timed, and steps after them under torch.profiler."""


class _Enough(BaseException):
    """All that was to be measured is. No error: a run that fails, or ends, saves first."""


class MeasureSteps(drawbar.Callback):
    """Stamps each step, counts its targets, and ends the run after the last one that counts."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.targets: list[float] = []
        self.tokens: list[int] = []
        self.graphs = 0

    def on_train_start(self, run: drawbar.RunHandle) -> None:
        self.recorder.begin()

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        self.targets.append(info.result.num_targets)
        self.tokens.append(info.num_tokens)
        self.recorder.step(info.result.loss)
        if self.recorder.steps == WARM_UP:
            self.graphs = _graphs()
        if self.recorder.steps == self.recorder.workload.steps:
            raise _Enough


def train(
    peer: str,
    folder: str,
    rows: int,
    length: int,
    steps: int,
    settings: dict[str, Any],
    more: list[str] | None = None,
    trace: str | None = None,
    lora: bool = False,
) -> dict[str, Any]:
    """Milliseconds of a step, tokens a second, MFU, memory, host syncs and launches of a step, and the losses.

    Args:
        peer: ``drawbar``, or one of ``PEERS``.
        folder: from ``random_model.prepare``.
        rows: of a step; where all samples make one step, their number.
        length: of the longest row, in tokens.
        steps: that are timed.
        settings: the values of ``Settings``.
        more: settings of drawbar.
        trace: a file.
    """
    how = {"options": {"overrides": more or []}, **settings}
    data = [f"data.train={folder}/train.jsonl", f"data.sequence_length={length}"]
    sizes: dict[str, Any] = {"rows": rows, "steps": WARM_UP + steps + TRACED, "warm_up": WARM_UP, "traced": TRACED}
    work = RandomWorkload(folder, "causal_lm", **sizes, overrides=data, lr=1e-5, trace=trace, lora=lora)
    runs = Path(folder) / "runs"
    begun = time.time()
    try:
        if peer == "drawbar":
            found = _of_drawbar(work, Settings(**how), str(runs))
        else:
            found = importlib.import_module(f"benchmarks.peers.{PEERS[peer]}").train(work, how, str(runs))
            found["tokens"] = [sum(len(one["input_ids"]) for one in work.samples()[:rows])] * work.steps
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    return _figures(work, found, length, begun)


def _of_drawbar(work: RandomWorkload, how: Settings, folder: str) -> dict[str, Any]:
    config = drawbar.load_config(None, [*overrides(work, how, folder), f"train.steps={10 * work.steps}"]).config
    measured = MeasureSteps(Recorder(work))
    with suppress(_Enough):
        drawbar.Trainer(config, callbacks=[measured]).fit()
    chosen = config.run_dir / "micro_batch.json"
    return {
        **measured.recorder.result(),
        "tokens": measured.tokens,
        "graphs": {"graphs": _graphs(), "recompiled_when_warm": _graphs() - measured.graphs},
        "chosen_micro_batch": json.loads(chosen.read_text()) if chosen.exists() else None,
    }


def _figures(work: RandomWorkload, found: dict[str, Any], length: int, begun: float) -> dict[str, Any]:
    timed = slice(WARM_UP, work.steps - TRACED)
    seconds = found["step_seconds"]
    usual = Statistic.of(seconds[timed])
    # a data set of several steps has steps of different sizes
    speed = sum(found["tokens"][timed]) / sum(seconds[timed])
    flops, most = flops_per_token(work.model_path, length, work.lora), fastest()
    full = all(one == work.rows * length for one in found["tokens"][timed])
    extra = {name: found[name] for name in ("graphs", "chosen_micro_batch") if found.get(name)}
    return {
        "tokens_per_second": speed,
        "mfu": None if flops is None or most is None or not full else speed * flops / most,
        "step_ms": {name: value if name == "rounds" else 1e3 * value for name, value in asdict(usual).items()},
        "first_step_s": seconds[0],
        "start_s": found["first_step_at"] - begun,
        **found["memory"],
        "a_step": found["counts"],
        "losses": found["losses"],
        **extra,
    }


def _graphs() -> int:
    """How many torch.compile has made."""
    return int(counters["stats"].get("unique_graphs", 0))
