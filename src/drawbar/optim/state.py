"""Optimizer state under parameter names, so that it fits any number of optimizers, groups and processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.checkpoint.format import EMA
from drawbar.errors import UserError
from drawbar.optim.average import WeightAverage
from drawbar.optim.bf16_moments import MOMENTS
from drawbar.optim.int8_moments import SCALE, AdamWInt8Moments, in_fp32
from drawbar.parallel.zero1 import local_optimizer

Names = Mapping[nn.Parameter, str]
"""The name of each parameter in the whole model."""
ADAM_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter: torch, transformers and DeepSpeed call it the same."""
SCALED_KEYS = {*ADAM_KEYS, *(f"{name}{SCALE}" for name in MOMENTS)}
"""As it keeps them with moments in 8 bits."""
ShardTensor = Callable[[nn.Parameter, Mapping[str, torch.Tensor], str], torch.Tensor]
"""(parameter, tensors, name) → the tensor of that name, as the optimizer of this rank holds it."""


def optimizer_state(names: Names, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """The tensors of all optimizers as ``{"<parameter>/<key>": tensor}`` (``lm_head.weight/exp_avg``).

    The groups' settings are left out: learning rate, betas and decay are the configuration's.

    Raises:
        UserError: an optimizer of the user's keeps something else than tensors.
    """
    found = {
        f"{names[parameter]}/{key}": value
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if value is not None  # SGD's momentum buffer before its first use
    }
    other = next((name for name, value in found.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise UserError(
            f"the optimizer keeps {other} as {type(found[other]).__name__}, and checkpoints hold tensors",
            where="optim.name",
            remedy="name an optimizer whose state is tensors, as that of torch's own",
        )
    return found


def load_optimizer_state(
    names: Names,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, torch.Tensor],
    shard: ShardTensor = lambda parameter, tensors, name: tensors[name],
) -> None:
    """Put back what :func:`optimizer_state` returned, in the order of names, in which a checkpoint in parts stores
    them. Each tensor goes to the device of its parameter before the next is read from its file: the host never holds
    the state of a model that is elsewhere.

    Tensors of parameters that these optimizers do not hold are left alone: see :func:`check_optimizer_state`.
    """
    keys: dict[str, list[str]] = {}
    for name in tensors:
        parameter_name, _, key = name.rpartition("/")
        keys.setdefault(parameter_name, []).append(key)
    for optimizer in optimizers:
        current = optimizer.state_dict()
        take = dict if isinstance(local_optimizer(optimizer), AdamWInt8Moments) else in_fp32
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, Any] = {
            index: take(
                {
                    key: _beside(parameter, shard(parameter, tensors, f"{names[parameter]}/{key}"))
                    for key in sorted(keys[names[parameter]])
                    if (key == EMA) == isinstance(optimizer, WeightAverage)
                }
            )
            for index, parameter in sorted(enumerate(parameters), key=lambda numbered: names[numbered[1]])
            if names[parameter] in keys
        }
        optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _beside(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the parameter's device; 0-d ones (step) are left to ``load_state_dict``."""
    return tensor.to(parameter.device) if tensor.dim() else tensor


def check_optimizer_state(trained: set[str], tensors: Mapping[str, torch.Tensor], optimizer: str) -> None:
    """Refuse state of parameters that no rank trains, and AdamW's state where a parameter has some of its keys, and
    lacks others.

    Args:
        optimizer: ``optim.name`` of the run that has saved it.

    Raises:
        UserError: it names one of them.
    """
    saved = {name.rpartition("/")[0] for name in tensors}
    # a parameter that never got a gradient has no state, so the saved names may be fewer
    if not saved <= trained:
        raise UserError(
            f"the optimizer state is that of other parameters: nothing trains {min(saved - trained)} here",
            remedy="resume with the model that wrote it, or start from its weights with --fork NEWNAME",
        )
    missing = missing_adam_key(tensors) if optimizer in ("adamw", "muon") else None
    if missing is not None:
        raise UserError(
            f"the optimizer state is not complete: it has no {missing}",
            remedy="restore the checkpoint from a copy, resume from another one, or start from its weights with --fork "
            "NEWNAME",
        )


def missing_adam_key(names: Iterable[str]) -> str | None:
    """The first ``<parameter>/<key>`` that AdamW's state lacks; None if it has all keys of each parameter in it (one
    that never got a gradient is not in it). States of other optimizers lack nothing."""
    found: dict[str, set[str]] = {}
    for name in names:
        parameter, _, key = name.rpartition("/")
        found.setdefault(parameter, set()).add(key)
        found[parameter].discard(EMA)
    missing = {
        parameter: (SCALED_KEYS if any(key.endswith(SCALE) for key in keys) else set(ADAM_KEYS)) - keys
        for parameter, keys in found.items()
        if keys and keys < SCALED_KEYS
    }
    incomplete = min((parameter for parameter, keys in missing.items() if keys), default=None)
    return None if incomplete is None else f"{incomplete}/{min(missing[incomplete])}"
