"""Causal language models through transformers: pretrained or from random weights, always fp32 on the CPU."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drawbar.errors import UserError, nearest
from drawbar.runtime.hub import hub_answers
from drawbar.runtime.log import logger

T = TypeVar("T")


def build_from_scratch(name: str, overrides: dict[str, Any], tokenizer: Any) -> nn.Module:
    """A model with random weights.

    Args:
        name: a model type (``llama``), a folder with ``config.json``, or a hub name.
        overrides: fields of that architecture's own config. The vocabulary is the tokenizer's unless it is given here.
        tokenizer: also gives the special tokens that generation stops at.

    Raises:
        UserError: an unknown model, an unknown field, or values that the architecture refuses.
    """
    fields = {"vocab_size": len(tokenizer), **_special_tokens(tokenizer), **overrides}
    local = Path(name).is_dir()
    known_type = name in CONFIG_MAPPING_NAMES and not local
    base = AutoConfig.for_model(name) if known_type else _from_hub(AutoConfig.from_pretrained, name)
    if base.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{base.model_type} is no causal language model",
            where="task.model",
            remedy="choose one that predicts the next token, such as llama, qwen3 or gpt2",
        )
    _check_fields(base, overrides)
    try:
        config = type(base)(**{**({} if known_type else base.to_dict()), **fields})
        _check_counts(config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (StrictDataclassError, TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"a {base.model_type} language model cannot be built with these settings: {reason}",
            where="task.model, task.from_scratch",
            remedy="correct the fields named; sizes must divide by the number of heads",
        ) from error


def _special_tokens(tokenizer: Any) -> dict[str, int | None]:
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    # Models keep the pad token's embedding at zero for ever. One that also begins and ends documents must be learned.
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None if pad in (begin, end) else pad}


def _check_fields(base: PreTrainedConfig, overrides: dict[str, Any]) -> None:
    own = {field.name for field in dataclasses.fields(type(base))}
    known = sorted(own | set(type(base).attribute_map) | set(base.to_dict()))
    for field in overrides:
        if field in known:
            continue
        guess = nearest(field, known)
        raise UserError(
            f"{base.model_type} has no field {field!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            where=f"task.from_scratch.{field}",
            remedy="the fields are: " + ", ".join(known),
        )


def _check_counts(config: PreTrainedConfig) -> None:
    """What an architecture itself would find out in its first forward, or never."""
    fields = config.to_dict()

    def count(name: str) -> Any:
        return fields.get(config.attribute_map.get(name, name))

    layers, heads, groups = count("num_hidden_layers"), count("num_attention_heads"), count("num_key_value_heads")
    if isinstance(layers, int) and layers < 1:
        raise ValueError(f"the number of layers (num_hidden_layers) is {layers}")
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ValueError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})")


def load_pretrained(name: str) -> nn.Module:
    """A pretrained model. transformers builds it on the meta device and maps the safetensors files straight into
    place, so there is never a second copy in memory; files that need unpickling are refused.

    Raises:
        UserError: the model does not exist, has no safetensors, or is no causal language model.
    """

    load = partial(
        AutoModelForCausalLM.from_pretrained,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named below, and refused
    )
    model, info = _from_hub(load, name)
    if info["mismatched_keys"]:
        key, stored, wanted = min(info["mismatched_keys"])
        raise UserError(
            f"the weights of {name} do not fit its config.json: {key} is {list(stored)}, and should be {list(wanted)}",
            where="task.model",
            remedy="restore the config.json that the weights were saved with",
        )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        logger.warning("%s has no weights for %s: they start from random values", name, missing)
    return model


def _from_hub(load: Callable[..., T], name: str) -> T:
    """``load(name, local_files_only=…)``, with transformers' many exceptions as one that says what to do."""
    is_folder = Path(name).is_dir()
    guess = nearest(name, CONFIG_MAPPING_NAMES)
    hint = f" (did you mean {guess}?)" if guess else ""
    try:
        online = not is_folder and hub_answers(name)
        return load(name, local_files_only=not online)
    except UserError as error:  # the hub does not know the name
        raise UserError(error.what, where="task.model", remedy=f"{error.remedy}{hint}") from error
    except (OSError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if is_folder:
            remedy = "the folder must hold config.json and safetensors files of a causal language model"
        else:
            remedy = f"give a folder, a hub name that this machine can reach, or a model type for from_scratch{hint}"
        raise UserError(f"cannot load the model {name!r}: {first_line}", where="task.model", remedy=remedy) from error


def fit_embeddings(model: nn.Module, tokenizer: Any, resize: bool) -> None:
    """Check that every token has an embedding; give it one only where that is asked for.

    Raises:
        UserError: the tokenizer has more tokens than the model has embeddings, and ``resize`` is off.
    """
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) == rows:
        return
    if resize:
        logger.info("embeddings resized from %d to %d rows", rows, len(tokenizer))
        model.resize_token_embeddings(len(tokenizer))
    elif len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {rows}",
            where="task.tokenizer, task.model",
            remedy="use the model's own tokenizer, or set task.resize_embeddings=true to add rows",
        )
