"""Where the time of a step goes: its operations under torch.profiler, by kind."""

from collections import defaultdict

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


def kind_of(operation: str) -> str:
    return next((kind for kind, names in KINDS.items() if operation.startswith(names)), ELEMENT_WISE)
