"""A text is that of its prompt alone, whatever shares its batch: limits, padding on the left, adapters, beams."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models.heads import longest_input, pads_on_the_left, sees_neighbours
from drawbar.models.huggingface import build_from_scratch
from drawbar.tasks.generation import continuations
from exhaustive import some
from tiny import ARCHITECTURES, LENGTH

TOKENIZER = train_byte_bpe([], 257)
POSITIONS = LENGTH
FIELDS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
    },
    "opt": {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "init_std": 0.3,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3},
    # these do not know where a prompt begins behind padding
    "bart": {
        "d_model": 16,
        "decoder_layers": 2,
        "decoder_ffn_dim": 24,
        "decoder_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "init_std": 0.3,
    },
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "context_length": POSITIONS},
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": POSITIONS // 2},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS // 2,
    },
    "longrope": {
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": POSITIONS // 2,
    },
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": POSITIONS // 2},
}
LENGTHS = [3, 12, POSITIONS - 4, 7]


def build(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = build_from_scratch(family, {**FIELDS[family], **fields}, TOKENIZER, "causal_lm")
    for parameter in model.parameters():  # biases and norms too: none may be neutral
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    model.generation_config.eos_token_id = None
    return model.eval()


def texts(model: Any, prompts: Sequence[list[int]], tokens: int, beams: int = 1, pad: int = 0) -> list[str]:
    section = GenerationSection(max_new_tokens=tokens, temperature=0, beams=beams)
    return continuations(model, TOKENIZER, prompts, pad, section)


def check_alone(model: nn.Module, tokens: int, beams: int = 1, longest: int = POSITIONS) -> None:
    chance = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 250, (length,), generator=chance).tolist() for length in LENGTHS if length <= longest]
    together = texts(model, prompts, tokens, beams)
    assert together == [text for prompt in prompts for text in texts(model, [prompt], tokens, beams)]
    assert len(set(together)) > 1  # the prompts matter


@pytest.mark.parametrize("tokens", [4, 20], ids=["all have room", "the longest has no room"])
@pytest.mark.parametrize("family", some(FIELDS, 8))
def test_texts_are_those_of_each_prompt_alone(family: str, tokens: int) -> None:
    check_alone(build(family), tokens)


def test_texts_of_beams_are_those_of_each_prompt_alone() -> None:
    check_alone(build("gpt2"), 20, beams=3)


def test_a_text_that_ends_at_its_last_position_has_nothing_behind_it() -> None:
    model = build("gpt2")
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    check_alone(model, 20)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("field", ["min_length", "repetition_penalty", "no_repeat_ngram_size"])
def test_what_looks_at_a_whole_row_does_not_see_padding(field: str) -> None:
    """The padding token is one that the first prompt's text would have."""
    model = build("llama")
    chance = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 250, (length,), generator=chance).tolist() for length in (3, 12, 7, 4, 9)]
    pad = int(model.generate(torch.tensor(prompts[:1]), max_new_tokens=1, do_sample=False)[0, -1])
    if field == "min_length":
        model.generation_config.eos_token_id = list(range(0, 250, 2))
    setattr(model.generation_config, field, {"min_length": 16, "no_repeat_ngram_size": 1}.get(field, 1.9))
    alone = [text for prompt in prompts for text in texts(model, [prompt], 8, pad=pad)]
    assert texts(model, prompts, 8, pad=pad) == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_embeddings_give_the_texts_of_each_prompt_alone(kind: str) -> None:
    model = build("llama", rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]})
    limit = longest_input(model)
    assert limit == (POSITIONS // 2 if kind == "dynamic" else POSITIONS)
    check_alone(model, 20, longest=limit)
    assert sees_neighbours(model, POSITIONS) == (kind == "longrope")
    assert not sees_neighbours(model, POSITIONS // 2)


def test_an_adapters_model_pads_as_its_base_does() -> None:
    from peft import LoraConfig, get_peft_model

    for family, pads in (("gpt2", True), ("bart", False)):
        model: Any = get_peft_model(build(family), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        assert pads_on_the_left(model, 4) == pads
        check_alone(model.eval(), 20)
