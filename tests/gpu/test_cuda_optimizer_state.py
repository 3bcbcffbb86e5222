"""Moments in bf16 on CUDA: the rounding of the CPU, half of the memory, and no wait for the device."""

import pytest
import torch
from torch import nn

from drawbar.optim.bf16_moments import CUDA_CHUNK, AdamWBf16Moments, rounding, store_moments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_rounds_as_the_cpu_does_in_one_compiled_kernel() -> None:
    assert rounding("cuda") is not store_moments
    torch.manual_seed(0)
    for shape in ((300, 70), (257, 33), (5, 70, 30), (9001,)):
        exact = (torch.randn(shape), torch.randn(shape) ** 2)
        stored = []
        for device in ("cpu", "cuda"):
            moments = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in exact]
            on_device = (exact[0].to(device), exact[1].to(device))
            rounding(device)(moments, on_device, torch.tensor(5.0, device=device), (7,) + (0,) * (len(shape) - 1))
            stored.append(torch.stack(moments).cpu())
        assert torch.equal(*stored)


def test_updates_as_the_cpu_does_without_waiting_for_the_device() -> None:
    rounding("cuda")  # compiles
    torch.manual_seed(0)
    on_cpu = nn.Parameter(torch.randn(128, 64))
    on_gpu = nn.Parameter(on_cpu.detach().cuda())
    optimizers = [AdamWBf16Moments([parameter], lr=0.01, fused=True) for parameter in (on_cpu, on_gpu)]
    for _ in range(5):
        on_cpu.grad = torch.randn_like(on_cpu)
        on_gpu.grad = on_cpu.grad.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for optimizer in optimizers:
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-3, atol=1e-4)


def test_a_step_takes_little_memory_besides_the_moments() -> None:
    parameter = nn.Parameter(torch.zeros(256, CUDA_CHUNK // 64, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer = AdamWBf16Moments([parameter], lr=0.01, fused=True)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.memory_allocated() - before == pytest.approx(4 * parameter.numel(), rel=0.01)
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() < 8.1 * CUDA_CHUNK
