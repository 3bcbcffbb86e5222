"""The floor of a training step: the time of the model's own matrix products alone, one after another."""

import time
from typing import Any

import torch
from torch import nn

from benchmarks.peers.recorder import default_device
from benchmarks.peers.workload import Workload


def floor(workload: dict[str, Any], precision: str, repeats: int = 5) -> dict[str, Any]:
    """Targets a second of a step that did nothing but its products, each at its fastest: of every linear layer forward,
    for its input and for its weight; of attention two forward and four backward."""
    work = Workload.of(workload)
    device = default_device()
    batch = work.collate(work.samples()[: work.rows])
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    shapes = _linear_shapes(work.model(), batch)
    seconds = sum(_product(m, k, n, dtype, device, repeats) for m, k, n in _all_three(shapes))
    return {"targets_per_second": work.targets()[0] / seconds, "step_seconds": seconds}


def _linear_shapes(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of each linear layer's product, and of attention's two, head by head summed up."""
    found: list[tuple[int, int, int]] = []

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        found.append((rows, inputs[0].shape[-1], output.shape[-1]))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    with torch.no_grad():
        model(**batch)
    config = model.config
    rows, length = batch["input_ids"].shape
    heads = getattr(config, "num_attention_heads", 0)
    layers = getattr(config, "num_hidden_layers", 0)
    head_size = getattr(config, "hidden_size", 0) // max(heads, 1)
    # all heads of a layer as one product of the same number of operations: the floor is not above what is possible
    found += [(rows * length, head_size, heads * length), (rows * length, heads * length, head_size)] * layers
    return found


def _all_three(shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [product for m, k, n in shapes for product in ((m, k, n), (m, n, k), (k, m, n))]


def _product(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    key = (m, k, n, dtype)
    if key not in _known:
        one, other = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            one @ other
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        _known[key] = min(times[1:])
    return _known[key]


_known: dict[tuple[int, int, int, torch.dtype], float] = {}
