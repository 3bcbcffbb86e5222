"""Models through transformers, for every head: pretrained or from random weights, always in fp32, on the CPU
(``stored.build_meta_model``: on the meta device)."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from drawbar.errors import UserError, nearest
from drawbar.models.folder import check_model_folder, foreign_file
from drawbar.models.heads import HEADS, Head, check_head
from drawbar.runtime.hub import fetching, hub_answers, meant_folder
from drawbar.runtime.log import logger
from drawbar.runtime.pretrained_files import make_model, read_config, read_model
from drawbar.runtime.safetensors_reader import parameters_on_meta

T = TypeVar("T")

_DROPPED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older transformers versions saved for many models, and newer ones compute."""


def build_from_scratch(
    name: str, overrides: dict[str, Any], tokenizer: Any, head: Head = "causal_lm", **fields: Any
) -> nn.Module:
    """A model with random weights.

    Args:
        name: a model type (``llama``), a folder with ``config.json``, or a hub name.
        overrides: what the user changes in that architecture's own config. The vocabulary is the tokenizer's unless
            it is given here.
        tokenizer: also gives the special tokens: where generation begins and stops, and what padding is.
        head: what the model is for.
        fields: what the task sets in the config, such as ``num_labels`` or ``id2label``.

    Raises:
        UserError: an unknown model, a head that it does not have, an unknown field, or values that it refuses.
    """
    try:
        config = load_model_config(name, overrides, tokenizer)
    except UserError:
        check_head(_base_config(name), head)  # report a wrong architecture rather than its unknown fields
        raise
    check_head(config, head)
    with _settings_refused(config.model_type):
        set_fields(config, fields)
        pad = config.pad_token_id
        shared = pad is not None and pad in (getattr(config, "bos_token_id", None), config.eos_token_id)
        if shared and head == "causal_lm":
            config.pad_token_id = None  # else ``padding_idx`` would keep the begin or end token's embedding at zero
        model = make_model(HEADS[head].model_class, config, dtype=torch.float32)
        if shared and head != "causal_lm":
            _learn_embedding(model, pad)
        return model


def load_model_config(name: str, overrides: dict[str, Any] | None, tokenizer: Any) -> PreTrainedConfig:
    """The config alone, without weights: special tokens, positions, labels.

    Args:
        name: as for :func:`build_from_scratch`; a folder or a hub name where ``overrides`` is None.
        overrides: None for the config of a pretrained model as it is; else fields for a model from scratch.
        tokenizer: for a model from scratch; not used where ``overrides`` is None.

    Raises:
        UserError: an unknown model, an unknown field, or values that the architecture refuses.
    """
    if overrides is None:
        return from_hub(read_config, name)
    base = _base_config(name)
    _check_fields(base, overrides)
    with _settings_refused(base.model_type):
        fields = {"vocab_size": len(tokenizer), **_special_tokens(base, tokenizer), **overrides}
        config = type(base)(**{**({} if _is_model_type(name) else base.to_dict()), **fields})
        _check_counts(config)
    return config


def _is_model_type(name: str) -> bool:
    return name in CONFIG_MAPPING_NAMES and not Path(name).is_dir()


def _base_config(name: str) -> PreTrainedConfig:
    """The config that a model from scratch starts from, before ``overrides``."""
    if _is_model_type(name):
        return AutoConfig.for_model(name)
    return from_hub(partial(read_config, for_weights=False), name)


def _special_tokens(base: PreTrainedConfig, tokenizer: Any) -> dict[str, int | None]:
    """The tokenizer's special tokens in the roles that the architecture gives them."""
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    pad = end if pad is None else pad
    tokens = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    if base.is_encoder_decoder:
        start = getattr(base, "decoder_start_token_id", None)
        # BART's decoder begins with the end token, T5's with the pad token (T5's default config has no start token)
        tokens["decoder_start_token_id"] = end if start is not None and start == base.eos_token_id else pad
        # unset: they are ids of another vocabulary, and a text cut at the maximum length must not get a forced end
        tokens |= {name: None for name in ("forced_bos_token_id", "forced_eos_token_id") if hasattr(base, name)}
    return tokens


