"""W7: data: encoding, loading, memory and time to the first batch as the data grow."""

import os
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common.command import DRAWBAR, watch
from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Curve, Report, Table
from benchmarks.common.statistic import Statistic
from benchmarks.peers.made_up_words import write_documents

SIZES = (10**6, 10**7, 10**8)
LARGE = 10**9
ROWS, LENGTH = 8, 320
LOADED_STEPS = 200
RANKS = 2
TASK = "benchmarks.peers.made_up_words:MadeUpWords"


def measure(options: Options) -> Report:
    report = Report("W7", "data: encoding, loading and memory as they grow")
    sizes = (10**5, 10**6) if options.quick else (*SIZES, *([LARGE] if options.large else []))
    _measure_sizes(sizes, options, report)
    return report


def run_settings(folder: Path, hidden: int = 16, task: str = TASK) -> list[str]:
    """drawbar's settings of a tiny GPT-2 on the made-up documents in the folder, for one step."""
    sizes = f"n_embd: {hidden}, n_layer: 2, n_head: 2, n_positions: {LENGTH}, vocab_size: 5000"
    return [
        f"task.type={task}",
        "task.model=gpt2",
        f"task.from_scratch={{{sizes}, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}}",
        f"data={{train: '{folder}/train.jsonl', sequence_length: {LENGTH}, batching: packed}}",
        f"train={{global_batch: {ROWS}, steps: 1}}",
        f"run.dir={folder}/runs",
        "checkpoint={every: null, keep_best: false}",
        *("tracking.tensorboard=false", "precision=fp32"),
    ]


def _measure_sizes(sizes: tuple[int, ...], options: Options, report: Report) -> None:
    rows: list[dict[str, Any]] = []
    lines: dict[str, list[tuple[float, float]]] = {
        "encode, MB of the largest process": [],
        "load, MB": [],
        "first batch, ms": [],
    }
    for size in sizes:
        folder = options.new_folder("data")
        write_documents(folder / "train.jsonl", size)
        time.sleep(3)  # a file that changed a moment ago is hashed again
        encoded = watch([*DRAWBAR, "prepare", *run_settings(folder)], folder)
        started = watch([*DRAWBAR, "train", *run_settings(folder), f"launch.nproc={RANKS}"], folder)
        call = Call("benchmarks.parts.w7_data:load", {"settings": run_settings(folder)})
        found = [options.run(call) for _ in range(options.rounds)]
        (folder / "train.jsonl").unlink()
        first = Statistic.of(one["first_batch_s"] for one in found)
        resident = statistics.median(one["resident_bytes"] for one in found)
        rows.append(
            {
                "tokens": f"{size:.0e}",
                "encode, tokens/s": round(size / encoded.seconds),
                "encode, MB of the largest process": round(encoded.memory / 1e6),
                f"first step on {RANKS} ranks, MB of the largest process": round(started.memory / 1e6),
                f"first step on {RANKS} ranks, MB read by all": round(started.read / 1e6),
                "load, MB": round(resident / 1e6),
                "first batch s": first,
                "loader alone, tokens/s": Statistic.of(one["tokens_per_second"] for one in found),
            }
        )
        for name, value in zip(lines, (encoded.memory / 1e6, resident / 1e6, 1e3 * first.median), strict=True):
            lines[name].append((size, value))
    report.tables.append(Table("As the data grow, packed into rows", rows))
    report.curves.append(Curve("w7-data", "Memory and first batch", "tokens", "see the legend", lines))
    memory = [value for _, value in lines["load, MB"]]
    report.checks += [
        Check("resident memory while batches are loaded: most ÷ least", max(memory) / min(memory), 1.05, False),
        Check("first batch, s, at the largest size", lines["first batch, ms"][-1][1] / 1e3, 0.5, False),
    ]
    report.notes.append("First batch: from a built task to the first micro-batch, from the cache, after all imports.")


def load(settings: list[str]) -> dict[str, float]:
    """Open encoded data, take the first batch, and then many: nothing is trained."""
    from benchmarks.peers.opened import open_task
    from drawbar.train.batches import make_loader

    run = open_task(settings)
    start = time.perf_counter()
    loader = make_loader(run.task, run.config, run.world, run.console)
    steps = loader.steps(0, 10**9)
    next(steps)
    first = time.perf_counter()
    tokens = 0
    for _ in islice(steps, LOADED_STEPS):
        tokens += loader.tokens
    rate = tokens / (time.perf_counter() - first)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "first_batch_s": first - start,
        "tokens_per_second": rate,
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
