"""Flash attention for samples of any lengths on CPUs: torch's has no CPU kernel, and is given a plain one."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from drawbar.models import segments as subject


def teach_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``attend`` take torch's ``varlen_attn`` on CPUs, in any dtype, for the rest of this test."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)
    monkeypatch.setattr(subject, "flash_takes", lambda dtype, head_size, device: True)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_of_keys: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, scale, window = rest[:5]
    samples = _samples(starts, starts_of_keys)
    attended = [_weights(query[q], key[k], scale, window) @ _heads_first(value[k], query) for q, k in samples]
    lse = torch.zeros(query.shape[1], len(query))
    return torch.cat([one.transpose(0, 1) for one in attended]).to(query.dtype), lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """By hand: below autograd there is none."""
    starts, starts_of_keys, _, _, _, _, scale, window = rest[:8]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    gradients: list[list[Tensor]] = [[], [], []]
    for q, k in _samples(starts, starts_of_keys):
        weights = _weights(query[q], key[k], scale, window)
        outer, values = _heads_first(gradient[q], query), _heads_first(value[k], query)
        of_weights = outer @ values.transpose(1, 2)
        scores = scale * weights * (of_weights - (of_weights * weights).sum(dim=2, keepdim=True))
        of_keys, of_values = (one.transpose(1, 2) for one in (scores, weights))
        for found, one in zip(
            gradients,
            (
                scores @ _heads_first(key[k], query),
                (of_keys @ _heads_first(query[q], query)).unflatten(0, (-1, groups)).sum(dim=1),
                (of_values @ outer).unflatten(0, (-1, groups)).sum(dim=1),
            ),
            strict=True,
        ):
            found.append(one.transpose(0, 1))
    return tuple(torch.cat(found).to(query.dtype) for found in gradients)


def _samples(starts: Tensor, starts_of_keys: Tensor) -> list[tuple[slice, slice]]:
    """Which tokens are the queries, and which the keys, of each sample."""
    assert starts.dtype == starts_of_keys.dtype == torch.int32
    sides = [[slice(*pair) for pair in pairwise(one.tolist())] for one in (starts, starts_of_keys)]
    return list(zip(*sides, strict=True))


def _heads_first(x_THD: Tensor, query_THD: Tensor) -> Tensor:
    """In fp32, with as many heads as the query."""
    return x_THD.float().transpose(0, 1).repeat_interleave(query_THD.shape[1] // x_THD.shape[1], dim=0)


def _weights(query_THD: Tensor, key_THD: Tensor, scale: float | None, window: list[int] | None) -> Tensor:
    """What each query takes of each key; shape (H, queries, keys)."""
    assert query_THD.dtype == key_THD.dtype
    scores = _heads_first(query_THD, query_THD) @ _heads_first(key_THD, query_THD).transpose(1, 2)
    left, right = window or (-1, -1)
    distance = torch.arange(len(query_THD))[:, None] - torch.arange(len(key_THD))
    allowed = ((left < 0) | (distance <= left)) & ((right < 0) | (-distance <= right))
    scale = query_THD.shape[2] ** -0.5 if scale is None else scale
    return (scale * scores).masked_fill(~allowed, -torch.inf).softmax(dim=2)