def set_fields(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    # num_labels first: if the number of labels changes, setting it renames all labels to LABEL_0, LABEL_1, …
    for name in sorted(fields, key=lambda name: name != "num_labels"):
        setattr(config, name, fields[name])


ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
"""What a user may ask for without a kernel from the hub."""


@contextmanager
def explain_attention_errors(
    wanted: str, name: str, overrides: dict[str, Any] | None, tokenizer: Any, head: Head
) -> Iterator[None]:
    """Wraps the building of a model with a user-chosen attention implementation: what transformers raises if the model
    or the machine does not support it becomes one UserError that names implementations that work.

    Args:
        wanted: the setting ``task.attention``.
        name, overrides, tokenizer: as for :func:`load_model_config`.
    """
    try:
        yield
    except UserError as error:
        if wanted == "auto":
            raise
        config = load_model_config(name, overrides, tokenizer)
        if _has_attention(config, head, wanted):
            raise  # then something else is wrong
        works = [other for other in ATTENTION if _has_attention(config, head, other)]
        if wanted in ATTENTION or "/" in wanted:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            what = f"a {config.model_type} model cannot have {wanted} attention on this machine: {reason}"
        else:
            guess = nearest(wanted, ATTENTION)
            what = f"there is no {wanted!r} attention" + (f"; did you mean {guess}?" if guess else "")
        raise UserError(
            what,
            where="task.attention",
            remedy=f"set task.attention to {', '.join(works)} or auto",
        ) from error


def _has_attention(config: PreTrainedConfig, head: Head, implementation: str) -> bool:
    config = deepcopy(config)
    config._attn_implementation = implementation
    try:
        with quiet_transformers(), parameters_on_meta():
            make_model(HEADS[head].model_class, config)
    except (UserError, ValueError, OSError, RuntimeError):
        return False
    return True


def _learn_embedding(model: nn.Module, token: int) -> None:
    """Unset ``padding_idx``, which fixes an embedding at zero, for a pad token that also begins or ends texts."""
    weight = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is weight and module.padding_idx is not None:
            module.padding_idx = None
            std = getattr(model.config, "initializer_range", getattr(model.config, "init_std", 0.02))
            with torch.no_grad():
                weight[token].normal_(std=std)


@contextmanager
def _settings_refused(family: str) -> Iterator[None]:
    """Turns what architectures raise for invalid config values into one UserError that says what to do."""
    try:
        yield
    except (
        StrictDataclassError,
        TypeError,
        ValueError,
        KeyError,
        ZeroDivisionError,
        RuntimeError,
        AssertionError,
    ) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"a {family} model cannot be built with these settings: {reason}",
            where="task.model, task.from_scratch",
            remedy="correct the fields named; sizes must divide by the number of heads",
        ) from error


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
    """Check layer and head counts, which an architecture itself checks only in its first forward, or never."""
    fields = config.to_dict()

    def count(name: str) -> Any:
        return fields.get(config.attribute_map.get(name, name))

    layers, heads, groups = count("num_hidden_layers"), count("num_attention_heads"), count("num_key_value_heads")
    if isinstance(layers, int) and layers < 1:
        raise ValueError(f"the number of layers (num_hidden_layers) is {layers}")
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ValueError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})")


def load_pretrained(name: str, head: Head = "causal_lm", *, log_new: bool = True, **fields: Any) -> nn.Module:
    """A pretrained model. transformers builds it on the meta device and maps the safetensors files straight into
    place, so there is never a second copy in memory; files that need unpickling are refused.

    A classifier's head is usually new: that is logged, and a stored one for another number of labels is replaced.
    Weights of other heads in the files are left alone.

    Args:
        head: what the model is for.
        log_new: log which weights start from random values; False if a checkpoint overwrites them anyway.
        fields: what the task sets in the config, such as ``num_labels`` or ``id2label``.

    Raises:
        UserError: the model does not exist, has no safetensors, or does not have such a head.
    """

    def load(name: str, local_files_only: bool) -> tuple[nn.Module, dict[str, Any]]:
        config = read_config(name, local_files_only=local_files_only)
        check_head(config, head)
        set_fields(config, fields)
        with quiet_transformers():
            return read_model(
                HEADS[head].model_class,
                name,
                config=config,
                local_files_only=local_files_only,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _refuse_unfit refuses those of the body, _log_new_weights logs the rest
            )

    model, info = from_hub(load, name)
    is_new = partial(_is_of_new_head, model) if HEADS[head].is_new else lambda key: False
    _refuse_unfit(name, info["mismatched_keys"], is_new)
    if log_new:
        _log_new_weights(name, info, is_new)
    warn_of_unused(name, model, info["unexpected_keys"])
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    model.weights_without_file = absent & {name for name, _ in model.named_parameters()}
    return model


def weights_without_file(model: nn.Module) -> set[str]:
    """The parameters of a model of :func:`load_pretrained` that start from random values; none of any other model."""
    return getattr(model, "weights_without_file", set())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' load report and progress bar: drawbar logs mismatched weights itself."""
    before, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bar:
            transformers_logging.enable_progress_bar()


