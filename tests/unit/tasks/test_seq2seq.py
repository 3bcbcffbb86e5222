"""seq2seq: targets as the models themselves shift them, and predictions written by the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bart.modeling_bart import shift_tokens_right

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import GenerationSection, Seq2SeqConfig
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.tokenizer import train_byte_bpe, wrap_texts
from drawbar.errors import UserError
from drawbar.tasks.seq2seq import Seq2Seq
from drawbar.tasks.task_context import TaskContext
from runs import fit_in

TOKENIZER = wrap_texts(train_byte_bpe(["the load and the engine"] * 9, 270), "end")
END = TOKENIZER.eos_token_id
FIELDS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    "bart": {
        "d_model": 16,
        **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
        **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
        **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
}
FAMILIES = pytest.mark.parametrize("family", ["t5", "bart"])
PAIRS = [
    ("one road", "eine Straße"),
    ("two roads", "zwei Straßen"),
    ("the load is heavy today", "die Last ist heute schwer"),
    ("a village lies behind the hill", "ein Dorf liegt hinter dem Berg"),
]
CONFIG = """\
run: {name: tiny}
task:
  type: seq2seq
  tokenizer: {train: byte_bpe, vocab_size: 300}
  generation: {max_new_tokens: 24}
data: {train: pairs.jsonl, validation: pairs.jsonl, sequence_length: 48}
train: {global_batch: 8, steps: 120}
optim: {lr: 1.0e-2, warmup: 5}
eval: {metric: bleu, mode: max}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""


def task_of(family: str = "t5", sequence_length: int = 48, **options: Any) -> Seq2Seq:
    config = Seq2SeqConfig(model=family, from_scratch=FIELDS[family], **options)
    return Seq2Seq(TaskContext(RunConfig(task=config, data=DataSection(sequence_length=sequence_length)), TOKENIZER))


def encoded(task: Seq2Seq) -> EncodedDataset:
    records = [{"source": source, "target": target} for source, target in PAIRS]
    return encode_records(records, lambda record: task.encode(record, True), describe=str)


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@FAMILIES
def test_the_decoder_reads_the_labels_as_the_model_shifts_them(family: str) -> None:
    task = task_of(family)
    samples = encoded(task)
    batch = task.collate([samples[number] for number in range(4)])
    for number, (source, target) in enumerate(PAIRS):
        assert samples[number]["labels"].tolist() == [*tokens_of(target), END]
        assert samples[number]["input_ids"].tolist() == [*tokens_of(source), END]
    torch.manual_seed(0)
    model = task.build_model().eval()
    if family == "t5":
        shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    else:
        shifted = shift_tokens_right(batch["labels"], task.pad_token_id, model.config.decoder_start_token_id)
    real = batch["labels"] != -100
    assert torch.equal(batch["decoder_input_ids"][real], shifted[real])
    # so the model's own mean loss is our sum over the weight
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    ours = task.loss(task.forward(model, batch), batch) / task.num_targets(batch)
    assert task.num_targets(batch) == real.sum()
    assert ours.item() == pytest.approx(own.item(), rel=1e-5)


def test_columns_inside_a_column() -> None:
    """As the Hub's data for translation have them."""
    task = task_of(source_column="translation.en", target_column="translation.de")
    record = {"translation": {"en": "one", "de": "eins"}}
    assert task.encode(record, True) == task_of().encode({"source": "one", "target": "eins"}, True)
    assert task.references([record]) == ["eins"]
    flat = {"translation.en": "two", "translation.de": "zwei", **record}  # a column of that very name comes first
    assert task.texts(flat) == ["two", "zwei"]
    with pytest.raises(UserError, match=r"no 'translation.en'; it has 'translation', 'translation.fr'"):
        task.encode({"translation": {"fr": "un"}}, True)


def test_the_prefix_stands_before_every_source() -> None:
    sample = task_of(source_prefix="translate: ").encode({"source": "a", "target": "b"}, True)
    assert TOKENIZER.decode(sample["input_ids"], skip_special_tokens=True) == "translate: a"
    assert task_of(source_prefix="translate: ").texts({"source": "a", "target": "b"}) == ["translate: a", "b"]


