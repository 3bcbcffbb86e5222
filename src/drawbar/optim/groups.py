"""Groups of parameters: which are frozen, which decay, and which learn slower or faster than the others."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from drawbar.config.schema.run_config import OptimSection, ParameterGroup
from drawbar.errors import UserError
from drawbar.parallel.blocks import blocks_for, repeated_blocks

SHOWN_NAMES = 12


class ParameterSettings(NamedTuple):
    """What optimizers do with a parameter."""

    lr_scale: float
    """Its learning rate, as a share of the run's."""
    weight_decay: float


def freeze(model: nn.Module, config: OptimSection) -> None:
    """Freeze the parameters that ``config.groups`` say, in place.

    Args:
        model: the full model, with any adapters.

    Raises:
        UserError: a group has no parameter that would be trained without it.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group_of = {name: _group_of(name, config.groups) for name in parameters}
    for number, group in enumerate(config.groups):
        if group not in group_of.values():
            raise _no_parameter(number, group, group_of)
    for name, chosen in group_of.items():
        if chosen is not None and chosen.frozen:
            parameters[name].requires_grad_(False)


def _group_of(name: str, groups: Iterable[ParameterGroup]) -> ParameterGroup | None:
    return next((group for group in groups if re.search(group.match, name)), None)


def _no_parameter(number: int, group: ParameterGroup, group_of: Mapping[str, ParameterGroup | None]) -> UserError:
    earlier = next((found for name, found in group_of.items() if re.search(group.match, name)), None)
    alike = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in group_of))
    names = ", ".join(alike[:SHOWN_NAMES]) + (", …" if len(alike) > SHOWN_NAMES else "")
    return UserError(
        f"no trained parameter's name matches {group.match!r}"
        if earlier is None
        else f"every parameter that matches {group.match!r} also matches {earlier.match!r}, which comes first",
        where=f"optim.groups[{number}].match",
        remedy=f"the names are: {names}" if earlier is None else "put the narrower group first",
    )


def parameter_settings(model: nn.Module, config: OptimSection) -> dict[str, ParameterSettings]:
    """The settings of each trained parameter of a model, by name. A tied parameter has its first name.

    No decay for norm layers, biases and any parameter with fewer than two dims; embeddings do decay. The first two are
    rules of transformers' ``Trainer``, which mostly goes by name; ``is_norm`` checks the module's type.

    Raises:
        UserError: no parameter requires training, or ``layer_lr_decay`` is set for a model without repeated blocks.
    """
    undecayed = undecayed_names(model)
    scales = _scales_by_depth(model, config.layer_lr_decay) if config.layer_lr_decay != 1 else {}
    found = {}
    for name in trained_names(model):
        group = _group_of(name, config.groups) or _REST
        scale = scales.get(name, 1.0) if group.lr is None else group.lr / (config.lr or 1.0)
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        found[name] = ParameterSettings(scale, 0.0 if name in undecayed else decay)
    return found


_REST = ParameterGroup(match="")


def _scales_by_depth(model: nn.Module, decay: float) -> dict[str, float]:
    """Layer-wise decay of the learning rate (Clark et al. 2020, arXiv:2003.10555; depths as in BEiT,
    arXiv:2106.08254): with n repeated blocks, ``decay^(n + 1)`` before the first, ``decay^(n + 1 - i)`` in block i of
    1 to n, and 1 after the last."""
    blocks_for(model, "optim.layer_lr_decay")
    blocks = repeated_blocks(model)
    depths = {
        f"{block}.{name}": depth
        for depth, (block, module) in enumerate(blocks, start=1)
        for name, _ in module.named_parameters()
    }
    scales, reached = {}, 0
    for name, _ in model.named_parameters():
        after = reached if reached < len(blocks) else len(blocks) + 1
        depth = depths.get(name, after)
        reached = max(reached, depths.get(name, 0))
        scales[name] = decay ** (len(blocks) + 1 - depth)
    return scales


def grouped(model: nn.Module, settings: Mapping[str, ParameterSettings]) -> list[dict[str, Any]]:
    """Parameters of a model as groups for any ``torch.optim`` optimizer: one for each of the settings.

    Args:
        settings: by name, of the parameters to include; others may be those of pipeline stages on other ranks.

    Returns:
        Groups with ``params`` in the order of ``model.named_parameters()``, ``param_names`` (as long as ``params``;
        optimizers keep them in their state), ``lr_scale`` (see ``set_learning_rate``) and ``weight_decay``.
    """
    groups: dict[ParameterSettings, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if name in settings:
            group = groups.setdefault(settings[name], {"params": [], "param_names": [], **settings[name]._asdict()})
            group["params"].append(parameter)
            group["param_names"].append(name)
    return [groups[one] for one in sorted(groups, reverse=True)]  # the same order in every pipeline stage


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are not frozen, with tied ones listed once. Raises UserError if there are none."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise UserError(
            f"there is nothing to train: every parameter of {type(model).__name__} is frozen, or it has none",
            where="the model that the task builds",
            remedy="leave requires_grad=True on the parameters to train",
        )
    return names


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: norm layers', biases, and all with fewer than two dims."""
    in_norms = {
        id(parameter) for module in model.modules() if is_norm(module) for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or id(parameter) in in_norms or is_bias(name)
    }


def is_norm(module: nn.Module) -> bool:
    # Each model in transformers has its own RMSNorm class (LlamaRMSNorm, T5LayerNorm), without a common base.
    return isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm")


def is_bias(name: str) -> bool:
    # Any part of the name, for T5's `relative_attention_bias.weight`, a bias that is stored as an embedding.
    return any(part.endswith("bias") for part in name.split("."))
