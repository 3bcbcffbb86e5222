"""Optimizer state under parameter names, so that it fits any number of optimizers, groups and processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.errors import UserError


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """The tensors of all optimizers as ``{"<parameter>/<key>": tensor}`` (``lm_head.weight/exp_avg``).

    The groups' settings are left out: learning rate, betas and decay are the configuration's.
    """
    names = _names(model)
    return {
        f"{names[parameter]}/{key}": value
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if value is not None  # SGD's momentum buffer before its first use
    }


def load_optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer], tensors: dict[str, torch.Tensor]) -> None:
    """Put back what :func:`optimizer_state` returned; each optimizer moves it to where it wants it.

    Raises:
        UserError: it is the state of other parameters, or of another optimizer.
    """
    names = _names(model)
    of_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parameter_name, _, key = name.rpartition("/")
        of_parameter.setdefault(parameter_name, {})[key] = tensor
    _check_names({names[p] for o in optimizers for g in o.param_groups for p in g["params"]}, set(of_parameter))
    for optimizer in optimizers:
        current = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, Any] = {
            index: of_parameter[names[parameter]]
            for index, parameter in enumerate(parameters)
            if names[parameter] in of_parameter
        }
        optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _check_names(here: set[str], saved: set[str]) -> None:
    # a parameter that never got a gradient has no state, so fewer names than here are right
    if not saved <= here:
        raise UserError(
            f"the optimizer state is that of other parameters: nothing trains {min(saved - here)} here",
            remedy="resume with the model that wrote it, or start from its weights with --fork NEWNAME",
        )
