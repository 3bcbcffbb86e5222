"""Which parameters are trained, and which of them decay."""

from typing import Any

from torch import nn

from drawbar.errors import UserError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in at most two groups: with ``weight_decay``, then without.

    No decay for norm layers, biases and any parameter with fewer than two dims; embeddings do decay. The first two are
    rules of transformers' ``Trainer``, which decides mostly by name; ``is_norm`` looks at the type of the module.

    Returns:
        Groups for any ``torch.optim`` optimizer, each in the order of ``model.named_parameters()``: ``params``,
        ``param_names`` (as long as ``params``; optimizers keep them in their state) and ``weight_decay``. A tied
        parameter occurs once, under its first name; a frozen one not at all; an empty group is left out.

    Raises:
        UserError: no parameter is to be trained.
    """
    return split_by_decay(model, trained_names(model), weight_decay)


def split_by_decay(model: nn.Module, names: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of :func:`parameter_groups` for the parameters with these names alone."""
    parameters = dict(model.named_parameters())
    undecayed = undecayed_names(model)
    groups = [
        {
            "params": [parameters[name] for name in members],
            "param_names": members,
            "weight_decay": decay,
        }
        for members, decay in (
            ([name for name in names if name not in undecayed], weight_decay),
            ([name for name in names if name in undecayed], 0.0),
        )
    ]
    return [group for group in groups if group["params"]]


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are not frozen, a tied one once. Raises UserError where there is none."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise UserError(
            f"there is nothing to train: every parameter of {type(model).__name__} is frozen, or it has none",
            where="the model that the task builds",
            remedy="leave requires_grad=True on the parameters to train",
        )
    return names


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay would harm: norm layers', biases, and all of fewer than two dims."""
    in_norms = {
        id(parameter) for module in model.modules() if is_norm(module) for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or id(parameter) in in_norms or is_bias(name)
    }


def is_norm(module: nn.Module) -> bool:
    # Each model in transformers has an RMSNorm class of its own (LlamaRMSNorm, T5LayerNorm), with no common base.
    return isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm")


def is_bias(name: str) -> bool:
    # Any part of the name, for T5's `relative_attention_bias.weight`, a bias that is stored as an embedding.
    return any(part.endswith("bias") for part in name.split("."))
