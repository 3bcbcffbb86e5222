"""Checkpoints of Hugging Face's Trainer: folders with weights, ``optimizer.pt`` and ``trainer_state.json``."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names
from transformers.utils import SAFE_WEIGHTS_NAME

from drawbar.commands.conversion.foreign_state import ForeignState
from drawbar.config.io.fields import show
from drawbar.errors import UserError
from drawbar.models.folder import CONFIG
from drawbar.models.stored import stored_tensors
from drawbar.optim.state import ADAM_KEYS
from drawbar.runtime.log import logger
from drawbar.runtime.safetensors_reader import TensorFiles
from drawbar.tasks.labels import describe_labels, in_order_of, label_key, trained_labels
from drawbar.util.file_content import content_of

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
"""Files of peft, which Trainer writes in place of a model with LoRA."""
_IRRELEVANT_KEYS = re.compile(
    r"^_|^transformers_version$|dtype$|^architectures$|^use_cache$|^output_|^return_dict$|^problem_type$"
    r"|_token_id$|^id2label$|^label2id$|drop|^initializer|^gradient_checkpointing$|^task_specific_params$"
)
"""Matches the keys of ``config.json`` that do not change what the model computes: names, dtypes, special tokens, what
is for training alone (dropout), or what a call returns."""
_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""From ``Trainer.get_decay_parameter_names``: parameters with such names do not decay. (Trainer itself cannot be
imported without accelerate, which drawbar does not need.)"""


def read_trainer(folder: Path, model: nn.Module) -> ForeignState:
    """The weights and the optimizer state of a checkpoint for ``model``.

    ``optimizer.pt`` knows parameters by number: by their place in Trainer's groups, first those that decay, then the
    others, each in the order of the model's parameters. The same groups are made of ``model`` here, and compared by
    their sizes and by the shapes of all moments. The file is mapped into memory, so it takes no memory of its own.

    Nothing in the folder is executed: torch reads ``optimizer.pt`` with ``weights_only``. ``scheduler.pt`` is not read:
    drawbar's schedules are functions of the step. Nor are the random generators.

    Raises:
        UserError: the folder is no such checkpoint, or that of another model or optimizer.
    """
    step = _read_step(folder)
    _refuse_adapters(folder)
    _check_config(folder, model)
    saved = _read_optimizer(folder)
    try:
        optimizer = _by_name(saved, _trainer_groups(model), model)
    except (KeyError, TypeError, AttributeError):
        raise _unreadable(folder / OPTIMIZER_FILE, "it holds no state of an optimizer") from None
    return ForeignState(step, _weights(folder, model), optimizer)


def _read_step(folder: Path) -> int:
    path = folder / STATE_FILE
    try:
        step = json.loads(path.read_bytes())["global_step"]
        if type(step) is not int or step < 1:
            raise ValueError
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no checkpoint of a Trainer: it has no {STATE_FILE}",
            where="SOURCE",
            remedy="name one of its folders: checkpoint-500",
        ) from None
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    except (ValueError, KeyError, TypeError):
        raise _unreadable(path, "it does not say how many steps were made") from None
    return step


def _refuse_adapters(folder: Path) -> None:
    found = next((name for name in _ADAPTERS if (folder / name).is_file()), None)
    if found is not None:
        raise UserError(
            f"{folder} has adapters only ({found}), and adapters are not taken over",
            where="SOURCE",
            remedy="merge them into the model with peft, save that, and begin a new run from it: task.model=FOLDER",
        )


def _check_config(folder: Path, model: nn.Module) -> None:
    """Refuse a model that computes something else with weights of the same shapes: the number of heads, say, is not in
    any shape. A folder without ``config.json`` is not checked."""
    path = folder / CONFIG
    if not isinstance(model, PreTrainedModel) or not path.is_file():
        return
    try:
        stored = json.loads(path.read_bytes())
        theirs = {"model_type": stored.get("model_type")}
        labels = None
        if theirs["model_type"] == model.config.model_type:
            config = type(model.config).from_dict(stored)
            theirs, labels = _function_settings(config.to_dict()), trained_labels(config)  # with the defaults
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, f"transformers does not understand it: {error}") from error
    ours = _function_settings(model.config.to_dict())
    different = [key for key, value in theirs.items() if ours.get(key) != value]
    if different:
        raise UserError(
            f"the Trainer's model was another one by its {CONFIG}: "
            + ", ".join(f"{key} is {theirs[key]!r} there, and {ours.get(key)!r} here" for key in different),
            where="SOURCE",
            remedy="name the configuration of the model that the Trainer trained",
        )
    _check_labels(labels, trained_labels(model.config))


