"""W7b: how long a step waits for its batch, with an ``augment`` that takes half a step too."""

import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave
from benchmarks.parts.w7_data import ROWS, run_settings
from benchmarks.peers.made_up_words import WAIT, WORK, write_documents

TASKS = "benchmarks.peers.made_up_words"


def measure(options: Options) -> Report:
    report = Report("W7b", "how long a step waits for its batch")
    folder = options.new_folder("stall")
    write_documents(folder / "train.jsonl", 10**5)
    hidden, steps = (16, 6) if options.quick else (256, 60)

    def call(task: str, workers: str) -> Call:
        settings = [*run_settings(folder, hidden, f"{TASKS}:{task}"), f"data.workers={workers}"]
        settings += ["data.batching=padded", f"train={{global_batch: {ROWS}, steps: {steps}}}"]
        return Call("benchmarks.parts.w7b_stall:stall", {"settings": settings, "cache": str(folder / "cache")})

    none, beside, within = call("Watched", "auto"), call("SlowAugment", "1"), call("SlowAugment", "auto")
    step = options.run(none)["step_s"]  # encodes, too
    half = str(step / 2 / ROWS)
    cases = {
        "no augment": none,
        "augment sleeps for half a step, data.workers=1": replace(beside, environment={WAIT: half}),
        "augment computes for half a step, data.workers=1": replace(beside, environment={WORK: half}),
        "augment computes for half a step, data.workers=auto": replace(within, environment={WORK: half}),
    }
    found = interleave({name: partial(options.run, one) for name, one in cases.items()}, options.rounds)
    rows = []
    for name, results in found.items():
        shares = Statistic.of(one["stall_s"] / one["step_s"] for one in results)
        steps_s = Statistic.of(one["step_s"] for one in results)
        rows.append({"data": name, "step s": steps_s, "stall ÷ step": shares})
        if not name.endswith("=auto"):  # which makes batches of a user's code at their step
            report.checks.append(Check(f"stall, {name}", shares.median, 0.01, False))
    report.tables.append(Table(f"Medians of the last two thirds of {steps} steps", rows))
    report.notes.append("In the first third, the processes that make batches start up: they import torch.")
    return report


def stall(settings: list[str], cache: str) -> dict[str, float]:
    """Train; medians of a step, and of the time between the end of one and the first forward of the next, both without
    the first third of the steps."""
    import tempfile

    import drawbar
    from benchmarks.peers.made_up_words import Watched

    ends: list[float] = []

    class Ends(drawbar.Callback):
        def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
            ends.append(time.perf_counter())

    Watched.forwards.clear()
    with tempfile.TemporaryDirectory() as runs:
        config = drawbar.load_config(None, [*settings, f"data.cache={cache}", f"run.dir={runs}"]).config
        drawbar.Trainer(config, callbacks=[Ends()]).fit()
    ends = ends[len(ends) // 3 :]
    waits = [next(at for at in Watched.forwards if at > end) - end for end in ends[:-1]]
    steps = [end - begin for begin, end in pairwise(ends)]
    return {"stall_s": statistics.median(waits), "step_s": statistics.median(steps)}
