"""Packing changes the shape of a batch and nothing else, for every built-in task and for one of a user's own."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from drawbar.config.schema.run_config import DataSection, RunConfig, RunSection
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, TaskConfig
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.loader import raw_batch
from drawbar.data.packing import PackedRows, Plan, plan_rows
from drawbar.data.prefetch import Augment, BatchMaker
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.packed import allow_packing
from drawbar.tasks.batch import Batch
from drawbar.tasks.padding import train_collate
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.task_registry import task_class
from drawbar.tracking.console import make_console
from drawbar.train.batches import make_augment, make_loader
from plans import plan_of
from tiny import CPU

LENGTH = 48
TOKENIZER = train_byte_bpe(["the load and the engine"] * 9, 280, {"pad_token": "<|pad|>", "mask_token": "<|mask|>"})
SIZES = {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
BERT = {**SIZES, "hidden_size": 16, "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "hidden_size": 16, "num_key_value_heads": 2, "max_position_embeddings": LENGTH},
    "bert": BERT,
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    "bart": {
        "d_model": 16,
        **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
        **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
        **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
        **dict.fromkeys(["dropout", "attention_dropout", "activation_dropout"], 0.0),
        "max_position_embeddings": LENGTH,
        "init_std": 0.3,
    },
}
CASES = [
    ("causal_lm", "llama", {}),
    ("causal_lm", "llama", {"prompt_column": "text", "completion_column": "target"}),
    ("sequence_classification", "bert", {}),
    ("sequence_classification", "bert", {"problem": "multi_label", "label_column": "several"}),
    ("sequence_classification", "bert", {"problem": "regression", "label_column": "number"}),
    ("token_classification", "bert", {}),
    ("masked_lm", "bert", {"mask_share": 0.4}),
    ("seq2seq", "t5", {"source_column": "text"}),
    ("seq2seq", "bart", {"source_column": "text"}),
]
EACH = pytest.mark.parametrize(("name", "family", "options"), CASES, ids=lambda value: "-".join(value))
WORDS = ["the", "load", "and", "the", "engine", "pulls", "xq", "along"]


def records() -> list[dict[str, Any]]:
    chance = np.random.default_rng(0)
    found = []
    for number in range(14):
        words = [WORDS[chance.integers(len(WORDS))] for _ in range(1 + number % 6)]
        found.append({
            "text": " ".join(words), "target": " ".join(reversed(words)), "label": "xyz"[number % 3],
            "several": list("xyz"[: number % 4]), "number": float(chance.normal()),
            "tokens": words, "tags": ["xyz"[len(word) % 3] for word in words],
        })  # fmt: skip
    return found


def task_of(name: str, family: str, options: dict[str, Any]) -> Task:
    config = BUILT_IN_TASKS[name](**{"model": family, "from_scratch": FIELDS[family], **options})
    run_config = RunConfig(task=config, data=DataSection(sequence_length=LENGTH), run=RunSection(seed=5))
    return task_class(name)(TaskContext(run_config, TOKENIZER, {"labels": list("xyz")}))


def model_of(task: Task) -> nn.Module:
    torch.manual_seed(0)
    model = task.build_model()
    allow_packing(model, per_sample=task.label_placement == "sample")
    return model


def encoded(task: Task, rows: list[dict[str, Any]]) -> EncodedDataset:
    return encode_records(rows, lambda record: task.encode(record, True), describe=str)


def packed(task: Task, samples: EncodedDataset, plan: Plan, augment: Augment) -> Batch:
    assert task.label_placement is not None
    rows = PackedRows(samples, plan, task.label_placement)
    return BatchMaker(task.collate, augment)(raw_batch(rows, np.arange(len(rows)), epoch=0))


def loss_and_gradients(task: Task, model: nn.Module, batch: Batch) -> tuple[float, torch.Tensor]:
    model.train()
    model.zero_grad()
    loss = task.loss(task.forward(model, batch), batch)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("joined", [False, True], ids=["packed", "padding_free"])
@EACH
def test_loss_and_gradients_are_those_of_padded_rows(
    name: str, family: str, options: dict[str, Any], joined: bool
) -> None:
    """In fp32, without dropout; for masked_lm, of the same draws."""
    task = task_of(name, family, options)
    samples = encoded(task, records())
    augment = make_augment(task, task.run_config, train=True)
    lengths = np.maximum(samples.lengths, samples.field_lengths("labels") if name == "seq2seq" else 0)
    plan = plan_rows(lengths, LENGTH, seed=0)
    assert 2 <= len(plan) < len(samples) - 3
    one = task.collate([augment(samples[number], 0) for number in range(len(samples))])
    other = packed(task, samples, plan, augment)
    if joined:
        free = task.run_config.model_copy(update={"data": DataSection(padding_free=True)})
        collate = pickle.loads(pickle.dumps(train_collate(task, free)))  # as processes of data.workers are given it
        other = collate([augment(samples[number], 0) for number in range(len(samples))])
        assert (other["segment_ids"] >= 0).all()
        assert len(other["input_ids"]) == 1
    assert other.packed
    assert not one.packed
    assert sorted(other.ids) == one.ids
    assert task.num_targets(one) == task.num_targets(other) > 0
    model = model_of(task)
    loss, gradients = loss_and_gradients(task, model, one)
    packed_loss, packed_gradients = loss_and_gradients(task, model, other)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert (packed_gradients - gradients).norm() <= 1e-5 * gradients.norm()


@pytest.mark.parametrize(
    ("name", "family", "options"),
    [("sequence_classification", "bert", {}), ("seq2seq", "t5", {"source_column": "text"}),
     ("seq2seq", "bart", {"source_column": "text"})],
)  # fmt: skip
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_sample_does_not_see_the_others(name: str, family: str, options: dict[str, Any], changed: int) -> None:
    task = task_of(name, family, options)
    model = model_of(task).eval()
    rows = records()[1:4]  # short enough for a row
    before = sample_losses(task, model, rows)
    rows[changed] = {**rows[changed], "text": "xq " + rows[changed]["text"]}
    after = sample_losses(task, model, rows)
    for number in range(3):
        if number == changed:
            assert abs(after[number] - before[number]) > 1e-3
        else:
            assert after[number] == pytest.approx(before[number], rel=1e-5)


def sample_losses(task: Task, model: nn.Module, rows: list[dict[str, Any]]) -> list[float]:
    """The loss of each sample of one packed row."""
    samples = encoded(task, rows)
    batch = packed(task, samples, plan_of([range(len(samples))]), lambda sample, epoch: sample)
    logits = task.forward(model, batch).logits
    logits, labels = logits.flatten(0, -2), batch["labels"].flatten()
    each = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    owner = torch.arange(3) if task.label_placement == "sample" else batch["decoder_segment_ids"].flatten()
    return [each[owner == number].sum().item() for number in range(3)]


class Unsure(Task):
    """A user's own, on a plain model of transformers: it says nothing of its targets."""

    def build_tokenizer(self) -> Any:
        return TOKENIZER

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return build_from_scratch("bert", BERT, TOKENIZER, "sequence_classification", num_labels=3)

    def records(self, split: str) -> list[dict[str, Any]]:
        return records()

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        return {"input_ids": TOKENIZER(record["text"])["input_ids"], "labels": "xyz".index(record["label"])}

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch = super().collate(samples)
        if not batch.packed:
            batch["attention_mask"] = (batch["input_ids"] != 0).long()
        return batch

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs.logits, batch["labels"], reduction="sum")


class Sure(Unsure):
    label_placement = "sample"


def config_of() -> RunConfig:
    return RunConfig(task=TaskConfig(), data=DataSection(sequence_length=LENGTH, batching="packed"))


def test_a_task_of_ones_own_packs_too() -> None:
    task = Sure(TaskContext(config_of(), TOKENIZER))
    samples = encoded(task, records())
    plan = plan_rows(samples.lengths, LENGTH, seed=0)
    model = model_of(task)
    one = task.collate([samples[number] for number in range(len(samples))])
    loss, gradients = loss_and_gradients(task, model, one)
    packed_loss, packed_gradients = loss_and_gradients(
        task, model, packed(task, samples, plan, lambda sample, epoch: sample)
    )
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert (packed_gradients - gradients).norm() <= 1e-5 * gradients.norm()


def test_one_that_does_not_say_where_its_targets_are_cannot(tmp_path: Any) -> None:
    config = config_of()
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})})
    task = Unsure(TaskContext(config, TOKENIZER))
    with pytest.raises(
        UserError, match=r"Unsure does not say where its labels are[\s\S]*set `label_placement` in the class"
    ):
        make_loader(task, config, Distributed(RankInfo(), CPU, timeout=60), make_console(False))
