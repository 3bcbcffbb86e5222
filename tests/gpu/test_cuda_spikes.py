"""Looking for spikes makes no GPU wait for its host."""

import pytest
import torch

from drawbar.train.spikes import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_number_is_copied_while_the_gpu_computes() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = [torch.full((), float(step), device="cuda") for step in range(3)]
        copies = [HostCopy(number) for number in numbers]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [copy.read() for copy in copies] == [0.0, 1.0, 2.0]


def test_a_copy_waits_for_no_later_work() -> None:
    matrix = torch.rand(8192, 8192, device="cuda")
    copy = HostCopy(matrix.sum())
    later = torch.cuda.Event()
    for _ in range(50):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    later.record()
    copy.read()
    assert not later.query()
