"""W4: the optimizer step: clipping and update, beside torch's own optimizers."""

import statistics
import time
from functools import partial
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave, ratio

TWINS = {
    "adamw": "AdamW, fused",
    "adamw state_dtype=bf16": "AdamW, fused",
    "sgd": "SGD, fused",
    "adafactor": "Adafactor",
    "muon": "Muon",
}
"""drawbar's optimizer, with settings → torch's, at the settings that it is compared with."""
TORCH = ("AdamW, fused", "AdamW, foreach", "AdamW, for each tensor", "SGD, fused", "Adafactor", "Muon")


def measure(options: Options) -> Report:
    report = Report("W4", "the optimizer step: clip and update")
    contenders = [f"drawbar {name}" for name in TWINS] + [f"torch {name}" for name in TORCH]
    call = partial(Call, "benchmarks.parts.w4_optimizer:update")
    sizes = {"quick": options.quick, "folder": str(options.folder)}
    found = interleave(
        {name: partial(options.run, call({"name": name, **sizes})) for name in contenders}, options.rounds
    )
    rows: list[dict[str, Any]] = []
    for name, results in found.items():
        seconds = [one["seconds"] for one in results]
        row = {"update": name, "ms": Statistic.of(1e3 * one for one in seconds)}
        row |= {"state, bytes a weight": results[0]["state_bytes"] / results[0]["weights"]}
        twin = TWINS.get(name.removeprefix("drawbar "))
        if name.startswith("drawbar") and twin is not None:
            row["÷ torch"] = ratio(seconds, [one["seconds"] for one in found[f"torch {twin}"]])
        rows.append(row)
    report.tables.append(Table(f"{found[contenders[0]][0]['weights']:,} weights in fp32", rows))
    report.notes.append("torch's Muon and Adafactor differ from drawbar's in what they compute.")
    report.checks.append(Check("AdamW: time ÷ torch's fused", rows[0]["÷ torch"].median, 1.05, False))
    return report


def update(name: str, quick: bool, folder: str, repeats: int = 10) -> dict[str, float]:
    """Median seconds of clipping and an update, with gradients of ones."""
    import torch
    from torch import nn

    from benchmarks.peers.opened import open_task

    hidden, layers = (32, 2) if quick else (512, 8)
    sizes = f"hidden_size: {hidden}, intermediate_size: {hidden * 3}, num_hidden_layers: {layers}"
    who, _, optimizer_name = name.partition(" ")
    ours, *more = optimizer_name.split()
    settings = [
        *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama", "precision=fp32", "train.steps=1"),
        f"task.from_scratch={{{sizes}, num_attention_heads: 4, vocab_size: 8192}}",
        f"run.dir={folder}/runs",
        *([f"optim.name={ours}", *(f"optim.{setting}" for setting in more)] if who == "drawbar" else []),
    ]
    run = open_task(settings)
    if who == "drawbar":
        engine = run.engine()
        model = engine.module

        def step() -> None:
            engine.updater.step(1e-3, lambda grad_norm: True)
    else:
        model = run.task.build_model().to(run.world.device)
        optimizers = _of_torch(optimizer_name, model)

        def step() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()

    times = []
    before = _live_bytes()
    for number in range(repeats + 2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        start = time.perf_counter()
        step()
        if run.world.device.type == "cuda":
            torch.cuda.synchronize()
        times += [time.perf_counter() - start] * (number >= 2)  # the first two allocate the state
    for parameter in model.parameters():
        parameter.grad = None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {"seconds": statistics.median(times), "weights": weights, "state_bytes": _live_bytes() - before}


def _of_torch(name: str, model: Any) -> list[Any]:
    import torch

    kind, _, how = name.partition(", ")
    if kind == "Muon":
        matrices = {one for key, one in model.named_parameters() if one.dim() == 2 and "embed" not in key}
        matrices -= set(model.get_output_embeddings().parameters())
        others = [one for one in model.parameters() if one not in matrices]
        return [torch.optim.Muon(list(matrices), lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)]
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for each tensor": {"foreach": False}, "": {}}[how]
    return [getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **flags)]


def _live_bytes() -> int:
    """Of all tensors that there are."""
    import gc

    import torch

    gc.collect()
    tensors = {id(one): one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)}
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors.values()}.values())
