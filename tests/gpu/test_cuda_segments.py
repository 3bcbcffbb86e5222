"""Attention within segments on a CUDA device: flash attention for samples of any lengths, groups, and no waiting."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models import segments as subject
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.packed import allow_packing
from drawbar.models.segments import attend, find_segments, use_known_padding
from drawbar.tasks.batch import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [300, 5, 70, 33, 1]
IDS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]


class Attention(nn.Module):
    num_key_value_groups = 2

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def dense(inputs: list[Tensor], is_causal: bool, window: int | None) -> Tensor:
    """In fp32, under a mask of the row's length squared."""
    total = IDS.shape[1]
    distance = torch.arange(total)[:, None] - torch.arange(total)
    allowed = (IDS[0, :, None] == IDS[0]) & ((distance >= 0) | (not is_causal)) & (distance.abs() < (window or total))
    query, key, value = (tensor.float() for tensor in inputs)
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed.cuda()).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_under_a_mask(
    dtype: torch.dtype, is_causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    by_varlen = []
    varlen = subject.varlen_attn

    def note(*args: Tensor, **options: object) -> Tensor:
        by_varlen.append(options)
        return varlen(*args, **options)

    monkeypatch.setattr(subject, "varlen_attn", note)
    total = IDS.shape[1]
    inputs = [torch.randn(1, heads, total, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    segments = find_segments(IDS)[0].to(torch.device("cuda"))
    found, _ = attend(Attention(is_causal), *inputs, None, segments=segments, sliding_window=window)
    wanted = dense(inputs, is_causal, window)
    assert len(by_varlen) == (dtype != torch.float32)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert (found - wanted).norm() <= limit * wanted.norm()
    weights = torch.randn_like(wanted)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((wanted * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= limit * other.norm()


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("bert", 0.1)])
def test_the_host_does_not_wait_for_the_device(family: str, dropout: float) -> None:
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "bert":
        fields |= {"attention_probs_dropout_prob": dropout}
    head = "causal_lm" if family == "llama" else "sequence_classification"
    model = build_from_scratch(family, fields, train_byte_bpe([], 257), head).cuda().train()
    allow_packing(model, per_sample=head == "sequence_classification")
    batch = Batch({"input_ids": torch.ones_like(IDS), "segment_ids": IDS}, ids=list(range(len(LENGTHS))))

    def step() -> None:
        moved = batch.to(torch.device("cuda"))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(**moved.inputs).logits.float().square().sum().backward()

    never_waits(step)


def never_waits(step: Callable[[], None]) -> None:
    step()  # the first allocates, and finds its kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("real", [12, 20])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_host_does_not_wait_to_see_whether_there_is_padding(family: str, real: int) -> None:
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    head = "causal_lm" if family == "llama" else "masked_lm"
    model = build_from_scratch(family, fields, train_byte_bpe([], 257), head).cuda().train()
    use_known_padding(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, real:] = 0
    batch = Batch({"input_ids": torch.ones(3, 20, dtype=torch.long), "attention_mask": mask}, ids=[0, 1, 2])

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(**batch.to(torch.device("cuda")).inputs).logits.float().square().sum().backward()

    never_waits(step)
