"""Segments of packed rows: each token has a slot, groups are of similar lengths, and no mask is as large as a row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from drawbar.models import segments as subject
from drawbar.models.segments import Segments, attend, find_segments, segments_of, send_segments

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=4)


def numbered(lengths: list[list[int]]) -> Tensor:
    """``segment_ids`` of rows that hold samples of these lengths."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def samples_of(segments: Segments) -> list[list[int]]:
    """The tokens of each sample of the groups, read from its slots."""
    found, used = [], 0
    for group in segments.groups:
        tokens = segments.token_of_slot[used : used + group.count * group.length].view(group.count, group.length)
        real = torch.ones_like(tokens, dtype=torch.bool) if group.real is None else group.real
        found += [row[kept].tolist() for row, kept in zip(tokens, real, strict=True)]
        used += tokens.numel()
    return found


@given(lengths=LENGTHS)
def test_every_token_has_its_slot_among_those_of_its_sample(lengths: list[list[int]]) -> None:
    ids = numbered(lengths)
    (segments,) = find_segments(ids)
    flat = ids.flatten() + 100 * torch.arange(len(lengths)).repeat_interleave(ids.shape[1])
    wanted = sorted(torch.nonzero(flat == number).flatten().tolist() for number in flat.unique())
    assert sorted(samples_of(segments)) == wanted
    assert segments.token_of_slot[segments.slot_of_token].tolist() == list(range(ids.numel()))
    sizes = [size for row in lengths for size in (*row, ids.shape[1] - sum(row))]
    assert segments.starts.diff().tolist() == sizes
    assert segments.longest == max(sizes)
    assert segments.firsts.tolist() == [int(torch.nonzero(flat == n)[0]) for n in flat.unique() if n % 100 != 99]


@given(lengths=LENGTHS)
def test_groups_hardly_hold_padding(lengths: list[list[int]]) -> None:
    (segments,) = find_segments(numbered(lengths))
    for group in segments.groups:
        shortest = group.length if group.real is None else int(group.real.sum(dim=1).min())
        assert group.length <= 16 or shortest >= 2 / 3 * group.length
    assert len(segments.groups) <= 2 + np.log(segments.longest / 16) / np.log(3 / 2) or segments.longest <= 16


def test_both_sides_of_a_translation_are_grouped_alike() -> None:
    source, target = numbered([[30, 4, 18], [2, 50]]), numbered([[3, 40, 19], [3, 5]])
    ours, theirs = (side.groups for side in find_segments(source, target))
    assert [group.count for group in ours] == [group.count for group in theirs]
    assert max(group.length for group in ours) == 50
    assert max(group.length for group in theirs) == 54  # the padding of its second row


def test_segments_that_were_sent_are_not_found_again() -> None:
    ids = numbered([[3, 2]])
    copy = ids.clone()
    send_segments(copy, ids)
    assert segments_of(copy) is segments_of(copy)
    assert segments_of(ids) is not segments_of(ids)


class Attention(nn.Module):
    """What transformers' attention modules say of themselves."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_key_value_groups = 2


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [[[40, 25, 3, 41, 9, 1]], [[5, 5], [20, 3, 2], [1]], [[12, 12, 12]]])
def test_attention_within_samples_is_that_under_a_mask(
    lengths: list[list[int]], is_causal: bool, window: int | None
) -> None:
    """Outputs and gradients, of fewer heads of keys than of queries."""
    torch.manual_seed(0)
    ids = numbered(lengths)
    rows, length = ids.shape
    shapes = [(rows, heads, length, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    (segments,) = find_segments(ids)
    found, _ = attend(Attention(is_causal), *inputs, None, segments=segments, sliding_window=window, scaling=0.5)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & ((distance >= 0) | (not is_causal))
    allowed = allowed & (distance.abs() < (window or length))
    query, key, value = (tensor if tensor.shape[1] == 4 else tensor.repeat_interleave(2, dim=1) for tensor in inputs)
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_mask_is_as_large_as_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    sdpa = subject.sdpa_attention_forward

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
        masks.append(mask)
        return sdpa(module, query, key, value, mask, **rest)

    monkeypatch.setattr(subject, "sdpa_attention_forward", note)
    lengths = [[30] * 10 + [20, 12, 3] * 5]
    (segments,) = find_segments(numbered(lengths))
    inputs = [torch.randn(1, heads, sum(lengths[0]), 8) for heads in (4, 2, 2)]
    attend(Attention(is_causal=False), *inputs, None, segments=segments)
    assert len(masks) == len(segments.groups) > 1
    assert all(mask is None or mask.shape[1:3] == (1, 1) for mask in masks)
    masks.clear()
    attend(Attention(is_causal=True), *inputs, None, segments=segments)
    assert masks == [None] * len(segments.groups)


def test_attention_is_dropped_in_training() -> None:
    torch.manual_seed(0)
    (segments,) = find_segments(numbered([[6, 9, 30]]))
    inputs = [torch.ones(1, heads, 45, 8) for heads in (4, 2, 2)]
    dropped, _ = attend(Attention(is_causal=False), *inputs, None, segments=segments, dropout=0.5)
    assert dropped.std() > 0
    assert dropped.mean() == pytest.approx(1, abs=0.1)


def test_an_attention_that_is_not_given_the_segments_is_noticed() -> None:
    ids = numbered([[2, 3]])
    with pytest.raises(RuntimeError, match="Attention no segments"):
        attend(Attention(is_causal=True), *(torch.ones(1, 2, 5, 8) for _ in range(3)), ids[:, None, None])
