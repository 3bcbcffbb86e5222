"""The operations that count for the MFU are those that torch counts."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, T5Config

from drawbar.config.schema.run_config import LoraSection
from drawbar.models.lora import add_adapters
from drawbar.models.model_flops import peak_flops, training_flops_per_token

SHAPE = {"vocab_size": 60, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = LlamaConfig(**SHAPE, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)
GPT2 = GPT2Config(**SHAPE, n_embd=16, n_layer=3, n_head=4, n_positions=32)


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_they_are_what_torch_counts(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens_BL = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens_BL).logits.sum().backward()
    angles = sum(counter.flop_counts["LlamaForCausalLM.model.rotary_emb"].values())  # a product in older transformers
    assert training_flops_per_token(model, attended=24) == (counter.get_total_flops() - angles) / tokens_BL.numel()


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    whole = training_flops_per_token(model, 0)
    base = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    add_adapters(model, LoraSection(rank=2))
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert (whole, training_flops_per_token(model, 0)) == (6 * base, 4 * base + 6 * adapters)


def test_models_that_the_formula_does_not_count() -> None:
    mixtral = MixtralConfig(**SHAPE, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    with torch.device("meta"):
        assert training_flops_per_token(AutoModelForCausalLM.from_config(mixtral), 0) is None
    assert training_flops_per_token(torch.nn.Linear(3, 3), 0) is None
    assert T5Config().is_encoder_decoder


def test_peaks_are_those_of_the_device() -> None:
    named = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A10G": 70, "NVIDIA A100-SXM4-80GB": 312}
    named |= {"NVIDIA L4": 121, "NVIDIA L40S": 362, "NVIDIA GH200 480GB": 989, "Tesla T4": 65}
    assert {name: peak_flops(name) for name in named} == {name: 1e12 * peak for name, peak in named.items()}
    assert [peak_flops(name) for name in ("cpu", "NVIDIA RTX A4000", "NVIDIA T400 4GB")] == [None] * 3
