"""Segments: where the samples of packed rows lie, and attention within each of them.

No mask of a row's length squared is made. Samples of similar lengths are gathered into a small batch, padded to the
longest; torch's own attention takes each batch. On CUDA, torch's kernel for samples of any lengths is used if possible.

R: rows, L: tokens in a row, T: all R·L tokens, N: samples, S: slots (places) in all groups, H: heads, D: a head's
size; n: samples of a group, l: tokens of its longest.
The padding of a row counts as a separate sample, after the others; it has 0 tokens if there is no padding.

transformers looks at the values of a padding mask to choose how attention is masked, and on a GPU the host would wait
for them in each forward. Here it looks before the mask is copied. The masks themselves are those of transformers.
"""

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

MASKS = ("attention_mask", "decoder_attention_mask")
"""The keyword arguments of models that say where padding is."""


MASKED_BY_US = {"sdpa"}
"""The attention functions of transformers whose masks :func:`mask_by_known_padding` makes."""


@dataclass(frozen=True)
class _Known:
    has_padding: bool
    version: int
    """Of the mask: a mask that was changed in place since is checked again."""


_has_padding: ContextVar[bool | None] = ContextVar("do the masks of this forward have padding", default=None)
"""None if the host does not know."""


def send_padding(copy: Tensor, mask: Tensor) -> None:
    """Attach to ``copy``, a device's copy of ``mask``, whether a mask on the host has padding."""
    copy.known_padding = _Known(not bool(mask.all()), copy._version)


def use_known_padding(model: nn.Module) -> None:
    """Let a transformers model take from the host whether its batches have padding, where :func:`send_padding` said so;
    any other batch is checked as usual. Only for families whose layers all get the mask that the model is called with,
    as the tests compare: others may use their own mask."""
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if _has_plain_rows(module, kwargs):
        # of rows without a mask, transformers asks whether positions restart in them; of rows with one, it does not
        mask_BL = kwargs["input_ids"].new_ones(kwargs["input_ids"].shape)
        mask_BL.known_padding = _Known(False, mask_BL._version)
        kwargs = {**kwargs, "attention_mask": mask_BL}
    answers = {_answer(kwargs[name]) for name in MASKS if kwargs.get(name) is not None}
    _has_padding.set(answers.pop() if len(answers) == 1 else None)  # with two masks, an answer is for both or for none
    return args, kwargs


