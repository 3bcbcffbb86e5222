"""Groups of parameters. Which decay: transformers' own rule is the reference, on architectures that differ in style.
Layer-wise learning rates: BEiT's own depths are."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.trainer_pt_utils import get_parameter_names

from drawbar.config.schema.run_config import OptimSection, ParameterGroup
from drawbar.errors import UserError
from drawbar.optim.groups import freeze, grouped, parameter_settings

# The list in transformers 5's Trainer.get_decay_parameter_names
FORBIDDEN = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(model: nn.Module, decay: float, **settings: Any) -> list[dict[str, Any]]:
    return grouped(model, parameter_settings(model, OptimSection(weight_decay=decay, **settings)))


def tiny_model(name: str) -> PreTrainedModel:
    match name:
        case "llama":
            config = LlamaConfig(
                vocab_size=16,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                attention_bias=True,
                tie_word_embeddings=True,
            )
            return AutoModelForCausalLM.from_config(config)
        case "gpt2":
            return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
        case "bert":
            return BertForSequenceClassification(
                BertConfig(
                    vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
                )
            )
        case _:
            config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
            return AutoModelForSeq2SeqLM.from_config(config)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_decays_what_transformers_decays(name: str) -> None:
    model = tiny_model(name)
    decayed, kept = parameter_groups(model, 0.1)
    # named_parameters() gives a tied parameter one name; transformers' list has both
    reference = set(get_parameter_names(model, [nn.LayerNorm], FORBIDDEN))
    named = dict(model.named_parameters())
    assert set(decayed["param_names"]) == reference & set(named)
    assert set(kept["param_names"]) == set(named) - reference
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


class Odd(nn.Module):
    """What shape and name alone would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix_norm = nn.LayerNorm((3, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.channels = nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4))


def test_norms_of_any_shape_frozen_and_tied_parameters() -> None:
    model = Odd()
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["param_names"] == ["inner.weight", "channels.0.weight"]
    assert kept["param_names"] == [
        "scale",
        "matrix_norm.weight",
        "matrix_norm.bias",
        "inner.bias",
        "outer.bias",
        "channels.0.bias",
        "channels.1.weight",
        "channels.1.bias",
    ]
    named = dict(model.named_parameters())
    for group in (decayed, kept):
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


def test_no_empty_group() -> None:
    assert [g["param_names"] for g in parameter_groups(nn.Linear(2, 2, bias=False), 0.1)] == [["weight"]]
    assert [g["param_names"] for g in parameter_groups(nn.LayerNorm(2), 0.1)] == [["weight", "bias"]]


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_train_is_a_user_error(model: nn.Module) -> None:
    with pytest.raises(UserError, match="nothing to train"):
        parameter_groups(model, 0.1)


def test_optimizers_keep_the_names() -> None:
    optimizer = torch.optim.AdamW(parameter_groups(nn.Linear(2, 2), 0.1))
    assert [group["param_names"] for group in optimizer.state_dict()["param_groups"]] == [["weight"], ["bias"]]


def test_the_first_group_that_matches_holds() -> None:
    groups = [ParameterGroup(match=r"layers\.0\..*proj", lr=0.5), ParameterGroup(match="layers", weight_decay=0.0)]
    model = tiny_model("llama")
    found = parameter_settings(model, OptimSection(lr=0.1, weight_decay=0.2, groups=groups))
    assert found["model.layers.0.self_attn.q_proj.weight"] == (5.0, 0.2)
    assert found["model.layers.0.self_attn.q_proj.bias"] == (5.0, 0.0)
    assert found["model.layers.0.input_layernorm.weight"] == (1.0, 0.0)
    assert found["model.embed_tokens.weight"] == (1.0, 0.2)


def test_frozen_groups() -> None:
    model = tiny_model("llama")
    freeze(model, OptimSection(groups=[ParameterGroup(match="norm"), ParameterGroup(match=".", frozen=True)]))
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }


@pytest.mark.parametrize(
    ("matches", "message"),
    [(["layer.0"], "no trained parameter's name matches"), (["layers", "self_attn"], "'layers', which comes first")],
)
def test_a_group_without_parameters_is_a_user_error(matches: list[str], message: str) -> None:
    groups = [ParameterGroup(match=match, lr=1.0) for match in matches]
    with pytest.raises(UserError, match=message) as caught:
        freeze(tiny_model("llama"), OptimSection(groups=groups))
    assert caught.value.where == f"optim.groups[{len(matches) - 1}].match"


def depth_in_beit(name: str, blocks: int) -> int:
    """``get_num_layer_for_vit`` of microsoft/unilm, with the names of a transformers decoder."""
    if "embed" in name:
        return 0
    return int(name.split(".")[2]) + 1 if "layers" in name else blocks + 1


def test_layer_wise_learning_rates_are_those_of_beit() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(config)
    found = parameter_settings(model, OptimSection(layer_lr_decay=0.5))
    assert {name: settings.lr_scale for name, settings in found.items()} == {
        name: 0.5 ** (4 - depth_in_beit(name, 3)) for name in found
    }
    groups = grouped(model, found)
    assert [(group["lr_scale"], group["weight_decay"]) for group in groups][:2] == [(1.0, 0.01), (1.0, 0.0)]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_layer_wise_learning_rates_of_an_encoder_and_a_decoder() -> None:
    found = parameter_settings(tiny_model("t5"), OptimSection(layer_lr_decay=0.5))
    assert found["shared.weight"].lr_scale == 0.125
    assert found["encoder.block.0.layer.0.SelfAttention.q.weight"].lr_scale == 0.25
    assert found["encoder.final_layer_norm.weight"].lr_scale == 0.25
    assert found["decoder.block.0.layer.0.SelfAttention.q.weight"].lr_scale == 0.5
    assert found["decoder.final_layer_norm.weight"].lr_scale == 1.0


def test_layer_wise_learning_rates_need_blocks() -> None:
    with pytest.raises(UserError, match="no repeated blocks"):
        parameter_settings(nn.Linear(2, 2), OptimSection(layer_lr_decay=0.9))