def _is_of_new_head(model: nn.Module, key: str) -> bool:
    # by its name a pooler is part of the base model, but only sequence classifiers train one
    return not key.startswith(f"{model.base_model_prefix}.") or ".pooler." in key


def _refuse_unfit(name: str, mismatched: Iterable[tuple[str, Any, Any]], is_new: Callable[[str], bool]) -> None:
    unfit = [mismatch for mismatch in mismatched if not is_new(mismatch[0])]
    if unfit:
        key, stored, wanted = min(unfit)
        raise UserError(
            f"the weights of {name} do not fit its config.json: {key} is {list(stored)}, and should be {list(wanted)}",
            where="task.model",
            remedy="restore the config.json that the weights were saved with",
        )


def _log_new_weights(name: str, info: dict[str, Any], is_new: Callable[[str], bool]) -> None:
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        logger.info("new head: %s is %s in %s, and is replaced by %s", key, list(stored), name, list(wanted))
    replaced = {key for key, *_ in info["mismatched_keys"]}
    missing = sorted(set(info["missing_keys"]) - replaced)
    if new := [key for key in missing if is_new(key)]:
        logger.info("new head: %s", ", ".join(new))
    if lost := [key for key in missing if not is_new(key)]:
        logger.warning("%s has no weights for %s: they start from random values", name, _some(lost))


def warn_of_unused(name: str, model: nn.Module, stored: Iterable[str]) -> None:
    """Warn of ``unused_weights``."""
    if lost := unused_weights(model, stored):
        logger.warning("%s has weights that the model has no place for, and they are left out: %s", name, _some(lost))


def unused_weights(model: nn.Module, stored: Iterable[str]) -> list[str]:
    """Of stored names that the model does not have, those of base-model weights. Those of other heads and poolers are
    usual, as are buffers that an architecture no longer saves."""
    body = {part for part, _ in model.base_model.named_children()}
    dropped = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), *_DROPPED_BUFFERS]))
    return [
        key
        for key in sorted(stored)
        if key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in body and not dropped.search(key)
    ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def from_hub(load: Callable[..., T], name: str) -> T:
    """``load(name, local_files_only=…)``, with transformers' many exceptions as one that says what to do."""
    is_folder = Path(name).is_dir()
    check_model_folder(name)
    guess = nearest(name, CONFIG_MAPPING_NAMES)
    hint = f" (did you mean {guess}?)" if guess else ""
    if guess == name:
        hint = "; for such a model with random weights, set task.from_scratch={}"
    try:
        online = not is_folder and hub_answers(name)
    except UserError as error:  # the hub does not know the name
        raise UserError(error.what, where="task.model", remedy=f"{error.remedy}{hint}") from error
    try:
        with fetching(name, online):
            return load(name, local_files_only=not online)
    except (OSError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        foreign = foreign_file(Path(name)) if is_folder else None
        if foreign is not None:
            path, found = foreign
            first_line, remedy = f"{path.name} is {found.what}", found.remedy_for(path)
        elif is_folder:
            remedy = (
                "the folder must hold config.json and all safetensors files, whole, of a model that transformers "
                "knows: copy or fetch again what is missing or cut off"
            )
        else:
            remedy = (
                f"{meant_folder(name)}give a folder, a hub name that this machine can reach, or a model type for "
                f"from_scratch{hint}"
            )
        raise UserError(f"cannot load the model {name!r}: {first_line}", where="task.model", remedy=remedy) from error


def fit_embeddings(model: nn.Module, tokenizer: Any, resize: bool) -> None:
    """Check that every token has an embedding; with ``resize``, grow or shrink the embeddings to the tokenizer's size.

    Raises:
        UserError: the tokenizer has more tokens than the model has embeddings, and ``resize`` is off.
    """
    embeddings = model.get_input_embeddings()
    # I-BERT has its own embedding class, which does not say how many rows it has
    rows = embeddings.num_embeddings if hasattr(embeddings, "num_embeddings") else len(embeddings.weight)
    if len(tokenizer) == rows:
        return
    if resize:
        logger.info("embeddings resized from %d to %d rows", rows, len(tokenizer))
        # new rows start at the mean of the others, which cannot be computed on the meta device
        whole = not model.get_input_embeddings().weight.is_meta
        model.resize_token_embeddings(len(tokenizer), mean_resizing=whole)
    elif len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {rows}",
            where="task.tokenizer, task.model",
            remedy="use the model's own tokenizer, or set task.resize_embeddings=true to add rows",
        )