@given(
    source=st.text(max_size=30), target=st.text(max_size=30), lengths=st.tuples(st.integers(2, 20), st.integers(2, 20))
)
def test_what_is_too_long_is_cut_before_its_end_token(source: str, target: str, lengths: tuple[int, int]) -> None:
    task = task_of(sequence_length=lengths[0], target_length=lengths[1])
    sample = task.encode({"source": source, "target": target}, True)
    whole = ([*tokens_of(source), END], [*tokens_of(target), END])
    for found, tokens, limit in zip((sample["input_ids"], sample["labels"]), whole, lengths, strict=True):
        assert list(found) == (tokens if len(tokens) <= limit else [*tokens[: limit - 1], END])
    cut = any(len(tokens) > limit for tokens, limit in zip(whole, lengths, strict=True))
    assert sample.get("truncated", False) is cut
    assert len(sample["decoder_input_ids"]) == len(sample["labels"])


def test_a_target_is_as_long_as_a_source_by_default() -> None:
    sample = task_of(sequence_length=6).encode({"source": "a", "target": "xyzxyzxyz"}, True)
    assert len(sample["labels"]) == 6


@pytest.mark.parametrize(
    ("record", "message"),
    [({"source": "a"}, "no 'target'"), ({"target": "a"}, "no 'source'"), ({"source": 3, "target": "a"}, "is int")],
)
def test_a_bad_record_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of().encode(record, True)


def test_a_source_alone_can_be_predicted_for() -> None:
    task = task_of()
    task.has_labels = False
    assert task.encode({"source": "a"}, False) == {"input_ids": [*tokens_of("a"), END]}


def test_without_generation_only_the_loss_is_scored() -> None:
    task = task_of(generation=None)
    assert not task.predicts
    assert task.score([{"target": "a"}]) == {}
    assert task.loss_scores(2.0, 4.0, [])["loss"] == 0.5
    assert list(task_of().metrics) == ["bleu"]


def test_a_model_that_does_not_say_how_to_begin_is_refused(tmp_path: Path) -> None:
    model = task_of("bart").build_model()
    model.config.decoder_start_token_id = None
    model.config.save_pretrained(tmp_path)
    task = Seq2Seq(TaskContext(RunConfig(task=Seq2SeqConfig(model=str(tmp_path))), TOKENIZER))
    with pytest.raises(UserError, match=r"no decoder_start_token_id[\s\S]*config.json"):
        task.encode({"source": "a", "target": "b"}, True)


@FAMILIES
@pytest.mark.parametrize("beams", [1, 3])
def test_predictions_are_those_of_each_source_alone(family: str, beams: int) -> None:
    torch.manual_seed(0)
    task = task_of(family, generation=GenerationSection(max_new_tokens=12, beams=beams))
    samples = encoded(task)
    model = task.build_model().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.7)  # what is written must depend on the source
    together = task.predict(model, task.collate([samples[number] for number in range(4)]))
    alone = []
    for number in range(4):
        tokens = torch.as_tensor(samples[number]["input_ids"])[None].long()
        written = model.generate(input_ids=tokens, num_beams=beams, do_sample=False, max_new_tokens=12)
        alone.append(TOKENIZER.decode(written[0], skip_special_tokens=True).strip())
    assert together == alone
    assert len(set(alone)) > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_run_learns_its_pairs_by_heart(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    lines = [json.dumps({"source": source, "target": target}) for source, target in PAIRS * 2]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    fields = FIELDS[family] | {"d_model": 32, ("d_ff" if family == "t5" else "decoder_ffn_dim"): 64}
    fit_in(tmp_path, f"task.model={family}", f"task.from_scratch={json.dumps(fields)}")
    results = tmp_path / "runs" / "tiny" / "eval" / "validation"
    assert json.loads((results / "scores.json").read_text())["bleu"] > 50
    found = [json.loads(line) for line in (results / "predictions.jsonl").read_text().splitlines()]
    assert sum(record["prediction"] == record["target"] for record in found) > 4


def test_a_metric_of_texts_that_nobody_writes_is_refused() -> None:
    with pytest.raises(UserError, match="bleu would never be computed") as caught:
        task_of(generation=None, metrics=["loss", "bleu"])
    assert caught.value.where == "task.metrics"
    assert "task.generation={max_new_tokens: 128}" in str(caught.value.remedy)
    assert list(task_of(generation=None).metrics) == ["bleu"]  # its usual ones, which nobody asked for
    assert not task_of(generation=None, metrics=["perplexity"]).metrics


def test_a_run_with_such_a_metric_can_go_on() -> None:
    config = Seq2SeqConfig(model="t5", from_scratch=FIELDS["t5"], generation=None, metrics=["bleu"])
    assert Seq2Seq(TaskContext(RunConfig(task=config), TOKENIZER, has_checkpoint=True)).predicts is False
