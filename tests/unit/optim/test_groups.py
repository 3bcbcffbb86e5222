"""Which parameters decay: transformers' own rule is the reference, on architectures that differ in style."""

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

from drawbar.errors import UserError
from drawbar.optim.optimizers import parameter_groups

# The list in transformers 5's Trainer.get_decay_parameter_names
FORBIDDEN = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


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
