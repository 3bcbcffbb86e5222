"""What the machine can do at most, measured in the same run as what is compared with it."""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("drawbar", "torch", "transformers", "accelerate", "lightning", "deepspeed", "numpy")


def versions() -> dict[str, str]:
    """Of what is measured; ``absent`` where it is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def processor() -> str:
    """The name of the processor, as the kernel says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine() -> dict[str, Any]:
    """Processor or GPU, cores and memory."""
    import torch

    features = torch.cpu.get_capabilities()
    found: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "bf16 instructions": [name for name in ("avx512_bf16", "amx_bf16", "arm_bf16") if features.get(name)],
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def measure_limits(folder: Path, repeats: int = 5, megabytes: int = 256) -> dict[str, Any]:
    """Fastest matrix product of each dtype, memory and disk bandwidth, and the seconds of ``import torch``.

    Args:
        folder: whose disk is measured.
        repeats: of each measurement; the fastest counts, as it is a limit.
        megabytes: read and written in memory, and to the disk.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 1024  # large enough for the fastest; small enough where a format is slow
    found: dict[str, Any] = {"device": str(device), "threads": torch.get_num_threads()}
    for name in DTYPES:
        one = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        found[f"{name} GFLOP/s"] = 2 * size**3 / _fastest(partial(torch.matmul, one, one), repeats) / 1e9
    block = torch.ones(megabytes * 2**20 // 4, device=device)
    copy = torch.empty_like(block)
    found["memory GB/s"] = 2 * block.nbytes / _fastest(lambda: copy.copy_(block), repeats) / 1e9
    data = os.urandom(2**20) * megabytes
    found["disk with fsync MB/s"] = len(data) / 1e6 / min(_write(data, folder) for _ in range(min(repeats, 3)))
    found["import torch s"] = import_seconds("import torch", min(repeats, 3))
    found["import torch and transformers s"] = import_seconds("import torch; " + IMPORT_MODEL, min(repeats, 3))
    return found


IMPORT_MODEL = "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM"
"""What a program imports that trains a Llama: ``import transformers`` alone loads next to nothing."""


def import_seconds(statement: str, repeats: int) -> float:
    """Median seconds of a Python process that does nothing else."""

    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(repeats))


def _fastest(work: Callable[[], Any], repeats: int) -> float:
    import torch

    times = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _write(data: bytes, folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start
