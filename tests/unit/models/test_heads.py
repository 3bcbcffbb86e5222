"""Every head: from scratch with a tokenizer of one special token, and on top of pretrained weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.heads import HEADS, Head, longest_input
from drawbar.models.huggingface import build_from_scratch, load_model_config, load_pretrained
from tiny import ARCHITECTURES

torch.set_num_threads(1)  # tiny tensors

TOKENIZER = train_byte_bpe([], 257)
END = TOKENIZER.eos_token_id
BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FIELDS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "bert": BERT,
    "bert-generation": BERT,
    "roberta": BERT,
    "electra": {**BERT, "embedding_size": 8},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 16,
        **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
        **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
        **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    },
}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
ENCODERS = ["bert", "roberta", "electra", "distilbert"]
CASES: list[tuple[str, Head]] = [
    ("llama", "causal_lm"),
    ("gpt2", "causal_lm"),
    *((family, "masked_lm") for family in ENCODERS),
    ("t5", "seq2seq"),
    ("bart", "seq2seq"),
    *((family, "sequence_classification") for family in [*ENCODERS, "llama", "gpt2", "bart"]),
    *((family, "token_classification") for family in [*ENCODERS, "llama", "gpt2"]),
]


def build(family: str, head: Head, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_from_scratch(family, FIELDS[family], TOKENIZER, head, **fields).eval()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="drawbar")
    return caplog


def said(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == level]


@pytest.mark.parametrize(("family", "head"), CASES)
def test_every_head_runs_from_scratch(family: str, head: Head) -> None:
    labels = {"num_labels": 5} if head.endswith("classification") else {}
    model = build(family, head, **labels)
    tokens = torch.randint(1, 257, (2, 7), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = END  # BART classifies by it
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if head == "seq2seq":
        batch["decoder_input_ids"] = tokens[:, :3]
    shape = model(**batch).logits.shape
    expected = {"sequence_classification": (2, 5), "token_classification": (2, 7, 5), "seq2seq": (2, 3, 257)}
    assert shape == expected.get(head, (2, 7, 257))
    assert {(value.dtype, value.device.type) for value in model.parameters()} == {(torch.float32, "cpu")}


@pytest.mark.parametrize(("family", "head"), CASES)
def test_the_shared_special_token_is_learned(family: str, head: Head) -> None:
    """It begins, ends and pads; as a pad token alone its embedding would be zero, and stay so."""
    model = build(family, head)
    assert model.config.pad_token_id == (None if head == "causal_lm" else END)
    weight = model.get_input_embeddings().weight
    assert weight[END].any()
    tokens = torch.tensor([[5, END, 7, END, 9]])
    batch = {"input_ids": tokens, "decoder_input_ids": tokens} if head == "seq2seq" else {"input_ids": tokens}
    model(**batch).logits.square().sum().backward()
    assert weight.grad[END].any()


@pytest.mark.parametrize(("family", "start"), [("t5", "pad"), ("bart", "eos")])
def test_encoder_decoders_generate_from_their_start_token(family: str, start: str) -> None:
    tokenizer = with_special_tokens()
    model = build_from_scratch(family, FIELDS[family], tokenizer, "seq2seq").eval()
    expected = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}[start]
    assert model.config.decoder_start_token_id == expected
    assert load_model_config(family, FIELDS[family], tokenizer).decoder_start_token_id == expected
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        assert getattr(model.generation_config, name, None) is None
    tokens = model.generate(input_ids=torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=4, min_new_tokens=4)
    assert tokens.shape == (2, 5)
    assert (tokens[:, 0] == expected).all()


def test_a_shared_special_token_starts_the_decoder() -> None:
    for family in ("t5", "bart"):
        model = build(family, "seq2seq")
        assert model.config.decoder_start_token_id == END
        assert model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=3, num_beams=2).shape[1] <= 4


def with_special_tokens() -> PreTrainedTokenizerBase:
    tokenizer = train_byte_bpe([], 257)
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<s>"})
    return tokenizer


def test_a_pad_token_of_its_own_stays_zero() -> None:
    tokenizer = with_special_tokens()
    model = build_from_scratch("bert", BERT, tokenizer, "masked_lm")
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert not model.get_input_embeddings().weight[tokenizer.pad_token_id].any()


def test_fields_of_the_task() -> None:
    names = {0: "negative", 1: "neutral", 2: "positive"}
    numbers = {name: number for number, name in names.items()}
    model = build("bert", "sequence_classification", id2label=names, label2id=numbers, num_labels=3)
    assert model.config.id2label == names
    assert model.config.label2id == numbers
    assert model.num_labels == model.classifier.out_features == 3
    problem = build("bert", "sequence_classification", num_labels=4, problem_type="multi_label_classification")
    assert problem.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize(
    ("family", "head", "says"),
    [
        ("t5", "causal_lm", "t5 is no causal language model.*llama"),
        ("bert-generation", "causal_lm", "bert-generation is no causal language model"),
        ("bert", "causal_lm", "bert is no causal language model"),  # it would see the token that it is to predict
        ("llama", "masked_lm", "llama is no masked language model.*bert"),
        ("llama", "seq2seq", "llama is no encoder–decoder.*t5"),
        ("bart", "token_classification", "bart is no token classifier.*bert"),
    ],
)
@pytest.mark.parametrize("pretrained", [False, True])
def test_a_head_that_a_family_does_not_have(
    family: str, head: Head, says: str, pretrained: bool, tmp_path: Path
) -> None:
    load_model_config(family, FIELDS[family], TOKENIZER).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"(?s){says}") as caught:
        load_pretrained(str(tmp_path), head) if pretrained else build(family, head)
    assert caught.value.where == "task.model"


def test_bert_as_a_decoder_predicts_the_next_token() -> None:
    model = build_from_scratch("bert", {**BERT, "is_decoder": True}, TOKENIZER).eval()
    tokens = torch.tensor([[5, 6, 7]])
    other = torch.tensor([[5, 6, 8]])
    torch.testing.assert_close(model(input_ids=tokens).logits[:, :2], model(input_ids=other).logits[:, :2])


def test_positions_beyond_the_pad_token() -> None:
    """RoBERTa counts positions from the pad token's number: where that is large there is no room for them."""
    tokenizer = with_special_tokens()
    with pytest.raises(UserError, match="roberta model cannot be built"):
        build_from_scratch("roberta", BERT, tokenizer, "masked_lm")
    assert longest_input(build_from_scratch("bert", BERT, tokenizer, "masked_lm")) == 64
    assert longest_input(build("t5", "seq2seq")) is None
    xlnet = build_from_scratch("xlnet", XLNET, TOKENIZER, "sequence_classification")
    assert xlnet.config.max_position_embeddings == -1
    assert longest_input(xlnet) is None


