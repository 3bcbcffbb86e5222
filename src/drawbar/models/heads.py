"""What a model can be built for: one ``AutoModelFor…`` of transformers for each kind of head."""

from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto as auto

from drawbar.errors import UserError

Head = Literal["causal_lm", "masked_lm", "seq2seq", "sequence_classification", "token_classification"]


class HeadKind(NamedTuple):
    model_class: Any
    """The ``AutoModelFor…`` class."""
    families: set[str]
    """The model types that have such a head."""
    noun: str
    such_as: str
    """Example families that have the head, for the error message of one that does not."""
    is_new: bool
    """Whether this head is usually newly initialized on top of a pretrained model."""


HEADS: dict[Head, HeadKind] = {
    "causal_lm": HeadKind(
        AutoModelForCausalLM,
        set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "causal language model",
        "llama, qwen3, mistral or gpt2",
        False,
    ),
    "masked_lm": HeadKind(
        AutoModelForMaskedLM,
        set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        "masked language model",
        "bert, roberta, distilbert or electra",
        False,
    ),
    "seq2seq": HeadKind(
        AutoModelForSeq2SeqLM,
        set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        "encoder–decoder",
        "t5, mt5 or bart",
        False,
    ),
    "sequence_classification": HeadKind(
        AutoModelForSequenceClassification,
        set(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        "sequence classifier",
        "bert, roberta, distilbert, electra, bart, gpt2 or llama",
        True,
    ),
    "token_classification": HeadKind(
        AutoModelForTokenClassification,
        set(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        "token classifier",
        "bert, roberta, distilbert, electra, gpt2 or llama",
        True,
    ),
}

COUNTS_FROM_PAD = {"roberta", "xlm-roberta", "camembert"}
"""Families that number positions from the pad token's id plus one; every pad token's position is that id."""

SEES_PADDING = {"big_bird", "canine", "convbert", "fnet", "mobilebert", "nystromformer", "prophetnet", "yoso"}
"""Families that compute a sample otherwise beside a longer one, whatever the mask says: they mix neighbours without it,
or choose what to attend to by the row's length."""
NOT_CAUSAL = {"cpmant", "xlnet"}
"""Families that transformers builds for next-token prediction, and that look at later tokens unless they get more than
tokens, such as XLNet's perm_mask."""
POSITIONS_FROM_MASK = {"bloom", "falcon_mamba", "mamba", "mpt"}
"""Families of decoders that take no positions, and yet compute a prompt after padding as without it."""
COUNTS_COLUMNS = {"deepseek_v4", "gpt_neo", "openai-gpt", "recurrent_gemma"}
"""Families of decoders that take positions, and still count columns: to remember several as one (deepseek_v4),
to mask no more than they have positions (gpt_neo, openai-gpt), or as their state reads padding (recurrent_gemma)."""


def check_head(config: PreTrainedConfig, head: Head) -> None:
    """Refuse a head that the architecture does not have.

    Raises:
        UserError: it names families that have it.
    """
    kind = HEADS[head]
    # transformers would build BERT for next-token prediction without a causal mask
    is_bidirectional = head == "causal_lm" and (
        (
            config.model_type in HEADS["masked_lm"].families | {"bert-generation"}
            and not (config.is_encoder_decoder or getattr(config, "is_decoder", False))
        )
        or config.model_type in NOT_CAUSAL
        or bool(getattr(config, "use_bidirectional_attention", False))
    )
    if config.model_type not in kind.families or is_bidirectional:
        raise UserError(
            f"{config.model_type} is no {kind.noun}",
            where="task.model",
            remedy=f"choose a family that is one, such as {kind.such_as}",
        )


class FullPrecisionLinear(nn.Linear):
    """A linear layer that multiplies in fp32, under autocast too, and gives fp32."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return functional.linear(inputs.float(), self.weight.float(), bias)


def predict_in_fp32(model: nn.Module, outputs: int) -> None:
    """Make the last linear layer with ``outputs`` outputs a ``FullPrecisionLinear``: bf16 has only three digits."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and module.out_features == outputs]
    if layers:
        layers[-1].__class__ = FullPrecisionLinear  # in place: its name, its weights and hooks stay


def longest_input(model: nn.Module) -> int | None:
    """Most tokens in a sample that the model has positions for; None if there is no such limit (T5, XLNet)."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < 1:  # -1 in XLNet
        return None
    if limit is not None and config.model_type in COUNTS_FROM_PAD:
        return limit - config.pad_token_id - 1
    # dynamic embeddings are scaled by the longest row of this batch, and of those before
    return min((length for length in (limit, _longest_unscaled(config, "dynamic")) if length is not None), default=None)


def without_adapter(model: nn.Module) -> Any:
    """The model of transformers within that of an adapter, whose parameters may be wrapped; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def pads_on_the_left(model: nn.Module, length: int) -> bool:
    """Whether a prompt with padding on its left has the text that it has alone. The tests try all families that can be
    built.

    Args:
        length: of the longest prompt with its text, in tokens.
    """
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    takes_positions = "position_ids" in signature(without_adapter(model).forward).parameters
    knows_positions = (takes_positions and family not in COUNTS_COLUMNS) or family in POSITIONS_FROM_MASK
    return knows_positions and not sees_neighbours(model, length)


def sees_neighbours(model: nn.Module, length: int) -> bool:
    """Whether what a model computes of a sample depends on the longest sample beside it, where that may have ``length``
    tokens. Rotary embeddings of the kind longrope have one scale for short batches, and another one for long ones."""
    config = getattr(model, "config", None)
    limit = _longest_unscaled(config, "longrope")
    if getattr(config, "model_type", None) in SEES_PADDING or (limit is not None and length > limit):
        return True
    # XLNet's classifier looks at the row's last token
    return any(getattr(module, "summary_type", None) == "last" for module in model.modules())


def _longest_unscaled(config: Any, kind: str) -> int | None:
    """Up to which longest row of a batch rotary embeddings of this kind are not scaled; None if there are none."""
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = given.values() if given and all(isinstance(one, dict) for one in given.values()) else [given]
    lengths = [one.get("original_max_position_embeddings") for one in of_layers if one.get("rope_type") == kind]
    return min((length for length in lengths if length is not None), default=None)
