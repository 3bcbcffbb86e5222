"""What the machine is and can do: versions, copies, matrix products and attention on random data."""

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.common.gpu_memory import nvidia_smi
from benchmarks.common.limits import describe_machine, versions
from benchmarks.gpu.device import in_rounds, seconds_of
from benchmarks.gpu.setting import Place, Setting
from benchmarks.peers.recorder import default_device

REFERENCE = (
    "an H100 SXM by its data sheet: 989 TFLOP/s in bf16, 1,979 in fp8, 3.35 TB/s; a product reaches 70-80% of it"
)


def settings(place: Place) -> list[Setting]:
    names = ("about", "copies", "products", "attention", "launches")
    arguments = {"quick": place.quick, "rounds": place.rounds}
    return [Setting(name, f"benchmarks.gpu.probe:{name}", arguments, seconds=60) for name in names]


def about(quick: bool, rounds: int) -> dict[str, Any]:
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit,temperature.gpu,pstate"
    return {
        "versions": versions() | {"cuda": torch.version.cuda, "kernel": platform.release()},
        "machine": describe_machine(),
        "nvidia_smi": dict(zip(fields.split(","), (nvidia_smi(fields) or "").split(", "), strict=False)),
    }


def copies(quick: bool, rounds: int) -> dict[str, Any]:
    """GB/s: bytes read and written on the device; bytes that travel between host and device."""
    device, size = default_device(), 2**22 if quick else 2**30
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    works: dict[str, Callable[[], Any]] = {"on the device": partial(torch.empty_like(source).copy_, source)}
    if device.type == "cuda":
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        works["host to device"] = partial(source.copy_, pinned, non_blocking=True)
        works["device to host"] = partial(pinned.copy_, source, non_blocking=True)
        works["pageable host to device"] = partial(source.copy_, torch.zeros(size, dtype=torch.uint8))
    moved = {name: (2 if name == "on the device" else 1) * size for name in works}
    return {f"{name} GB/s": moved[name] / 1e6 / one["median"] for name, one in in_rounds(works, rounds).items()}


def products(quick: bool, rounds: int) -> dict[str, Any]:
    """TFLOP/s of square products, and of those of a block of the 1.46 B model, on random data: zeros are faster."""
    device, size = default_device(), 256 if quick else 8192
    works: dict[str, Callable[[], Any]] = {}
    operations: dict[str, float] = {}

    def add(name: str, m: int, k: int, n: int, dtype: torch.dtype, precision: str = "highest") -> None:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))

        def work() -> None:
            torch.set_float32_matmul_precision(precision)
            a @ b

        works[name], operations[name] = work, 2 * m * k * n

    add("bf16", size, size, size, torch.bfloat16)
    add("fp32", size // 2, size // 2, size // 2, torch.float32)
    add("tf32", size, size, size, torch.float32, "high")
    add("bf16 8192 x 2048 x 5632", *((64, 64, 96) if quick else (8192, 2048, 5632)), torch.bfloat16)
    add("bf16 8192 x 2048 x 2048", *((64, 64, 64) if quick else (8192, 2048, 2048)), torch.bfloat16)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.tensor(1.0, device=device)
        a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
        works["fp8"] = partial(torch._scaled_mm, a, a.t(), one, one, out_dtype=torch.bfloat16)
        operations["fp8"] = 2 * size**3
    found = in_rounds(works, rounds, times=1 if quick else 5)
    return {f"{name} TFLOP/s": operations[name] / 1e9 / one["median"] for name, one in found.items()}


def attention(quick: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds of causal attention, forward and backward, of 2 rows of 4,096 tokens, by each of torch's kernels;
    null where it cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = default_device()
    length = 64 if quick else 4096
    q, k, v = (
        torch.randn(2, 16, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def work(kernel: Any) -> None:
        with sdpa_kernel(kernel):
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    found: dict[str, Any] = {}
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            found[kernel.name] = in_rounds({"it": partial(work, kernel)}, rounds)["it"]
        except RuntimeError:
            found[kernel.name] = None
    return found


def launches(quick: bool, rounds: int) -> dict[str, Any]:
    """Microseconds of a kernel with next to nothing to do: a model's launches, times this, is the least of a step."""
    one = torch.zeros(1, device=default_device())
    return {"us": 1e6 * min(seconds_of(partial(one.add_, 1.0), 100 if quick else 5000) for _ in range(rounds))}
