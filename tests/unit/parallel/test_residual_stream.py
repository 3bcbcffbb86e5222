"""A residual stream in bf16: in every family, as near to fp32 as bf16 rounds, and only with precision=bf16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from drawbar.parallel.blocks import repeated_blocks
from drawbar.parallel.precision import keep_stream_in_bf16
from tiny import tiny_config, tiny_engine

SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (AutoModelForCausalLM, {"num_key_value_heads": 2}),
    "gemma2": (AutoModelForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt2": (AutoModelForCausalLM, {"bos_token_id": 0, "eos_token_id": 1}),
    "gpt_neox": (AutoModelForCausalLM, {}),
    "bert": (AutoModelForSequenceClassification, {}),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 4, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}


def build(family: str, in_bf16: bool) -> nn.Module:
    torch.manual_seed(0)
    auto, sizes = KINDS[family]
    model: nn.Module = auto.from_config(AutoConfig.for_model(family, **SIZES | sizes)).eval()  # without dropout
    if in_bf16:
        keep_stream_in_bf16(model)
    return model


def compute(model: nn.Module, autocast: bool) -> Tensor:
    """All gradients of a forward, one after another."""
    tokens = torch.randint(2, 99, (4, 24), generator=torch.Generator().manual_seed(1))
    is_classifier = "SequenceClassification" in type(model).__name__
    labels = torch.tensor([0, 1, 1, 0]) if is_classifier else tokens
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=labels).loss
    assert loss.dtype == torch.float32
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def stream_dtypes(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of what the blocks give, and of what their norms give, in a forward and backward under autocast."""
    of_blocks: list[Tensor] = []
    of_norms: list[Tensor] = []
    for _, block in repeated_blocks(model):
        block.register_forward_hook(
            lambda *call: of_blocks.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
        )
        for module in block.modules():
            if "Norm" in type(module).__name__:
                module.register_forward_hook(lambda *call: of_norms.append(call[-1]))
    compute(model, autocast=True)
    return {each.dtype for each in of_blocks}, {each.dtype for each in of_norms}


@pytest.mark.parametrize("family", KINDS)
def test_it_is_bf16_and_gradients_are_those_of_autocast_as_far_as_bf16_rounds(family: str) -> None:
    assert stream_dtypes(build(family, in_bf16=True)) == ({torch.bfloat16}, {torch.bfloat16})
    exact = compute(build(family, in_bf16=False), autocast=False)
    plain, stream = (compute(build(family, in_bf16), autocast=True) for in_bf16 in (False, True))
    assert 0 < (stream - exact).norm() < 3 * (plain - exact).norm()  # seen: 1.1 to 1.7
    assert (stream - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", None), ("fp32", None)])
def test_it_is_part_of_the_precision_bf16(precision: Any, dtype: torch.dtype | None) -> None:
    engine = tiny_engine(tiny_config("llama", precision=precision))
    assert stream_dtypes(engine.module) == ({dtype or torch.float32},) * 2


class TimeBlock(nn.Module):
    """A block of a model of one's own, whose first argument is no hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, times_B1: Tensor, hidden_BH: Tensor) -> Tensor:
        return hidden_BH + self.linear(self.norm(hidden_BH) + times_B1.sin())


def test_what_says_otherwise_is_left_alone() -> None:
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **SIZES, residual_in_fp32=True))
    own = nn.ModuleDict({"layers": nn.ModuleList([TimeBlock(), TimeBlock()])})
    for model in (mamba, own):
        assert repeated_blocks(model)
        keep_stream_in_bf16(model)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
