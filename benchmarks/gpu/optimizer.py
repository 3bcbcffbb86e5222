"""The optimizer step: clipping and update, drawbar's and torch's, in turn."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device import in_rounds, synchronize
from benchmarks.gpu.random_model import TINY
from benchmarks.gpu.setting import Place, Setting
from benchmarks.peers.recorder import default_device
from benchmarks.peers.step_profile import StepTrace

OURS = {
    "drawbar adamw": ["optim.name=adamw"],
    "drawbar adamw, bf16 moments": ["optim.name=adamw", "optim.state_dtype=bf16"],
    "drawbar muon": ["optim.name=muon"],
}
REFERENCE = (
    "a fused AdamW reads four numbers of each weight and writes three: 28 bytes, or 8.4 ms a billion at 3.35 TB/s"
)


def settings(place: Place) -> list[Setting]:
    """Each of drawbar's with what it is compared with: memory for two contenders, with state, is there."""
    arguments = {"folder": str(place.scratch), "rounds": place.rounds, "quick": place.quick}
    eight_bit = Setting(
        "torchao AdamW8bit", "benchmarks.gpu.optimizer:compare",
        {"ours": None, "theirs": "AdamW8bit", **arguments}, needs=("torchao",),
    )  # fmt: skip
    pairs = [(name, "Muon" if "muon" in name else "AdamW, fused") for name in OURS]
    return [
        *(
            Setting(ours, "benchmarks.gpu.optimizer:compare", {"ours": ours, "theirs": theirs, **arguments})
            for ours, theirs in pairs
        ),
        eight_bit,
    ]


def compare(ours: str | None, theirs: str, folder: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Milliseconds, launches of an update, and bytes a weight of weight, gradient and state, of each."""
    works, states, weights = {}, {}, 0
    for name in filter(None, (ours, theirs)):
        before = _bytes()
        model, step = _drawbar(name, folder, quick) if name in OURS else _torch(name, folder, quick)
        weights = sum(one.numel() for one in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        work = partial(_update, model, step)
        work()  # makes the state
        works[name] = work
        states[name] = None if before is None else ((_bytes() or 0) - before) / weights
    found = in_rounds(works, rounds)
    return {
        "weights": weights,
        **{name: {"ms": ms, "bytes_a_weight": states[name], **_launches(works[name])} for name, ms in found.items()},
    }


def _update(model: nn.Module, step: Any) -> None:
    """The gradients stay: some updaters drop them."""
    kept = [one.grad for one in model.parameters()]
    step()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient


def _sizes(quick: bool) -> str:
    # 0.6 billion weights, in matrices of the sizes of 1.46 billion
    found = TINY if quick else {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 4096,
    }  # fmt: skip
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in found.items())


def _opened(folder: str, quick: bool, more: list[str]) -> Any:
    from benchmarks.peers.opened import open_task

    return open_task(
        [
            *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama", "parallel.strategy=single"),
            *(f"task.from_scratch={{{_sizes(quick)}}}", f"run.dir={folder}/runs", "train.steps=1"),
            *("data.sequence_length=64", *more),
        ]
    )


def _drawbar(name: str, folder: str, quick: bool) -> tuple[nn.Module, Any]:
    engine = _opened(folder, quick, OURS[name]).engine()
    return engine.module, lambda: engine.updater.step(1e-5, lambda grad_norm: True)


def _torch(name: str, folder: str, quick: bool) -> tuple[nn.Module, Any]:
    model = _opened(folder, quick, []).task.build_model().to(default_device())
    optimizers = _optimizers(name, model)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return model, step


def _optimizers(name: str, model: Any) -> list[Any]:
    if name == "AdamW8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(model.parameters(), lr=1e-5)]
    if name == "Muon":
        matrices = {one for key, one in model.named_parameters() if one.dim() == 2 and "embed" not in key}
        matrices -= set(model.get_output_embeddings().parameters())
        others = [one for one in model.parameters() if one not in matrices]
        return [torch.optim.Muon(list(matrices), lr=1e-5), torch.optim.AdamW(others, lr=1e-5, fused=True)]
    return [torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)]


def _bytes() -> int | None:
    synchronize()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def _launches(work: Any) -> dict[str, int]:
    trace = StepTrace()
    synchronize()
    trace.start()
    work()
    synchronize()
    return trace.stop()
