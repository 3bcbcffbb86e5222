"""Padding that the host knows of: transformers looks at the values of a padding mask to choose how attention is masked,
and on a GPU the host would wait for them in each forward. Here it looks before the mask is copied.

The masks themselves are those of transformers.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

MASKS = ("attention_mask", "decoder_attention_mask")
"""The keyword arguments of models that say where padding is."""


MASKED_BY_US = {"sdpa"}
"""The attention functions of transformers whose masks :func:`mask_by_known_padding` makes."""


@dataclass(frozen=True)
class _Known:
    has_padding: bool
    version: int
    """Of the mask: a mask that was changed in place since is looked at again."""


_has_padding: ContextVar[bool | None] = ContextVar("do the masks of this forward have padding", default=None)
"""None where the host does not know."""


def send_padding(copy: Tensor, mask: Tensor) -> None:
    """Attach to ``copy``, a device's copy of ``mask``, whether a mask on the host has padding."""
    copy.known_padding = _Known(not bool(mask.all()), copy._version)


def use_known_padding(model: nn.Module) -> None:
    """Let a transformers model take from the host whether its batches have padding, where :func:`send_padding` said so;
    any other batch is looked at as ever. Only for families whose layers all get the mask that the model is called with,
    as the tests compare: others may mask by one of their own."""
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
    """Whether all tokens of all rows are computed, each row by itself, with nothing remembered of a call before."""
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
