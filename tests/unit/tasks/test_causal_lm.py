"""causal_lm: every token is a target exactly once, and the loss is the plain sum over the targets."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import CausalLMConfig, TokenizerTraining
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.loader import Rows, SampleRows
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.data.tokenizer import train_byte_bpe, wrap_texts
from drawbar.errors import UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task_context import TaskContext
from tiny import ARCHITECTURES, tiny_config, tiny_task

TOKENIZER = wrap_texts(train_byte_bpe(["the load and the engine and the load"] * 9, 270), "begin")
END = TOKENIZER.eos_token_id
TEXTS = st.lists(st.text(max_size=40), min_size=1, max_size=6)


def task_of(sequence_length: int = 16, **options: Any) -> CausalLM:
    scratch = {"from_scratch": ARCHITECTURES["llama"]}
    config = RunConfig(task=CausalLMConfig(**{**scratch, **options}), data=DataSection(sequence_length=sequence_length))
    return CausalLM(TaskContext(config, TOKENIZER))


def encoded(task: CausalLM, texts: list[str]) -> EncodedDataset:
    return encode_records([{"text": text} for text in texts], lambda r: task.encode(r, True), describe=str)


def tokens_of(text: str) -> list[int]:
    return [END, *TOKENIZER(text, add_special_tokens=False)["input_ids"], END]


def targets_of(batch: Batch) -> list[int]:
    labels = batch["labels"][:, 1:]
    return labels[labels != -100].tolist()


@given(text=st.text(max_size=200), sequence_length=st.integers(2, 40))
def test_every_token_but_the_first_is_a_target_once(text: str, sequence_length: int) -> None:
    task = task_of(sequence_length)
    windows = task.encode({"text": text}, train=True)
    assert windows is not None
    assert all(2 <= len(window["input_ids"]) <= sequence_length for window in windows)
    found = [token for window in windows for token in targets_of(task.collate([{**window, "ids": [0]}]))]
    assert found == tokens_of(text)[1:]


@given(texts=TEXTS, sequence_length=st.integers(4, 40), packed=st.booleans())
def test_the_weight_is_the_number_of_targets(texts: list[str], sequence_length: int, packed: bool) -> None:
    task = task_of(sequence_length)
    samples = encoded(task, texts)
    rows: Rows = SampleRows(samples)
    if packed:
        rows = PackedRows(samples, plan_rows(samples.lengths, sequence_length, seed=0), "next_token")
    batch = task.collate([rows.join(rows.read(number)) for number in range(len(rows))])
    assert task.num_targets(batch) == len(targets_of(batch)) == sum(len(tokens_of(text)) - 1 for text in texts)
    assert sorted(batch.ids) == list(range(len(samples)))
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_the_text_comes_back_from_the_tokens() -> None:
    text = "the load\tand 文字 <|endoftext|> and the engine"
    (window,) = task_of(200).encode({"text": text}, train=True) or []
    assert TOKENIZER.decode(window["input_ids"], skip_special_tokens=True) == text
    assert window["input_ids"].tolist().count(END) == 2  # written in a text, it is text


def test_padding_is_no_target_and_position_ids_only_with_packing() -> None:
    task = task_of(200)
    samples = encoded(task, ["a", "the load and the engine"])
    batch = task.collate([samples[0], samples[1]])
    assert set(batch.inputs) == {"input_ids"}
    assert (batch["labels"][0, 3:] == -100).all()
    assert (batch["input_ids"][0, 3:] == END).all()


@pytest.mark.parametrize("record", [{"body": "text"}, {"text": 3}, {"text": None}, {}])
def test_a_record_without_text_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"'text'[\s\S]*task.text_column"):
        task_of().encode(record, train=True)


def test_the_text_may_stand_under_another_key() -> None:
    (window,) = task_of(text_column="body").encode({"body": "a", "text": 3}, train=True) or []
    assert window["input_ids"].tolist() == tokens_of("a")


def test_a_document_with_nothing_to_predict_is_dropped() -> None:
    task = task_of()
    task.tokenizer = train_byte_bpe(["a"], 257)
    task.tokenizer.bos_token = task.tokenizer.eos_token = None
    assert task.encode({"text": "a"}, train=True) is None
    assert task.encode({"text": "ab"}, train=True) is not None


def test_the_loss_is_the_sum_over_all_targets() -> None:
    task = tiny_task(tiny_config())
    model = task.build_model()
    documents = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2]]
    rows = [
        {**task.encode({"tokens": tokens, "context": context}, True)[0], "ids": [number]}
        for number, (tokens, context) in enumerate(zip(documents, [0, 2, 2], strict=True))
    ]
    batch = task.collate(rows)
    found = task.loss(task.forward(model, batch), batch)
    expected = 0.0
    for tokens, first in zip(documents, [1, 2, 2], strict=True):
        for place in range(first, len(tokens)):
            logits = model(input_ids=torch.tensor([tokens[:place]])).logits[0, -1]
            expected -= logits.log_softmax(-1)[tokens[place]].item()
    assert task.num_targets(batch) == 7 + 1 + 0
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_targets_has_loss_and_gradient_zero() -> None:
    task = tiny_task(tiny_config())
    model = task.build_model()
    batch = task.collate([{**task.encode({"tokens": [1, 2, 3], "context": 3}, True)[0], "ids": [0]}])
    loss = task.loss(task.forward(model, batch), batch)
    loss.backward()
    assert task.num_targets(batch) == 0
    assert loss.item() == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


def test_scores_are_nats_perplexity_and_bits_per_byte() -> None:
    records = [{"text": "ab"}, {"text": "é"}]  # four bytes
    scores = task_of().loss_scores(loss=8 * math.log(2), num_targets=4, records=records)
    assert scores == pytest.approx({"loss": 2 * math.log(2), "perplexity": 4.0, "bits_per_byte": 2.0})
    assert task_of().loss_scores(loss=4000.0, num_targets=1, records=records)["perplexity"] == math.inf


def test_a_tokenizer_is_trained_on_the_training_texts(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abababab abababab\n" * 20)
    config = RunConfig(
        task=CausalLMConfig(from_scratch={}, tokenizer=TokenizerTraining(train="byte_bpe", vocab_size=260)),
        data=DataSection(train=str(tmp_path / "train.txt")),
    )
    tokenizer = CausalLM(config).build_tokenizer()
    assert len(tokenizer) == 260
    assert len(tokenizer("abababab")["input_ids"]) < 8


def test_a_tokenizer_comes_from_the_models_folder(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(str(tmp_path))
    assert len(task_of(from_scratch=None, model=str(tmp_path)).build_tokenizer()) == len(TOKENIZER)
    assert len(task_of(tokenizer=str(tmp_path)).build_tokenizer()) == len(TOKENIZER)


def test_from_scratch_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs a tokenizer[\s\S]*task.tokenizer"):
        task_of().build_tokenizer()


def test_rows_longer_than_the_models_positions_are_refused() -> None:
    task = task_of(sequence_length=ARCHITECTURES["llama"]["max_position_embeddings"] + 1)
    with pytest.raises(UserError, match=r"data.sequence_length is 49, but the model has 48 positions"):
        task.build_model()
    assert task_of(sequence_length=48).build_model().config.vocab_size == len(TOKENIZER)
    gpt2 = task_of(sequence_length=49, model="gpt2", from_scratch=ARCHITECTURES["gpt2"])
    with pytest.raises(UserError, match=r"a larger n_positions in task\.from_scratch"):  # as GPT-2 calls it
        gpt2.build_model()


def test_an_auxiliary_loss_that_nothing_would_add_is_refused() -> None:
    class WithRouter(CausalLM):
        def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
            return super().loss(outputs, batch) + outputs.aux_loss * self.num_targets(batch)

    fields = {**ARCHITECTURES["llama"], "num_local_experts": 2, "output_router_logits": True}
    config = tiny_config("llama").model_copy(
        update={"task": CausalLMConfig(model="mixtral", from_scratch=fields, tokenizer=None)}
    )
    context = TaskContext(config, tiny_task(tiny_config("llama")).tokenizer)
    task, own = CausalLM(context), WithRouter(context)
    with pytest.raises(UserError, match="auxiliary loss"):
        task.build_model()
    own.build_model()


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    scratch = {**ARCHITECTURES["llama"], "vocab_size": 260}
    with pytest.raises(UserError, match=r"270 tokens[\s\S]*260[\s\S]*task.resize_embeddings=true"):
        task_of(from_scratch=scratch).build_model()
    resized = task_of(from_scratch=scratch, resize_embeddings=True).build_model()
    assert resized.get_input_embeddings().num_embeddings == len(TOKENIZER)
