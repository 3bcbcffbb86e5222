"""Where the time of a step goes: its operations under torch.profiler, by kind."""

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_softmax"),
    "cross-entropy": ("aten::_log_softmax", "aten::nll_loss", "aten::logsumexp", "LinearCrossEntropy"),
    "optimizer": ("aten::_fused_adam", "aten::_foreach_add", "aten::_foreach_lerp"),
    "gradient norm and clipping": (
        "aten::linalg_vector_norm",
        "aten::_foreach_norm",
        "aten::_foreach_mul",
        "aten::norm",
    ),
    "embedding": ("aten::embedding", "aten::index_select", "aten::_embedding"),
    "copies": (
        "aten::copy_",
        "aten::cat",
        "aten::clone",
        "aten::_to_copy",
        "aten::fill_",
        "aten::zero_",
        "aten::index",
    ),
}
"""By kind, how the names of its operations begin; all others are element-wise."""
ELEMENT_WISE = "norms, activations, sums"
COUNTS = {
    "host_syncs": ("cudaStreamSynchronize", "cudaEventSynchronize"),  # of the device: the profiler's own end, too
    "items": ("aten::_local_scalar_dense",),
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync",),
}
"""What is counted in a step, by the names of its events. A value read from the GPU is an item and a host sync."""
LARGEST_TRACE = 15 * 2**20
"""Bytes."""


class StepProfile:
    """Records operations between ``start`` and ``stop``, on the host or the GPU."""

    def __init__(self, device: torch.device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._on_gpu = device.type == "cuda"
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> dict[str, float]:
        """Seconds of each kind, without those of the operations inside."""
        self._profiler.stop()
        seconds: defaultdict[str, float] = defaultdict(float)
        for event in self._profiler.key_averages():
            own = event.self_device_time_total if self._on_gpu else event.self_cpu_time_total
            seconds[kind_of(event.key)] += own / 1e6
        return dict(seconds)


class StepTrace:
    """Records a step for Chrome's tracing, and counts its events. They are not made Python objects, of which a step
    of a large model has too many."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile()

    def start(self) -> None:
        self._profiler.start()

    def stop(self, path: str | None = None) -> dict[str, int]:
        """How often each of ``COUNTS`` occurred.

        Args:
            path: for the trace; its name ends in ``.json.gz``. One that is too large to be sent around is left out.
        """
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(written))
            trace = written.read_bytes()
        events = Counter(event.get("name") for event in json.loads(trace)["traceEvents"])
        if path is not None and len(packed := gzip.compress(trace)) <= LARGEST_TRACE:
            Path(path).write_bytes(packed)
        return {what: sum(events[name] for name in names) for what, names in COUNTS.items()}


def kind_of(operation: str) -> str:
    return next((kind for kind, names in KINDS.items() if operation.startswith(names)), ELEMENT_WISE)
