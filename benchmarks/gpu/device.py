"""Timing on a device, and how fast it can be at most."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.statistic import Statistic
from benchmarks.peers.recorder import default_device
from drawbar.models.model_flops import peak_flops


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one call, between events on the device; on a GPU nobody waits before the last one has ended."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def in_rounds(works: Mapping[str, Callable[[], Any]], rounds: int, times: int = 1) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call of each, in turn, after two calls that warm up: median, low, high, rounds."""
    for work in works.values():
        for _ in range(2):
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(seconds_of(work, times))
    return {name: asdict(Statistic.of(1e3 * one for one in own)) for name, own in seconds.items()}


def peak_of(work: Callable[[], Any]) -> float | None:
    """GiB that a call takes above what there is before; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def fastest(device: torch.device | None = None) -> float | None:
    """FLOP/s in 16 bits by the data sheet; None where it is not known."""
    device = device or default_device()
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
