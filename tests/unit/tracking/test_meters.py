"""Meters, on a clock that the test turns."""

import contextlib

import numpy as np
import pytest
import torch

from drawbar.tracking.meters import Throughput, TimeLeft, peak_memory


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_throughput_is_units_over_seconds_since_the_last_reading() -> None:
    clock = HandClock()
    meter = Throughput(clock)
    meter.add(30)
    meter.add(30)
    clock.now += 2
    assert meter.read() == 30.0
    meter.add(5)
    clock.now += 5
    assert meter.read() == 1.0


def test_throughput_leaves_out_pauses_even_nested_or_failing_ones() -> None:
    clock = HandClock()
    meter = Throughput(clock)
    clock.now += 1
    with meter.paused():
        clock.now += 10
        with meter.paused():
            clock.now += 100
        clock.now += 10
    with contextlib.suppress(ZeroDivisionError), meter.paused():
        clock.now += 50
        raise ZeroDivisionError
    clock.now += 3
    meter.add(8)
    assert meter.read() == 2.0


def test_throughput_of_no_time_is_zero() -> None:
    meter = Throughput(HandClock())
    meter.add(5)
    assert meter.read() == 0.0


def test_time_left_leaves_out_the_first_step_after_a_resume() -> None:
    clock = HandClock()
    left = TimeLeft(total_steps=100, first_step=40, clock=clock)
    assert left.seconds() is None
    clock.now += 60  # compiling
    left.advance(41)
    assert left.seconds() is None
    clock.now += 3
    left.advance(42)
    clock.now += 5
    left.advance(43)
    assert left.seconds() == 4.0 * 57
    left.advance(100)
    assert left.seconds() == 0.0


def test_peak_memory_counts_bytes_and_never_falls() -> None:
    cpu = torch.device("cpu")
    before = peak_memory(cpu)
    block = np.ones(2**27, dtype=np.uint8)
    after = peak_memory(cpu)
    del block
    # The peak may lie above what this process holds now, by at most what it held at some time.
    assert after >= before
    assert after >= 2**27
    assert after < 2**40
    assert peak_memory(cpu) >= after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_cuda_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(device)
    base = peak_memory(device)
    block = torch.empty(2**20, device=device)
    del block
    assert peak_memory(device) >= base + 4 * 2**20