def test_a_model_that_sees_ahead_is_no_language_model() -> None:
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 8, "use_bidirectional_attention": True}  # fmt: skip
    for family, own in (("gemma3_text", fields), ("xlnet", XLNET)):
        with pytest.raises(UserError, match=f"{family} is no"):
            build_from_scratch(family, own, TOKENIZER, "causal_lm")
    model = build("roberta", "masked_lm")
    longest = longest_input(model)
    assert longest == 64 - END - 1
    model(input_ids=torch.full((1, longest), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 7))


def saved(folder: Path, head: Head = "masked_lm", **fields: Any) -> nn.Module:
    model = build("bert", head, **fields)
    model.save_pretrained(str(folder))
    return model


def test_a_new_classifier_on_a_pretrained_body(
    tmp_path: Path, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    body = saved(tmp_path).bert
    model = load_pretrained(str(tmp_path), "sequence_classification", num_labels=3)
    tensors = model.bert.state_dict()
    for name, tensor in body.state_dict().items():
        assert torch.equal(tensor, tensors[name])
    assert model.classifier.out_features == 3
    assert said(log, logging.WARNING) == []
    (line,) = [text for text in said(log, logging.INFO) if text.startswith("new head")]
    assert "cls.predictions" not in capfd.readouterr().err  # transformers' own table of what it did not need
    assert line == "new head: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight"


def test_a_classifier_is_loaded_as_it_was(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path, "token_classification", num_labels=4)
    found = load_pretrained(str(tmp_path), "token_classification", num_labels=4)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert said(log, logging.WARNING) == said(log, logging.INFO) == []


def test_a_classifier_of_other_labels_is_replaced(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "sequence_classification", num_labels=4)
    names = {0: "no", 1: "yes", 2: "perhaps"}
    model = load_pretrained(str(tmp_path), "sequence_classification", num_labels=3, id2label=names)
    assert model.classifier.weight.shape == (3, 16)
    assert model.classifier.weight.isfinite().all()
    assert model.config.id2label == names
    assert said(log, logging.WARNING) == []
    assert [text.split(" in ")[0] for text in said(log, logging.INFO)] == [
        "new head: classifier.bias is [4]",
        "new head: classifier.weight is [4, 16]",
    ]


def test_a_body_that_lacks_weights_is_warned_of(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "layer.1." not in name}
    model.save_pretrained(str(tmp_path), state_dict=tensors)
    load_pretrained(str(tmp_path), "token_classification")
    (line,) = said(log, logging.WARNING)
    assert "bert.encoder.layer.1.attention.output.LayerNorm.bias" in line
    assert line.endswith("and 11 more: they start from random values")
    assert "classifier" not in line


def test_a_body_of_other_sizes_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, "sequence_classification")
    model.config.intermediate_size = 32
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"do not fit its config.json: bert.encoder.layer.0.inter\S+ is \[24\]"):
        load_pretrained(str(tmp_path), "sequence_classification", num_labels=7)


def test_a_language_model_without_its_head_is_warned_of(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "token_classification")
    load_pretrained(str(tmp_path), "masked_lm")
    (line,) = said(log, logging.WARNING)
    assert "cls.predictions" in line


@pytest.mark.parametrize("head", ["seq2seq", "sequence_classification"])
def test_pretrained_bart(head: Head, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = build("bart", "seq2seq")
    model.save_pretrained(str(tmp_path))
    found = load_pretrained(str(tmp_path), head)
    assert torch.equal(found.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert said(log, logging.WARNING) == []
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_pretrained(str(tmp_path), head)


def test_the_config_of_a_pretrained_model_is_left_as_it_is(tmp_path: Path) -> None:
    build("t5", "seq2seq").config.save_pretrained(tmp_path)  # no weights
    config = load_model_config(str(tmp_path), None, with_special_tokens())
    assert (config.vocab_size, config.decoder_start_token_id, config.d_model) == (257, END, 16)


def test_a_decoder_classifier_gets_its_pad_token(tmp_path: Path) -> None:
    build("gpt2", "causal_lm").save_pretrained(str(tmp_path))
    model = load_pretrained(str(tmp_path), "sequence_classification", num_labels=3, pad_token_id=END)
    assert model.config.pad_token_id == END
    assert model(input_ids=torch.tensor([[5, 6], [7, END]])).logits.shape == (2, 3)


def test_families_named_in_errors_have_the_head() -> None:
    for kind in HEADS.values():
        assert set(kind.such_as.replace(" or ", ", ").split(", ")) <= kind.families
