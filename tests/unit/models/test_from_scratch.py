"""Models from random weights: any field of the architecture's own config, and no other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.huggingface import build_from_scratch, fit_embeddings
from tiny import ARCHITECTURES

TOKENIZER = train_byte_bpe([], 257)
LLAMA = ARCHITECTURES["llama"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fields_are_the_architectures_own(family: str) -> None:
    model = build_from_scratch(family, ARCHITECTURES[family], TOKENIZER)
    assert model.config.model_type == family
    for name, value in ARCHITECTURES[family].items():
        assert getattr(model.config, name) == value
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_vocabulary_and_special_tokens_are_the_tokenizers() -> None:
    model = build_from_scratch("llama", LLAMA, TOKENIZER)
    config = model.config
    assert config.vocab_size == len(TOKENIZER)
    assert config.bos_token_id == config.eos_token_id == TOKENIZER.pad_token_id == TOKENIZER.eos_token_id
    assert config.pad_token_id is None
    assert all(row.any() for row in model.get_input_embeddings().weight)  # that of a pad token would stay zero


def test_a_vocabulary_that_is_given_wins() -> None:
    model = build_from_scratch("llama", {**LLAMA, "vocab_size": 320}, TOKENIZER)
    assert model.get_input_embeddings().num_embeddings == 320


def test_an_embedding_that_is_not_torchs() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build_from_scratch("ibert", sizes, TOKENIZER, "sequence_classification")
    fit_embeddings(model, TOKENIZER, resize=False)
    with pytest.raises(UserError, match="embeddings for 257"):
        fit_embeddings(model, train_byte_bpe(["aa aa aa"] * 9, 259), resize=False)


def test_weights_follow_the_seed() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = build_from_scratch("llama", LLAMA, TOKENIZER)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_folder_gives_the_architecture_and_none_of_its_weights(tmp_path: Path) -> None:
    saved = build_from_scratch("llama", LLAMA, TOKENIZER)
    saved.save_pretrained(str(tmp_path))
    model = build_from_scratch(str(tmp_path), {"num_hidden_layers": 1}, TOKENIZER)
    assert model.config.hidden_size == LLAMA["hidden_size"]
    assert model.config.num_hidden_layers == 1
    assert not torch.equal(model.lm_head.weight, saved.lm_head.weight)


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"llama has no field 'hidden_sise'; did you mean 'hidden_size'\?") as caught:
        build_from_scratch("llama", {"hidden_sise": 32}, TOKENIZER)
    assert caught.value.where == "task.from_scratch.hidden_sise"


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 30},  # four heads
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"hidden_act": "no such function"},
        {"hidden_size": "wide"},
    ],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"llama model cannot be built[\s\S]*task.from_scratch"):
        build_from_scratch("llama", {**LLAMA, **fields}, TOKENIZER)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match="t5 is no causal language model"):
        build_from_scratch("t5", {}, TOKENIZER)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"neither a folder[\s\S]*task.model"):
        build_from_scratch("./nowhere/at/all", {}, TOKENIZER)
