"""The floor of a training step: the time of the model's own matrix products alone, one after another."""

from typing import Any

import torch
from torch import nn

from benchmarks.peers.recorder import Recorder
from benchmarks.peers.workload import Settings, Workload

Product = tuple[int, int, int]
"""Of matrices (m, k) and (k, n)."""


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    """Steps that do nothing but their products: of every linear layer forward, for its input and for its weight; of
    attention two forward and four backward."""
    work, how = Workload.of(workload), Settings(**settings)
    recorder = Recorder(work)
    batch = work.collate(work.samples()[: work.rows])
    products = _all_three(_linear_shapes(work.model(), batch))
    operands = _operands(products, torch.float32 if how.precision == "fp32" else torch.bfloat16, recorder.device)
    recorder.begin()
    for _ in range(work.steps):
        for m, k, n in products:
            operands[m, k] @ operands[k, n]
        recorder.step(0.0)
    return recorder.result()


def _operands(products: list[Product], dtype: torch.dtype, device: torch.device) -> dict[tuple[int, int], torch.Tensor]:
    shapes = {shape for m, k, n in products for shape in ((m, k), (k, n))}
    return {shape: torch.randn(shape, device=device).to(dtype) for shape in shapes}


def _linear_shapes(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[Product]:
    """(rows, inputs, outputs) of each linear layer's product, and of attention's two, head by head summed up."""
    found: list[Product] = []

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


def _all_three(shapes: list[Product]) -> list[Product]:
    return [product for m, k, n in shapes for product in ((m, k, n), (m, n, k), (k, m, n))]
