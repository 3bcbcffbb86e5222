"""How long does the head of a language model take with its loss, and how much memory, by the ways to compute it?

    python benchmarks/loss_head.py --vocabularies 8192 32768 131072 262144 --ignored 0 0.5 0.9

For each vocabulary and share of ignored labels: forward and backward of the head and the cross-entropy, from all logits
(`plain`) and in chunks, in turns in one process; the median of the rounds, and of the ratios of each round. Peak memory
is that of a process of its own for each way, above what inputs and weight take. Prints a table; writes JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drawbar.data.packing import IGNORED_LABEL
from drawbar.parallel.chunked_loss import LossTargets, chunked_cross_entropy
from drawbar.parallel.precision import autocast
from drawbar.parallel.styles import cross_entropy_sum
from drawbar.tracking.table import print_table

MIB = 2**20


@dataclass(frozen=True)
class Head:
    """A head, and what it is given."""

    vocabulary: int
    ignored: float
    """Share of the labels."""
    hidden: int = 512
    length: int = 2048
    """Tokens, in one row."""
    precision: str = "fp32"
    device: str = "cpu"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (1, L, H), weight (V, H) and labels (1, L)."""
        torch.manual_seed(0)
        device = torch.device(self.device)
        hidden = torch.randn(1, self.length, self.hidden, device=device, requires_grad=True)
        weight = torch.empty(self.vocabulary, self.hidden, device=device).normal_(std=0.02).requires_grad_()
        labels = torch.randint(self.vocabulary, (1, self.length), device=device)
        chosen = torch.rand(1, self.length, device=device) < self.ignored
        return hidden, weight, labels.masked_fill(chosen, IGNORED_LABEL)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As ``causal_lm`` does it with ``task.cross_entropy=plain``."""
    logits = functional.linear(hidden, weight)
    return cross_entropy_sum(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), IGNORED_LABEL)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As with ``task.cross_entropy=chunked``."""
    targets = LossTargets.of(functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL), IGNORED_LABEL)
    return chunked_cross_entropy(hidden.flatten(0, 1)[targets.rows_N], weight, None, targets.labels_N)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "chunked": chunked}


def step(way: str, head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Forward and backward, without what comes before and after; the loss."""
    hidden.grad = weight.grad = None
    with autocast(head.precision, hidden.device):
        loss = WAYS[way](hidden, weight, labels)
    (loss / head.length).backward()
    return float(loss.detach())  # which waits for the device


def measure_time(head: Head, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, each of which takes every way once; and the largest difference of the losses."""
    tensors = head.tensors()
    losses = {way: step(way, head, *tensors) for way in WAYS}  # warm
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, times in seconds.items():
            start = time.perf_counter()
            step(way, head, *tensors)
            if head.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    ratios = [one / other for one, other in zip(seconds["chunked"], seconds["plain"], strict=True)]
    return {
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "time_ratio": statistics.median(ratios),
        "loss_difference": abs(losses["chunked"] / losses["plain"] - 1) if losses["plain"] else 0.0,
    }


def measure_memory(way: str, head: Head) -> int:
    """Bytes that one step takes at most, above hidden states, weight and labels; in a process that has done nothing
    else."""
    tensors = head.tensors()
    if head.device == "cuda":
        before = torch.cuda.memory_allocated()
        step(way, head, *tensors)
        return torch.cuda.max_memory_allocated() - before
    small = Head(1024, 0.0, hidden=64, length=64, precision=head.precision)
    step(way, small, *small.tensors())  # what libraries take once
    before = peak_of_process()
    step(way, head, *tensors)
    return peak_of_process() - before


def peak_of_process() -> int:
    """Bytes, on Linux. (``ru_maxrss`` is, at first, that of the process which has started this one.)"""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def compare(head: Head, rounds: int = 5) -> dict[str, Any]:
    """Time and peak memory of each way, and the ratios of chunked to plain."""
    memory = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--memory-of", way, json.dumps(asdict(head))]
        memory[way] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ratio = memory["chunked"] / memory["plain"]
    return {**asdict(head), **measure_time(head, rounds), "peak_bytes": memory, "memory_ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32768, 131072, 262144])
    parser.add_argument("--ignored", type=float, nargs="+", default=[0.0, 0.5, 0.9])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--memory-of", nargs=2, metavar=("WAY", "HEAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        way, head = options.memory_of
        print(measure_memory(way, Head(**json.loads(head))))
        return
    sizes = {name: getattr(options, name) for name in ("hidden", "length", "precision", "device")}
    found = [
        compare(Head(vocabulary, ignored, **sizes), options.rounds)
        for vocabulary in options.vocabularies
        for ignored in options.ignored
    ]
    columns = ["vocabulary", "ignored", "plain s", "chunked s", "time", "plain MiB", "chunked MiB", "memory"]
    rows = [
        [
            f"{one['vocabulary']:,}",
            f"{one['ignored']:.0%}",
            *(f"{one['seconds'][way]:.3f}" for way in WAYS),
            f"{one['time_ratio']:.2f}",
            *(f"{one['peak_bytes'][way] / MIB:,.0f}" for way in WAYS),
            f"{one['memory_ratio']:.2f}",
        ]
        for one in found
    ]
    print_table("The head and its loss, forward and backward", columns, rows, left=0)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
