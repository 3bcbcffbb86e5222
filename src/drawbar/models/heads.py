"""What a model can be built for: one ``AutoModelFor…`` of transformers for each kind of head."""

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


def check_head(config: PreTrainedConfig, head: Head) -> None:
    """Refuse a head that the architecture does not have.

    Raises:
        UserError: it names families that have it.
    """
    kind = HEADS[head]
    # transformers would build BERT for next-token prediction without a causal mask; XLNet has one only in perm_mask
    is_bidirectional = head == "causal_lm" and (
        (
            config.model_type in HEADS["masked_lm"].families
            and not (config.is_encoder_decoder or getattr(config, "is_decoder", False))
        )
        or config.model_type == "xlnet"
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
    """Most tokens in a sample that the model has positions for; None where there is no such limit (T5, XLNet)."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < 1:  # -1 in XLNet
        return None
    if limit is not None and config.model_type in COUNTS_FROM_PAD:
        return limit - config.pad_token_id - 1
    return limit