def _has_plain_rows(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether all tokens of all rows are computed, each row by itself, with nothing kept from an earlier call."""
    others = (*MASKS, "position_ids", "segment_ids", "past_key_values", "inputs_embeds")
    return (
        kwargs.get("input_ids") is not None
        and kwargs.get("use_cache") is False
        and all(kwargs.get(name) is None for name in others)
        and module.config._attn_implementation in MASKED_BY_US
    )


def _answer(mask: Tensor) -> bool | None:
    known: _Known | None = getattr(mask, "known_padding", None)
    return known.has_padding if known is not None and known.version == mask._version else None


def _leave(module: nn.Module, args: Any, outputs: Any) -> None:
    _has_padding.set(None)


def mask_by_known_padding(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """``sdpa_mask``, which asks for the values of a padding mask unless there is none, or no mask may be left out."""
    has_padding = _has_padding.get()
    if attention_mask is None or has_padding is None:
        return sdpa_mask(*args, attention_mask=attention_mask, **options)
    if not has_padding:
        return sdpa_mask(*args, attention_mask=None, **options)
    leaves_none_out = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, attention_mask=attention_mask, **{**options, **leaves_none_out})


AttentionMaskInterface.register("sdpa", mask_by_known_padding)


SEGMENTED = "drawbar_segments"
"""The name under which transformers knows :func:`attend`."""
LEAST_SHARE = 2 / 3
"""A sample joins a group if it has at least this share of the tokens of the group's longest."""
SHORT = 16
"""Samples of up to this many tokens share a group: a call costs more than their padding."""
VARLEN_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's ``varlen_attn`` takes fewer heads of keys than of queries. That of torch 2.11 does not."""
FLASH_HEAD_SIZE = 256
"""The largest that flash attention takes."""


@dataclass(frozen=True)
class SegmentGroup:
    """Samples of similar lengths, as a batch padded on the right."""

    count: int
    length: int
    real: Tensor | None
    """Shape (count, length), bool: False at padding; None if there is none."""


@dataclass(frozen=True)
class Segments:
    """Where the samples of packed rows lie. Sizes are numbers on the host, so that no device is waited for."""

    starts: Tensor
    """Shape (N + 1,), int32: the first token of each sample, and T."""
    longest: int
    """Tokens of the longest sample."""
    firsts: Tensor
    """Shape (samples without the rows' paddings,): where each of them begins."""
    groups: tuple[SegmentGroup, ...]
    token_of_slot: Tensor
    """Shape (S,): the index in T of the token in each slot of the groups, one group after another; at padding, any."""
    slot_of_token: Tensor
    """Shape (T,): the index in S of each token's slot."""

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""

        def moved(tensor: Tensor) -> Tensor:
            pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
            return pinned.to(device, non_blocking=True)

        groups = tuple(group if group.real is None else replace(group, real=moved(group.real)) for group in self.groups)
        tensors = {name: moved(getattr(self, name)) for name in ("starts", "firsts", "token_of_slot", "slot_of_token")}
        return replace(self, groups=groups, **tensors)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until this stream is done with it: see ``Tensor.record_stream``."""
        masks = [group.real for group in self.groups if group.real is not None]
        for tensor in (self.starts, self.firsts, self.token_of_slot, self.slot_of_token, *masks):
            tensor.record_stream(stream)


def find_segments(*sides: Tensor) -> tuple[Segments, ...]:
    """The segments of packed rows, on the host.

    Args:
        sides: ``segment_ids`` (R, L), and, of an encoder–decoder, ``decoder_segment_ids``. The groups of both hold the
            same samples.
    """
    numbers = [side.cpu().numpy() for side in sides]
    samples_R = np.max([side.max(axis=1) for side in numbers], axis=0) + 1
    lengths = [_lengths(side, samples_R) for side in numbers]
    groups = _of_similar_length(np.max(lengths, axis=0))
    is_padding = np.zeros(len(lengths[0]), dtype=bool)
    is_padding[np.cumsum(samples_R + 1) - 1] = True
    return tuple(_segments(lengths_N, is_padding, groups) for lengths_N in lengths)


def segments_of(*sides: Tensor) -> tuple[Segments, ...]:
    """The segments of packed rows, on the rows' device. It waits for the device, unless the rows came by
    :func:`send_segments`."""
    known = getattr(sides[0], "segments", ())
    return known if len(known) == len(sides) else tuple(one.to(sides[0].device) for one in find_segments(*sides))


def send_segments(copy_RL: Tensor, *sides: Tensor) -> None:
    """Find the segments of rows on the host, and attach them to ``copy_RL``, a device's copy of the first side."""
    copy_RL.segments = tuple(one.to(copy_RL.device) for one in find_segments(*sides))


def _lengths(segments_RL: NDArray[np.int64], samples_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """Shape (N,): the tokens of each sample."""
    numbered_RL = np.where(segments_RL < 0, samples_R[:, None], segments_RL)
    return np.concatenate(
        [np.bincount(row, minlength=count + 1) for row, count in zip(numbered_RL, samples_R, strict=True)]
    )


def _of_similar_length(lengths_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The numbers of the samples that have tokens, in groups."""
    rest = np.argsort(-lengths_N, kind="stable")[: np.count_nonzero(lengths_N)]
    groups = []
    while len(rest):
        longest = lengths_N[rest[0]]
        similar = lengths_N[rest] >= (LEAST_SHARE * longest if longest > SHORT else 0)
        groups.append(rest[similar])
        rest = rest[~similar]
    return groups


def _segments(
    lengths_N: NDArray[np.int64], is_padding_N: NDArray[np.bool_], groups: list[NDArray[np.int64]]
) -> Segments:
    starts = np.concatenate([[0], np.cumsum(lengths_N)])
    slot_of_token = np.empty(starts[-1], dtype=np.int64)
    token_of_slot: list[NDArray[np.int64]] = []
    shapes, used = [], 0
    for samples in groups:
        columns = np.arange(max(1, lengths_N[samples].max()))  # at least 1: padding may have 0 tokens on this side
        real = columns < lengths_N[samples, None]
        token_of_slot.append(np.where(real, starts[samples, None] + columns, 0).ravel())
        slot_of_token[token_of_slot[-1][real.ravel()]] = used + np.flatnonzero(real)
        mask = None if real.all() else torch.from_numpy(real)
        shapes.append(SegmentGroup(count=real.shape[0], length=real.shape[1], real=mask))
        used += real.size
    return Segments(
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=int(lengths_N.max()),
        firsts=torch.from_numpy(starts[:-1][~is_padding_N]),
        groups=tuple(shapes),
        token_of_slot=torch.from_numpy(np.concatenate(token_of_slot)),
        slot_of_token=torch.from_numpy(slot_of_token),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    source_segments: Segments | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: within segments; without ``segments``, transformers' own ``sdpa``.

    Args:
        query, key, value: shape (R, H, L, D).
        attention_mask: with segments a placeholder that is not read; without them, as for ``sdpa``.
        segments: of the queries, and, outside cross-attention, of the keys as well.
        source_segments: of the keys in cross-attention. A decoder's self-attention gets them too, and ignores them.
        position_bias: shape (1, H, l, l), for samples of up to l tokens; without segments, as for ``sdpa``.

    Returns:
        Shape (R, L, H, D).
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others |= {"dropout": dropout, "is_causal": causal}
    if segments is None:
        if attention_mask is not None and attention_mask.dtype == torch.long:
            raise RuntimeError(f"transformers gave {type(module).__name__} no segments of its packed rows")
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **others)
    of_keys = segments
    if source_segments is not None and not causal:
        of_keys, position_bias = source_segments, None  # T5 has no bias in cross-attention
    rows, length = query.shape[0], query.shape[2]
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if position_bias is None and not dropout and others.get("softcap") is None and _takes_flash(query, key, value):
        left = -1 if sliding_window is None else sliding_window - 1
        window = (left, 0 if causal else left)
        attended_THD = _attend_by_flash(query, key, value, segments, of_keys, window, others.get("scaling"))
    else:
        attended_THD = _attend_in_groups(
            module, query, key, value, segments, of_keys, sliding_window, position_bias, others
        )
    return attended_THD.unflatten(0, (rows, length)), None


AttentionInterface.register(SEGMENTED, attend)
AttentionMaskInterface.register(SEGMENTED, mask_by_known_padding)  # for padded batches; segments ask for no mask
MASKED_BY_US.add(SEGMENTED)


def flash_takes(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Whether torch's flash attention for samples of any lengths computes heads of this size. It has no dropout and
    no bias. For a CUDA device that this machine lacks, the answer is that of GPUs since Ampere."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in (torch.float16, torch.bfloat16)
        and head_size <= FLASH_HEAD_SIZE
        and head_size % 8 == 0
        and _has_flash(device)
    )


@torch.compiler.assume_constant_result  # compiled code could not ask the device
@lru_cache
def _has_flash(device: torch.device) -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _takes_flash(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> bool:
    dtype, size = _computed_in(query_THD), query_THD.shape[2]
    return (
        dtype == _computed_in(key_THD) == _computed_in(value_THD)
        and size == value_THD.shape[2]
        and flash_takes(dtype, size, query_THD.device)
    )


def _computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype in which ``sdpa`` would compute with this tensor: autocast casts all floats but those of 64 bits. It
    does so for operators that it knows, and torch's ``varlen_attn`` is not among them."""
    device = tensor.device.type
    casts = torch.is_autocast_enabled(device) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else tensor.dtype


def _attend_by_flash(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    segments: Segments,
    of_keys: Segments,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    query_THD, key_THD, value_THD = (tensor.to(_computed_in(tensor)) for tensor in (query_THD, key_THD, value_THD))
    repeats, options = query_THD.shape[1] // key_THD.shape[1], {}
    if VARLEN_GROUPS_HEADS:
        options["enable_gqa"] = repeats > 1
    elif repeats > 1:
        key_THD, value_THD = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key_THD, value_THD))
    attended_THD: Tensor = varlen_attn(
        *(query_THD, key_THD, value_THD, segments.starts, of_keys.starts, segments.longest, of_keys.longest),
        scale=scale,
        window_size=window,
        **options,
    )
    return attended_THD


@torch.compiler.disable  # each batch has other groups, for which torch would recompile
def _attend_in_groups(
    module: nn.Module,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    segments: Segments,
    of_keys: Segments,
    window: int | None,
    bias: Tensor | None,
    others: dict[str, Any],
) -> Tensor:
    """The attention of each group, by transformers' ``sdpa``."""
    queries = _to_slots(query_THD, segments)
    keys, values = _to_slots(key_THD, of_keys), _to_slots(value_THD, of_keys)
    attended = []
    for query_nHlD, key_nHlD, value_nHlD, group in zip(queries, keys, values, of_keys.groups, strict=True):
        lengths = query_nHlD.shape[2], group.length
        mask = _mask(group, lengths, others["is_causal"], window, query_THD.device)
        cut = None if bias is None else bias[:, :, : lengths[0], : lengths[1]]
        attended_nlHD, _ = sdpa_attention_forward(
            module, query_nHlD, key_nHlD, value_nHlD, mask, position_bias=cut, **others
        )
        attended.append(attended_nlHD.flatten(0, 1))
    rows: Tensor = UniqueRows.apply(torch.cat(attended), segments.slot_of_token)
    return rows


def _to_slots(x_THD: Tensor, segments: Segments) -> list[Tensor]:
    """A batch (n, H, l, D) for each group."""
    x_SHD: Tensor = _GatherToSlots.apply(x_THD, segments.token_of_slot, segments.slot_of_token)
    parts = x_SHD.split([group.count * group.length for group in segments.groups])
    return [
        part.unflatten(0, (group.count, group.length)).transpose(1, 2)
        for part, group in zip(parts, segments.groups, strict=True)
    ]


class _GatherToSlots(torch.autograd.Function):
    """``x[token_of_slot]`` where padding gets no gradient: the backward pass is a copy, not a sum,
    ``gradient[slot_of_token]``."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, token_of_slot_S: Tensor, slot_of_token_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token_T)
        return x_THD.index_select(0, token_of_slot_S)

    @staticmethod
    def backward(ctx: Any, gradient_SHD: Tensor) -> tuple[Tensor, None, None]:
        (slot_of_token_T,) = ctx.saved_tensors
        return gradient_SHD.index_select(0, slot_of_token_T), None, None


class UniqueRows(torch.autograd.Function):
    """``x[slot_of_token]`` for slots that are all different: the backward pass copies. A sum would be slow on CPUs, and
    would sort on CUDA."""

    @staticmethod
    def forward(ctx: Any, x_SHD: Tensor, slot_of_token_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token_T)
        ctx.num_slots = len(x_SHD)
        return x_SHD.index_select(0, slot_of_token_T)

    @staticmethod
    def backward(ctx: Any, gradient_THD: Tensor) -> tuple[Tensor, None]:
        (slot_of_token_T,) = ctx.saved_tensors
        gradient_SHD = gradient_THD.new_zeros(ctx.num_slots, *gradient_THD.shape[1:])
        return gradient_SHD.index_copy_(0, slot_of_token_T, gradient_THD), None


def _mask(
    group: SegmentGroup, lengths: tuple[int, int], causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys the queries of a group may look at, for torch's attention: shape (n or 1, 1, queries or 1, keys); None
    where it needs none."""
    queries, keys = lengths
    mask = None
    if not causal and group.real is not None:  # padding is on the right, where a causal query never looks
        mask = group.real[:, None, None, :]
    if window is not None and keys > window:
        distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        near = distance.abs() < window
        near = (near & (distance >= 0) if causal else near)[None, None]
        mask = near if mask is None else mask & near
    return mask
