"""What a whole step asks of a device: it reads no value there, whatever the model, the loss or the optimizer."""

from typing import Any

import pytest
import torch

from drawbar.config.schema.run_config import CausalLMConfig, OptimSection, ParallelSection, RunConfig, TrainSection
from drawbar.models.known_padding import send_padding
from step_operators import watch_device
from tiny import ARCHITECTURES, random_step, tiny_config, tiny_engine

PLAIN = CausalLMConfig(model="llama", from_scratch=ARCHITECTURES["llama"], cross_entropy="plain")
BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BF16),
    "gpt2": ("gpt2", BF16),
    "fp32": ("llama", {}),
    "clipped": ("llama", {"train": TrainSection(steps=10, gradient_clip=1.0)}),
    "muon": ("llama", {"optim": OptimSection(name="muon", lr=1e-2)}),
    "bf16 moments": ("llama", {"optim": OptimSection(state_dtype="bf16")}),
    "computed again": ("llama", {**BF16, "parallel": ParallelSection(activation_checkpointing="full")}),
}


def reads_of_a_step(config: RunConfig) -> dict[str, int]:
    """What a step reads on the device: its first micro-batch has padding, its second none."""
    engine = tiny_engine(config)
    step = random_step(engine, seed=1)
    for micro, has_padding in zip(step, (True, False), strict=True):
        mask = torch.ones_like(micro.batch["labels"])
        mask[0, -1] = 0 if has_padding else 1
        micro.batch["attention_mask"] = mask
        send_padding(mask, mask)  # as ``Batch.to`` does for a GPU
    operators = watch_device(engine)
    engine.train_step(step)
    assert sum(operators.launches.values()) > 100
    return dict(operators.reads)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_padded_rows_reads_nothing_on_the_device(name: str) -> None:
    family, sections = CASES[name]
    assert not reads_of_a_step(tiny_config(family, **sections))


def test_a_step_with_all_logits_reads_nothing_on_the_device() -> None:
    assert not reads_of_a_step(tiny_config().model_copy(update={"task": PLAIN}))


def test_a_step_in_fp16_reads_whether_the_gradient_overflowed() -> None:
    assert reads_of_a_step(tiny_config(precision="fp16")) == {"step": 1}
