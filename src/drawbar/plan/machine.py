"""The machines that a run is planned for."""

import re
from dataclasses import dataclass
from typing import Any

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.models.model_flops import peak_flops
from drawbar.train.memory_probe import USABLE_SHARE
from drawbar.util.byte_sizes import parse_size
from drawbar.util.memory import usable_memory


@dataclass(frozen=True)
class Machine:
    """All machines of a planned run: how many equal nodes there are, and what each rank has of its node."""

    nodes: int
    ranks_per_node: int
    memory: int
    """Bytes of a rank's device, or its share of a host's memory."""
    device: str
    """``cuda`` or ``cpu``."""
    peak_flops: float | None
    """FLOP/s of a device in 16 bits; None if not known."""
    utilization: float
    """Share of ``peak_flops`` at which the counted operations are assumed to run, those of recomputation included: the
    MFU, where nothing is computed again."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def usable(self) -> int:
        """Bytes of a rank's memory that tensors can take; the rest is for fragmentation, kernels and libraries."""
        return int(USABLE_SHARE * self.memory)


def make_machine(
    config: RunConfig, nodes: int | None, gpus: int | None, memory: int | None, gpu: str | None, utilization: float
) -> Machine:
    """The machines that the options of ``drawbar plan`` describe, or, without these, the run's ``cluster`` section and
    this machine.

    Args:
        gpus: on each machine.
        memory: bytes of one device.
        gpu: the name of the devices, such as ``h100``.

    Raises:
        UserError: the name of the GPU is not known.
    """
    cluster: Any = getattr(config, "cluster", None)  # of another guest, which need not be installed
    nodes = nodes or (cluster.nodes if cluster is not None else 1)
    asked = gpus or (cluster.gpu_count if cluster is not None else None)
    asks_for_gpus = config.device != "cpu" and (config.device == "cuda" or asked or memory or gpu)
    device = "cuda" if asks_for_gpus else _device_here(config)
    ranks = asked or (config.launch.nproc if config.launch.nproc != "auto" else _gpus_here() if device == "cuda" else 1)
    if config.parallel.features.one_process:
        nodes = ranks = 1
    peak = None
    if gpu is not None:
        peak = peak_flops(gpu)
        if peak is None:
            raise UserError(
                f"the speed of a GPU {gpu!r} is not known",
                where="--gpu",
                remedy="name one as its maker does, such as H100, A100 or L4, or leave it out",
            )
    if device == "cuda" and memory is None and gpu is None and cluster is not None and cluster.gpu_memory is not None:
        memory = parse_size(cluster.gpu_memory)
    if memory is None:
        memory = _gpu_memory(gpu) if device == "cuda" else usable_memory() // ranks
    return Machine(nodes, max(1, ranks), memory, device, peak, utilization)


_MEMORIES = {
    "B200": 180, "MI300X": 192, "GH200": 96, "H200": 141, "H100 NVL": 94, "H100": 80, "A100": 40, "MI250X": 64,
    "L40S": 48, "RTX A6000": 48, "A40": 48, "L40": 48, "V100": 16, "RTX 4090": 24, "RTX 3090": 24, "A30": 24,
    "A10G": 24, "A10": 24, "L4": 24, "T4": 16,
}  # fmt: skip
"""GB of a device's memory, from the vendors' data sheets; of the smaller variant where there are two, so that
nothing is said to fit that does not. Where the name itself says a size (A100-SXM4-80GB), that is used instead, but not
for GH200: its 480GB are the host's."""
_DEFAULT_GB = 80
"""Memory of a GPU where none is named and this machine has none."""


def _gpu_memory(gpu: str | None) -> int:
    import torch

    if gpu is None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    named = (gpu or "").upper()
    told = None if "GH200" in named else re.search(r"(\d+) ?GB\b", named)
    known = (size for name, size in _MEMORIES.items() if re.search(rf"\b{name}\b", named))
    return int(int(told[1]) if told else next(known, _DEFAULT_GB)) * 10**9


def _device_here(config: RunConfig) -> str:
    return "cuda" if config.device == "auto" and _gpus_here() else "cpu"


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
