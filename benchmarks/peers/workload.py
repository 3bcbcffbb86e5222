"""What every peer trains: the same initial weights on the same samples in the same batches.

drawbar prepares it once: it builds the model from a seed, saves it as transformers does, encodes the data, and writes
down the samples in the order in which its own run will visit them. All peers read both from the folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

IGNORED = -100
CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """How a peer is run."""

    precision: str = "fp32"
    """``fp32`` or ``bf16`` (autocast)."""
    compiled: bool = False
    micro_batches: int = 1
    """Forwards of a step, on each rank."""
    strategy: str = "single"
    """``single``, ``ddp``, ``fsdp``, ``zero1``, or for DeepSpeed alone ``zero2`` and ``zero3``."""
    options: dict[str, Any] = field(default_factory=dict)
    """What only this peer knows."""


@dataclass(frozen=True)
class Workload:
    """Plain values, so that it can be handed to another process."""

    folder: str
    """Holds ``model/`` and ``samples.pt``."""
    task: str
    """A key of ``CLASSES``."""
    rows: int
    """Samples of a step, over all ranks."""
    steps: int
    warm_up: int
    """Steps at the start that are not timed."""
    overrides: list[str]
    """drawbar's settings of task and data."""
    lr: float = 1e-3
    weight_decay: float = 0.01
    task_type: str = ""
    """drawbar's name of the task, where it is another."""
    profiled: bool = False
    """Whether the steps after the warm-up run under torch.profiler, which slows them down."""
    traced: int = 0
    """Steps at the end that run under torch.profiler, and are not timed."""
    trace: str | None = None
    """File for these, for Chrome's tracing; its name ends in ``.json.gz``."""

    @classmethod
    def of(cls, values: "dict[str, Any] | Workload") -> "Workload":
        return values if isinstance(values, Workload) else cls(**values)

    @property
    def model_path(self) -> Path:
        return Path(self.folder) / "model"

    def model(self) -> nn.Module:
        """With the initial weights, in training mode."""
        import transformers

        loader = getattr(transformers, CLASSES[self.task])
        return loader.from_pretrained(self.model_path, dtype=torch.float32).train()

    def samples(self) -> list[Sample]:
        """Those of all steps, in order."""
        return torch.load(self.samples_path, weights_only=True)[: self.steps * self.rows]

    @property
    def samples_path(self) -> Path:
        return Path(self.folder) / "samples.pt"

    @property
    def held_out_path(self) -> Path:
        return Path(self.folder) / "held_out.pt"

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float | None:
        """Mean loss of a target of the validation data, sample by sample; None where there are none."""
        if not self.held_out_path.exists():
            return None
        total, count = 0.0, 0
        for sample in torch.load(self.held_out_path, weights_only=True):
            batch = {
                name: tensor.to(next(model.parameters()).device) for name, tensor in self.collate([sample]).items()
            }
            labels = batch.pop("labels")
            total += float(loss_sum(self.task, model.eval()(**batch).logits, labels))
            count += int((labels != IGNORED).sum())
        return total / count

    def targets(self) -> list[int]:
        """Labels that are not ignored, of each step."""
        counts = [int((sample["labels"] != IGNORED).sum()) for sample in self.samples()]
        return [sum(counts[first : first + self.rows]) for first in range(0, len(counts), self.rows)]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """A batch, padded on the right to its longest sample; with an attention mask where lengths differ."""
        padding = {"labels": IGNORED, "input_ids": self.pad_token, "decoder_input_ids": self.pad_token}
        batch = {
            name: (
                nn.utils.rnn.pad_sequence([sample[name] for sample in samples], True, padding[name])
                if samples[0][name].dim()
                else torch.stack([sample[name] for sample in samples])
            )
            for name in samples[0]
        }
        if self.task != "causal_lm":
            ones = [torch.ones_like(sample["input_ids"]) for sample in samples]
            batch["attention_mask"] = nn.utils.rnn.pad_sequence(ones, True, 0)
        return batch

    @property
    def epoch_rows(self) -> int:
        """Samples of an epoch, where training is two epochs, the first to warm up: whoever chooses batches of its own
        then trains on the same samples in the time that counts."""
        return self.warm_up * self.rows

    @cached_property
    def pad_token(self) -> int:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model_path).pad_token_id or 0

    def step_batches(self, micro_batches: int, rank: int, world_size: int) -> Iterator[list[dict[str, Tensor]]]:
        """This rank's micro-batches of each step."""
        samples, share = self.samples(), self.rows // world_size
        size = share // micro_batches
        for first in range(rank * share, self.steps * self.rows, self.rows):
            yield [
                self.collate(samples[begin : begin + size])
                for begin in range(first, first + micro_batches * size, size)
            ]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, which leaves biases and norms without weight decay, as drawbar and transformers' Trainer do."""
        groups = [
            {"params": [one for one in model.parameters() if (one.dim() > 1) is decays], "weight_decay": decay}
            for decays, decay in ((True, self.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, fused=True)


def loss_sum(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over all labels that are not ignored, in fp32."""
    if task == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def prepare(workload: dict[str, Any], builder: list[str]) -> dict[str, Any]:
    """Write the folder: model, samples, and drawbar's cache of the encoded data.

    Args:
        builder: drawbar's settings that make the model and its tokenizer.
    """
    from benchmarks.peers.opened import open_task  # imports drawbar, which the other peers must not load
    from drawbar.data.loader import TrainLoader
    from drawbar.train.batches import load_split, make_loader

    work = Workload.of(workload)
    common = drawbar_settings(work, Path(work.folder) / "runs")
    task = open_task([*common, *builder]).task
    model = task.build_model()
    for name in [name for name, value in vars(model.config).items() if "drop" in name and isinstance(value, float)]:
        setattr(model.config, name, 0.0)  # no two programs draw the same random numbers
    model.save_pretrained(work.model_path)
    task.tokenizer.save_pretrained(work.model_path)
    run = open_task([*common, f"task.model={work.model_path}"])
    loader = make_loader(run.task, run.config, run.world, run.console)
    assert isinstance(loader, TrainLoader)  # nothing is streamed
    order = _order(loader.sampler, work.steps * work.rows, work.rows)
    torch.save([_plain_sample(work, loader.rows.samples[row]) for row in order], work.samples_path)
    if run.config.data.validation is not None:
        held_out = load_split(run.task, "validation", run.config, run.world, run.console).samples
        torch.save([_plain_sample(work, held_out[row]) for row in range(len(held_out))], work.held_out_path)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def drawbar_settings(workload: Workload, runs: Path) -> list[str]:
    """What every run of drawbar on the workload says, besides the model."""
    return [
        f"task.type={workload.task_type or workload.task}",
        *workload.overrides,
        f"train={{global_batch: {workload.rows}, steps: {workload.steps}}}",
        f"optim={{lr: {workload.lr}, weight_decay: {workload.weight_decay}, schedule: constant}}",
        f"data.cache={Path(workload.folder) / 'cache'}",
        f"run.dir={runs}",
        "checkpoint={every: null, keep_best: false}",
        "tracking.tensorboard=false",
    ]


def _order(sampler: Any, count: int, rows: int) -> list[int]:
    """The first ``count`` rows that training visits.

    Raises:
        ValueError: a step would be smaller at the end of an epoch, which is not the same thing for all peers.
    """
    if sampler.size < count and sampler.size % rows:
        raise ValueError(f"an epoch of {sampler.size} samples has no whole number of steps of {rows}")
    epochs = range(-(-count // sampler.size))
    return [row for epoch in epochs for row in sampler.rows(epoch, np.arange(sampler.size)).tolist()][:count]


def _plain_sample(workload: Workload, sample: dict[str, Any]) -> Sample:
    kept = ("input_ids", "decoder_input_ids", "labels")
    found = {name: torch.as_tensor(sample[name]).long().clone() for name in kept if name in sample}
    if workload.task == "causal_lm":
        found["labels"][0] = IGNORED  # nothing predicts it: those who divide by all labels must not count it
    return found