def _check_labels(theirs: list[str] | None, ours: list[str] | None) -> None:
    """Refuse the same labels in another order: the outputs of the model would be swapped in silence. A model without
    names for its outputs is not checked."""
    if theirs is None or ours is None:
        return
    ordered = in_order_of(theirs, ours)
    if ordered not in (None, ours):
        raise UserError(
            f"the outputs of the Trainer's model are {describe_labels(theirs)}, in this order by its {CONFIG}, and "
            f"those of the run {describe_labels(ours)}",
            where="task.labels",
            remedy=f"list them in the Trainer's order: task.labels={show(ordered)}",
        )
    are_numbers = [label_key(label) for label in ours] == [str(number) for number in range(len(ours))]
    if ordered is None and not are_numbers:
        logger.warning(
            "the outputs of the Trainer's model were %s, in this order, and now stand for %s",
            describe_labels(theirs),
            describe_labels(ours),
        )


def _function_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of a transformers configuration that change what the model computes; nested keys are joined by
    dots."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and not _IRRELEVANT_KEYS.search(key):
            found |= _function_settings(value, f"{prefix}{key}.")
        elif not _IRRELEVANT_KEYS.search(key):
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


def _weights(folder: Path, model: nn.Module) -> Mapping[str, Tensor]:
    if not isinstance(model, PreTrainedModel):
        try:
            return TensorFiles([folder / SAFE_WEIGHTS_NAME])
        except (OSError, ValueError) as error:
            raise _unreadable(folder / SAFE_WEIGHTS_NAME, str(error)) from error
    found = stored_tensors(str(folder), model, buffers=True)
    if found is None:
        raise UserError(
            f"the weights in {folder} are not those of the model of the configuration",
            where="SOURCE",
            remedy="name the configuration of the model that the Trainer trained",
        )
    return found


def _read_optimizer(folder: Path) -> dict[str, Any]:
    path = folder / OPTIMIZER_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {OPTIMIZER_FILE}",
            where="SOURCE",
            remedy="Trainer writes it for one process and for DDP (save_only_model=False); it writes other files for "
            "FSDP, and for DeepSpeed: name the folder global_step… in it, and --from deepspeed",
        ) from None
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    except Exception as error:
        raise _unreadable(path, f"torch cannot read it without executing it: {error}") from error
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        raise _unreadable(path, "it holds no state of an optimizer")
    return saved


def _trainer_groups(model: nn.Module) -> list[list[str]]:
    """The names in Trainer's two groups, as its ``create_optimizer`` makes them."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [[name for name in trained if name in decayed], [name for name in trained if name not in decayed]]


def _by_name(saved: dict[str, Any], groups: list[list[str]], model: nn.Module) -> dict[str, Tensor]:
    """The optimizer state by ``<parameter>/<key>``; in ``saved``, it is by the parameters' numbers."""
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != list(map(len, groups)):
        raise _optimizer_mismatch(f"it has groups of {sizes} parameters, and the model has {list(map(len, groups))}")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for group, names in zip(saved["param_groups"], groups, strict=True):
        for number, name in zip(group["params"], names, strict=True):
            values = saved["state"].get(number, {})
            if values and values.keys() != set(ADAM_KEYS):
                raise _optimizer_mismatch(
                    f"it keeps {', '.join(map(str, values))} of a parameter, and AdamW {ADAM_KEYS}"
                )
            for key, value in values.items():
                if key != "step" and (not isinstance(value, Tensor) or value.shape != shapes[name]):
                    raise _optimizer_mismatch(
                        f"the {key} of its parameter {number} is {list(getattr(value, 'shape', []))}, "
                        f"and {name} is {list(shapes[name])}"
                    )
                found[f"{name}/{key}"] = torch.as_tensor(value, dtype=torch.float32) if key == "step" else value
    return found


def _optimizer_mismatch(what: str) -> UserError:
    return UserError(
        f"{OPTIMIZER_FILE} is not AdamW's state of this model: {what}",
        where="SOURCE",
        remedy="name the configuration of the model that the Trainer trained, with adamw and its own parameter groups",
    )


def _unreadable(path: Path, why: str | None) -> UserError:
    remedy = "restore it from a copy, or use another folder"
    with suppress(OSError):
        found = content_of(path)
        if found is not None and found.name not in ("torch", "pickle", "safetensors"):
            why, remedy = f"it is {found.what}", found.remedy_for(path)
    return UserError(f"cannot read {path}: {why}", where="SOURCE", remedy=remedy)
