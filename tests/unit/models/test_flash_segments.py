"""Attention within samples by torch's flash attention, with a kernel for CPUs: its numbers are those of the groups, and
compiled blocks need not be compiled anew. That training on CUDA takes it, ``test_step_operators`` shows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models import segments as subject
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.packed import allow_packing
from drawbar.models.segments import VARLEN_GROUPS_HEADS, attend, find_segments, flash_takes
from drawbar.parallel.apply import checkpoint_activations
from drawbar.parallel.compile import compile_blocks
from flash_on_cpu import teach_cpu
from step_operators import StepOperators

SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {"llama": SIZES, "mistral": {**SIZES, "sliding_window": 7}}


def numbered(lengths: list[int]) -> Tensor:
    """``segment_ids`` of one row that holds samples of these lengths."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def packed_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_from_scratch(family, FAMILIES[family], train_byte_bpe([], 257), "causal_lm").train()
    allow_packing(model, per_sample=False)
    return model


class Attention(nn.Module):
    is_causal = True
    num_key_value_groups = 2


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("repeats_heads", [False, True])
def test_numbers_are_those_of_the_groups(
    repeats_heads: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients of fewer heads of keys than of queries, whatever this torch's ``varlen_attn`` takes."""
    if repeats_heads:
        monkeypatch.setattr(subject, "VARLEN_GROUPS_HEADS", False)
    torch.manual_seed(0)
    ids = numbered([40, 25, 3, 41, 9, 1])
    (segments,) = find_segments(ids)
    inputs = [torch.randn(1, heads, ids.shape[1], 8, requires_grad=True) for heads in (4, 2, 2)]
    options: dict[str, Any] = {"segments": segments, "sliding_window": window, "scaling": 0.5}
    wanted, _ = attend(Attention(), *inputs, None, **options)
    teach_cpu(monkeypatch)
    with StepOperators() as operators:
        found, _ = attend(Attention(), *inputs, None, **options)
    assert "torch_attn::_varlen_attn" in operators.attention
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def train(model: nn.Module) -> list[float]:
    """Losses of steps whose rows have other samples, of other lengths, each time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step, lengths in enumerate([[9, 4, 11], [20, 3], [5, 5, 5, 5, 4], [30, 7, 2], [8], [6, 40, 3, 3]]):
        ids = numbered(lengths)
        tokens = torch.randint(257, ids.shape, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, segment_ids=ids).logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [64, 512])
def test_compiled_code_knows_whether_flash_attention_takes_a_head(size: int) -> None:
    def seen(x: Tensor) -> Tensor:
        return x + 1 if flash_takes(torch.bfloat16, size, torch.device("cuda")) else x

    compiled = torch.compile(seen, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())).item() == (size == 64)


RECOMPILES = pytest.mark.skipif(
    not VARLEN_GROUPS_HEADS,
    reason="under activation checkpointing, torch 2.11 compiles anew for other groups of samples, though none is used",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "kept"), [("llama", "none"), pytest.param("mistral", "selective", marks=RECOMPILES)]
)
def test_compiled_blocks_attend_by_flash_and_are_compiled_twice(
    family: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first batch, then for any: neither the samples' number nor the longest of them matters."""
    teach_cpu(monkeypatch)
    plain, model = packed_model(family), packed_model(family)
    checkpoint_activations(model, kept)
    compile_blocks(model)
    counters.clear()
    assert train(model) == pytest.approx(train(plain), rel=2e-2)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
