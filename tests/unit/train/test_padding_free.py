"""Runs without padding: the losses of padded ones, no token in vain, and a run that goes on as it began."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.classification import SequenceClassification
from drawbar.tasks.padding import choose_padding_free
from runs import fit_in, largest_difference, losses

CONFIG = """\
run: {dir: runs}
task:
  model: bert
  from_scratch:
    {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2, hidden_dropout_prob: 0.0,
     attention_probs_dropout_prob: 0.0}
  tokenizer: {train: byte_bpe, vocab_size: 280}
data: {train: records.jsonl, sequence_length: 32}
train: {global_batch: 8, micro_batch: 4, steps: 6}
checkpoint: {every: 3}
precision: fp32
device: cpu
tracking: {tensorboard: false, log_every: 1}
"""
PADDED, FREE = "data.padding_free=false", "data.padding_free=true"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [{"text": "the load " * (1 + number * 7 % 9), "label": "xyz"[number % 3]} for number in range(40)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def tokens_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens of samples, tokens computed) of each training forward to come."""
    seen: list[tuple[int, int]] = []
    loss = SequenceClassification.loss

    def note(self: SequenceClassification, outputs: Any, batch: Batch) -> torch.Tensor:
        real = batch["segment_ids"] >= 0 if batch.packed else batch["attention_mask"] > 0
        seen.append((int(real.sum()), real.numel()))
        return loss(self, outputs, batch)

    note.__module__ = loss.__module__
    monkeypatch.setattr(SequenceClassification, "loss", note)
    return seen


@pytest.mark.parametrize("settings", [(), ("data.batching=grouped",), ("data.streaming=true",)])
def test_a_run_without_padding_has_the_losses_of_a_padded_one(
    settings: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tokens_of(monkeypatch)
    common = ("task.type=sequence_classification", "task.labels=[x, y, z]", *settings)
    fit_in(folder, *common, PADDED, "run.name=padded")
    assert any(real < computed for real, computed in seen)
    seen.clear()
    fit_in(folder, *common, "run.name=free")
    training = seen[-12:]  # two micro-batches a step; the task is tried before, on padded rows
    assert all(real == computed for real, computed in training)
    assert largest_difference(losses(folder / "runs" / "padded"), losses(folder / "runs" / "free")) < 1e-5


def test_a_run_goes_on_as_it_began(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``auto`` is by then; what is asked for counts."""
    common = ("task.type=sequence_classification", "run.name=run")
    fit_in(folder, *common, PADDED, "train.steps=3")
    seen = tokens_of(monkeypatch)
    fit_in(folder, *common)
    assert any(real < computed for real, computed in seen[-6:])
    seen.clear()
    fit_in(folder, *common, "train.steps=9", FREE)
    assert all(real == computed for real, computed in seen[-6:])
    seen.clear()
    fit_in(folder, *common, "train.steps=12")
    assert all(real == computed for real, computed in seen[-6:])


class Own(SequenceClassification):
    """Looks at a row for each sample."""

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        assert len(batch["input_ids"]) == len(batch.ids)
        return super().loss(outputs, batch)


def test_a_task_with_a_loss_of_its_own_stays_padded(folder: Path) -> None:
    fit_in(folder, "task.type=sequence_classification", task=Own)
    with pytest.raises(UserError, match="Own has a loss of its own") as caught:
        fit_in(folder, "task.type=sequence_classification", FREE, "run.name=other", task=Own)
    assert caught.value.where == "data.padding_free"


def test_a_family_that_cannot_be_packed_stays_padded(folder: Path) -> None:
    albert = "task.from_scratch={embedding_size: 8, hidden_size: 16, num_attention_heads: 2, intermediate_size: 8}"
    common = ("task.type=masked_lm", "task.model=albert", albert, "train.steps=1")
    fit_in(folder, *common)
    with pytest.raises(UserError, match="albert model of masked_lm"):
        fit_in(folder, *common, FREE, "run.name=other")


def test_a_model_that_cannot_be_built_is_not_blamed_on_padding(folder: Path) -> None:
    with pytest.raises(UserError, match="hidden_siz") as caught:
        fit_in(folder, "task.type=sequence_classification", "task.from_scratch.hidden_siz=16", FREE)
    assert caught.value.where == "task.from_scratch.hidden_siz"


def chosen(folder: Path, fields: str, *settings: str, device: str = "cuda") -> bool | str:
    """What ``data.padding_free=auto`` becomes of compiled blocks in bf16."""
    written = [f"task={{type: causal_lm, {fields}, tokenizer: {{train: byte_bpe, vocab_size: 280}}}}"]
    written += [
        f"data.train={folder}/records.jsonl",
        "train.steps=1",
        "parallel.compile=true",
        "precision=bf16",
        *settings,
    ]
    config = load_config(None, written).config
    return choose_padding_free(CausalLM(config), config, torch.device(device)).data.padding_free


LLAMA = "model: llama, from_scratch: {hidden_size: 64, num_attention_heads: 4}"


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_compiled_blocks_need_no_padding_where_they_attend_by_flash(batching: str, folder: Path) -> None:
    """As on a GPU since Ampere: what a machine without one answers."""
    setting = f"data.batching={batching}"
    assert chosen(folder, LLAMA, setting) is True
    assert chosen(folder, LLAMA, setting, "precision=fp16") is True
    assert chosen(folder, LLAMA, setting, "precision=fp32") is False
    assert chosen(folder, LLAMA, setting, device="cpu") is False
    assert chosen(folder, LLAMA, setting, "parallel.tensor=2") is False
    assert chosen(folder, LLAMA.replace("heads: 4", "heads: 4, head_dim: 20"), setting) is False
    assert chosen(folder, LLAMA.replace("heads: 4", "heads: 4, attention_dropout: 0.1"), setting) is False
    assert (
        chosen(folder, "model: gpt2, from_scratch: {n_embd: 64, n_head: 4}", setting) is False
    )  # its attn_pdrop is 0.1
    assert chosen(folder, "model: gpt2, from_scratch: {n_embd: 64, n_head: 4, attn_pdrop: 0.0}", setting) is True
    assert chosen(folder, LLAMA, setting, "parallel.compile=false", device="cpu") is True


def test_compiled_blocks_on_a_cpu_refuse_to_do_without_padding(folder: Path) -> None:
    with pytest.raises(UserError, match="only with torch's flash attention") as caught:
        chosen(folder, LLAMA, FREE, device="cpu")
    assert caught.value.where == "data.padding_free"
