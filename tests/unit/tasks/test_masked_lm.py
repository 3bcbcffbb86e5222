"""masked_lm: which tokens are targets, and what the model sees in their places."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertTokenizerFast, PreTrainedTokenizerBase

from conftest import make_project
from drawbar.config.schema.run_config import DataSection, RunConfig, RunSection
from drawbar.config.schema.task_sections import MaskedLMConfig
from drawbar.data.tokenizer import train_byte_bpe, wrap_texts
from drawbar.errors import UserError
from drawbar.tasks.masked_lm import MaskedLM
from drawbar.tasks.task_context import TaskContext
from drawbar.train.batches import make_augment
from exhaustive import some
from runs import fit_in, losses

TOKENIZER = wrap_texts(train_byte_bpe(["the load and the engine"] * 9, 300, {"mask_token": "<|mask|>"}), "begin_end")
WORD_PIECES = BertTokenizerFast(
    vocab={
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "load", "and"])
    }
)
BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def task_of(tokenizer: PreTrainedTokenizerBase = TOKENIZER, sequence_length: int = 64, **options: Any) -> MaskedLM:
    config = MaskedLMConfig(model="bert", from_scratch=BERT, **options)
    data = DataSection(sequence_length=sequence_length)
    return MaskedLM(TaskContext(RunConfig(task=config, data=data, run=RunSection(seed=3)), tokenizer))


def sample_of(task: MaskedLM, text: str, number: int = 0) -> dict[str, Any]:
    (sample,) = task.encode({"text": text}, True) or []
    return {**sample, "id": number, "ids": [number]}


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_how_many_tokens_are_masked_replaced_and_kept(share: float) -> None:
    task = task_of(mask_share=share)
    sample = sample_of(task, "xyzw" * 15)
    tokens = sample["input_ids"]
    chosen = masked = kept = replaced = 0
    draws = 2000
    for seed in range(draws):
        found = task.augment(sample, True, np.random.default_rng(seed))
        targets = found["labels"] != -100
        assert (found["labels"][targets] == tokens[targets]).all()
        assert (found["input_ids"][~targets] == tokens[~targets]).all()
        assert not targets[[0, -1]].any()  # the special tokens
        chosen += targets.sum()
        masked += (found["input_ids"][targets] == TOKENIZER.mask_token_id).sum()
        kept += (found["input_ids"][targets] == tokens[targets]).sum()
    replaced = chosen - masked - kept
    assert chosen / (draws * (len(tokens) - 2)) == pytest.approx(share, rel=0.05)
    assert masked / chosen == pytest.approx(0.8, abs=0.02)
    assert kept / chosen == pytest.approx(0.1, abs=0.02)  # 1 in 300 random tokens is the same one
    assert replaced / chosen == pytest.approx(0.1, abs=0.02)
    assert (sample["input_ids"] == tokens).all()


def test_a_draw_leaves_special_tokens_inside_alone() -> None:
    task = task_of(WORD_PIECES, mask_share=0.999)
    sample = sample_of(task, "the [MASK] load [SEP] and")
    labels = task.augment(sample, True, np.random.default_rng(0))["labels"]
    assert [WORD_PIECES.decode([token]) for token in labels if token != -100] == ["the", "load", "and"]


def test_every_epoch_masks_anew_and_an_evaluation_does_not() -> None:
    task = task_of()
    sample = sample_of(task, "the load and the engine " * 5)
    for train, differs in ((True, True), (False, False)):
        augment = make_augment(task, task.run_config, train)
        epochs = [augment(sample, epoch if train else 0)["labels"] for epoch in range(4)]
        again = [augment(sample, epoch if train else 0)["labels"] for epoch in range(4)]
        assert all((one == other).all() for one, other in zip(epochs, again, strict=True))
        assert any((one != epochs[0]).any() for one in epochs[1:]) is differs


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORD_PIECES], ids=["byte_bpe", "word_pieces"])
@given(text=st.text(max_size=80), sequence_length=st.integers(3, 20))
def test_windows_hold_each_token_once(tokenizer: PreTrainedTokenizerBase, text: str, sequence_length: int) -> None:
    task = task_of(tokenizer, sequence_length)
    windows = task.encode({"text": text}, True) or []
    assert all(3 <= len(window["input_ids"]) <= sequence_length for window in windows)
    inside = [token for window in windows for token in window["input_ids"][1:-1].tolist()]
    assert inside == list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin = tokenizer.cls_token_id if tokenizer is WORD_PIECES else tokenizer.eos_token_id
    end = tokenizer.sep_token_id if tokenizer is WORD_PIECES else tokenizer.eos_token_id
    assert all((window["input_ids"][0], window["input_ids"][-1]) == (begin, end) for window in windows)


def test_an_empty_text_is_dropped_and_a_missing_one_refused() -> None:
    assert task_of().encode({"text": ""}, True) is None
    with pytest.raises(UserError, match="no 'text'"):
        task_of().encode({"body": "a"}, True)


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    train_byte_bpe([], 257).save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match=r"no mask token[\s\S]*byte_bpe"):
        task_of(tokenizer=TOKENIZER).__class__(
            RunConfig(task=MaskedLMConfig(model="bert", from_scratch=BERT, tokenizer=str(tmp_path)))
        ).build_tokenizer()


@pytest.mark.parametrize("batching", some(["padded", "packed"], 1))
def test_the_loss_falls(batching: str, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    config = (project / "config.yaml").read_text().replace("model: llama", "type: masked_lm\n  model: bert")
    config = config.replace("\n                 num_key_value_heads: 2,", "")
    (project / "config.yaml").write_text(config)
    fit_in(project, f"data.batching={batching}", "train.steps=60", "eval.every=null", "task.mask_share=0.3")
    trace = list(losses(project / "runs" / "tiny").values())
    assert sum(trace[-5:]) < 0.85 * sum(trace[:5])
