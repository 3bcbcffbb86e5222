"""W3: the loss head: time and memory of a language model's last layer and its loss, as the vocabulary grows."""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.process_memory import status_bytes
from benchmarks.common.report import Check, Curve, Report, Table
from benchmarks.common.statistic import Statistic, interleave, ratio

VOCABULARIES = (8_192, 32_768, 131_072, 262_144)
IGNORED_SHARES = (0.0, 0.5, 0.9)
ROWS, LENGTH, HIDDEN = 2, 512, 256
PLAIN, OURS = "logits and torch's cross-entropy", "drawbar"
TOLERANCE = 1e-4
"""Of the loss, relative: sums of up to 2e5 terms in another order."""


def measure(options: Options) -> Report:
    report = Report("W3", f"the loss head: {ROWS} × {LENGTH} tokens, hidden size {HIDDEN}, one layer below it")
    vocabularies = (1024, 2048) if options.quick else VOCABULARIES
    cases = list(itertools.product(vocabularies, (0.0, 0.9) if options.quick else IGNORED_SHARES, (PLAIN, OURS)))
    calls = {case: partial(options.run, _call(case, options)) for case in cases}
    found = interleave(calls, options.rounds)
    rows: list[dict[str, Any]] = []
    lines: dict[str, list[tuple[float, float]]] = {f"{how}, {share:.0%} ignored": [] for _, share, how in cases}
    for case in cases:
        vocabulary, share, how = case
        plain = found[vocabulary, share, PLAIN]
        differs = abs(found[case][0]["loss"] / plain[0]["loss"] - 1)
        seconds, peaks = ([one[key] for one in found[case]] for key in ("seconds", "peak_bytes"))
        row = {"vocabulary": vocabulary, "ignored": f"{share:.0%}", "head": how, "loss differs by": differs}
        rows.append(row | {"seconds": Statistic.of(seconds), "peak MB": Statistic.of(peak / 1e6 for peak in peaks)})
        lines[f"{how}, {share:.0%} ignored"].append((vocabulary, statistics.median(peaks) / 1e6))
        if differs > TOLERANCE:
            rows[-1] |= {"seconds": "its loss differs", "peak MB": "its loss differs"}
        elif how == OURS:
            of_plain = [[one[key] for one in plain] for key in ("seconds", "peak_bytes")]
            time_ratio, peak_ratio = ratio(seconds, of_plain[0]), ratio(peaks, of_plain[1])
            rows[-1] |= {"time ÷ plain": time_ratio, "peak ÷ plain": peak_ratio}
            if vocabulary == (vocabularies[-1] if options.quick else 131_072):
                _add_checks(report, share, time_ratio.median, peak_ratio.median)
    report.tables.append(Table("Forward, loss and backward", rows))
    report.curves.append(Curve("w3-memory", "Peak memory of the head", "vocabulary", "MB above the weights", lines))
    return report


def _add_checks(report: Report, share: float, seconds: float, peak: float) -> None:
    if share == 0:
        report.checks.append(Check("vocabulary 128k: peak memory ÷ plain", peak, 0.25, False))
        report.checks.append(Check("vocabulary 128k: time ÷ plain", seconds, 1.0, False))
    if share == 0.9:
        report.checks.append(Check("vocabulary 128k, 90% ignored: time ÷ plain", seconds, 0.3, False))


def _call(case: tuple[int, float, str], options: Options) -> Call:
    vocabulary, share, how = case
    arguments = {"vocabulary": vocabulary, "ignored": share, "ours": how == OURS}
    return Call("benchmarks.parts.w3_loss_head:head", {**arguments, "folder": str(options.folder)})


def head(vocabulary: int, ignored: float, ours: bool, folder: str, repeats: int = 5) -> dict[str, float]:
    """Loss, median seconds of forward, loss and backward, and the peak memory above what was there before."""
    import torch

    from benchmarks.peers.opened import open_task

    sizes = f"hidden_size: {HIDDEN}, intermediate_size: {HIDDEN}, num_hidden_layers: 1, num_attention_heads: 4"
    settings = [
        *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama"),
        f"task.from_scratch={{{sizes}, vocab_size: {vocabulary}, tie_word_embeddings: true}}",
        *("precision=fp32", "train.steps=1", f"run.dir={folder}/runs", f"data.sequence_length={LENGTH}"),
    ]
    run = open_task(settings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (ROWS, LENGTH), generator=generator)
    labels = tokens.where(torch.rand(tokens.shape, generator=generator) >= ignored, -100)
    work = _ours(run, tokens, labels) if ours else _plain(run.task.build_model(), tokens, labels)
    loss = work()  # allocates the gradients of the weights
    reset_peak(run.world.device)
    before = resident_bytes(run.world.device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    peak = peak_bytes_since(run.world.device) - before
    return {"loss": loss, "seconds": statistics.median(times), "peak_bytes": max(peak, 1)}


def _ours(run: Any, tokens: Any, labels: Any) -> Callable[[], float]:
    import drawbar
    from drawbar.data.loader import MicroBatch

    engine = run.engine()
    batch = drawbar.Batch({"input_ids": tokens, "labels": labels}, ids=list(range(len(tokens))))
    count = run.task.num_targets(batch)

    def work() -> float:
        return float(engine.executor.forward_backward([MicroBatch(batch)], 1 / count)) / count

    return work


def _plain(model: Any, tokens: Any, labels: Any) -> Callable[[], float]:
    from benchmarks.peers.recorder import default_device
    from benchmarks.peers.workload import loss_sum

    device = default_device()
    model, tokens, labels = model.to(device).train(), tokens.to(device), labels.to(device)
    count = int((labels[:, 1:] != -100).sum())

    def work() -> float:
        loss = loss_sum("causal_lm", model(input_ids=tokens, use_cache=False).logits, labels) / count
        loss.backward()
        return float(loss)

    return work


def reset_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # not Linux: the peak is then that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(device: Any) -> int:
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else status_bytes("VmRSS")


def peak_bytes_since(device: Any) -> int:
    """The most since ``reset_peak``."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")
