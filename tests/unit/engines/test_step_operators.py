"""What a whole step asks of a device: it reads no value there, whatever the model, the loss or the optimizer."""

from typing import Any

import numpy as np
import pytest
import torch

from drawbar.config.schema.run_config import (
    CausalLMConfig,
    DataSection,
    OptimSection,
    ParallelSection,
    RunConfig,
    TrainSection,
)
from drawbar.data.dataset import encode_records
from drawbar.data.loader import MicroBatch, MicroBatchSize
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.evaluation.scoring import Split, evaluate
from drawbar.models.segments import send_padding
from drawbar.tasks.batch import Batch
from drawbar.tasks.padding import train_collate
from step_operators import StepOperators, step_on_fake_cuda, watch_device
from tiny import ARCHITECTURES, CPU, LENGTH, random_step, tiny_config, tiny_engine

PLAIN = CausalLMConfig(model="llama", from_scratch=ARCHITECTURES["llama"], cross_entropy="plain")
BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BF16),
    "gpt2": ("gpt2", BF16),
    "fp32": ("llama", {}),
    "clipped": ("llama", {"train": TrainSection(steps=10, gradient_clip=1.0)}),
    "muon": ("llama", {"optim": OptimSection(name="muon", lr=1e-2)}),
    "bf16 moments": ("llama", {"optim": OptimSection(state_dtype="bf16")}),
    "int8 moments": ("llama", {"optim": OptimSection(state_dtype="int8")}),
    "computed again": ("llama", {**BF16, "parallel": ParallelSection(activation_checkpointing="full")}),
}


def reads_of_a_step(config: RunConfig) -> dict[str, int]:
    """What a step reads on the device: its first micro-batch has padding, the others none."""
    engine = tiny_engine(config)
    step = random_step(engine, seed=1, micro_batches=3)
    for micro, has_padding in zip(step, (True, False), strict=False):  # the third has no mask
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


def test_an_evaluation_reads_nothing_on_the_device_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts, it counts in batches that have not been copied there."""
    chance, operators = np.random.default_rng(0), StepOperators()
    records = [{"tokens": chance.integers(257, size=9), "context": 0, "text": "word"} for _ in range(10)]
    with Distributed(RankInfo(), CPU, timeout=60) as world:
        engine = tiny_engine(tiny_config(), world)
        split = Split(
            "validation",
            records,
            encode_records(records, lambda record: engine.task.encode(record, False), describe=str),
        )
        batches: list[int] = []
        reads: list[int] = []
        copy = Batch.to

        def copy_to(batch: Batch, device: torch.device) -> Batch:
            reads.append(operators.reads.total())
            return copy(batch, device)

        monkeypatch.setattr(Batch, "to", copy_to)
        with operators:
            found = evaluate(
                engine,
                engine.task,
                split,
                world,
                MicroBatchSize(rows=2),
                lambda sample, epoch: sample,
                lambda done, total: batches.append(done),
            )
        assert found is not None
        assert batches == [1, 2, 3, 4, 5]
        assert operators.reads == {"num_targets": 5, "of": 5}
        assert reads == [2, 4, 6, 8, 10]
        total = 0.0
        for first in range(0, 10, 2):
            batch = engine.task.collate([split.samples[number] for number in (first, first + 1)])
            total += float(engine.eval_step(batch).loss)
        assert found.scores["loss"] == total / 80


SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 7},
    "gpt_neox": {**SIZES, "hidden_dropout": 0.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def step_in_bf16(family: str, padding_free: bool) -> StepOperators:
    """A step of three documents in each of two micro-batches, on CUDA."""
    config = tiny_config(
        precision="bf16",
        data=DataSection(sequence_length=LENGTH, padding_free=padding_free),
        train=TrainSection(steps=10, gradient_clip=1.0),
    )
    task = CausalLMConfig(model=family, from_scratch=FAMILIES[family])
    config = config.model_copy(update={"task": task})
    engine = tiny_engine(config)
    collate = train_collate(engine.task, config)
    chance = np.random.default_rng(0)
    step = []
    for lengths in ([9, 4, 11], [20, 7, 12]):
        rows = [chance.integers(257, size=length, dtype=np.int32) for length in lengths]
        samples = [{"input_ids": row, "labels": row, "id": i, "ids": [i]} for i, row in enumerate(rows)]
        step.append(MicroBatch(collate(samples)))
    return step_on_fake_cuda(engine, step)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_attended_to_by_flash_on_cuda(family: str) -> None:
    """In a whole step, in which no value is read on the device, and no tensor of the host takes part."""
    operators = step_in_bf16(family, padding_free=True)
    assert operators.attention == {"torch_attn::_varlen_attn"}
    assert operators.launches["torch_attn::_varlen_attn"] == 2 * 2  # layers and micro-batches
    assert not operators.reads
    assert not operators.copies


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_wait_for_nothing_on_cuda(family: str) -> None:
    operators = step_in_bf16(family, padding_free=False)
    assert not operators.reads
    assert not operators.copies
