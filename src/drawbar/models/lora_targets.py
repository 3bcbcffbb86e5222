"""What gets LoRA adapters: modules by the ends of their names, and fused parameters of experts."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drawbar.config.schema.run_config import LoraSection
from drawbar.errors import UserError

_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ATTENTION = (
    *("q_proj", "v_proj", "query", "value", "q", "v", "q_lin", "v_lin", "query_proj", "value_proj"),
    *("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv"),
)
"""Queries and values, as Hu et al. adapt them, for the models that peft does not list."""


def output_embeddings(model: nn.Module) -> list[nn.Module]:
    """The output embeddings (LM heads) of this model and of models nested in it."""
    layers = [module.get_output_embeddings() for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [layer for layer in layers if layer is not None]


def inside(whole: dict[str, nn.Module]) -> set[int]:
    return {id(module) for parent in whole.values() for module in parent.modules()}


class Targets(NamedTuple):
    """What gets adapters, by full name."""

    modules: list[str]
    parameters: list[str]
    """Fused ones, such as ``model.layers.0.mlp.experts.gate_up_proj``: three dims, of all experts of a layer."""


def find_targets(model: nn.Module, lora: LoraSection, excluded: set[int]) -> Targets:
    """What ``lora.modules`` names, none of it in the ``excluded`` modules (by identity).

    Raises:
        UserError: it names nothing that can be adapted, or something whose weight is used in two places.
    """
    adaptable = {
        name: module
        for name, module in model.named_modules()
        if name
        and isinstance(module, _ADAPTABLE)
        and id(module) not in excluded
        # the output projection of nn.MultiheadAttention, which reads its weight and never calls it
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    }
    heads = {id(layer) for layer in output_embeddings(model)}
    linear = [name for name, module in adaptable.items() if isinstance(module, _LINEAR) and id(module) not in heads]
    fused = fused_parameters(model, excluded)
    found, parameters = set[str](), set[str]()
    for wanted in [lora.modules] if isinstance(lora.modules, str) else lora.modules:
        modules, of_fused = ending(adaptable, [wanted]), _fused_ending(fused, wanted)
        problem = f"no module to adapt has a name that ends in {wanted!r}"
        if wanted == "linear" and not modules:
            modules, problem = linear, f"{type(model).__name__} has no linear layers to adapt"
        elif wanted == "attention" and not modules:
            modules, problem = (
                _attention(model, linear),
                f"{type(model).__name__} has no attention projections that are known",
            )
        if not modules and not of_fused:
            raise _nothing_to_adapt(problem, linear, fused)
        found |= set(modules)
        parameters |= set(of_fused)
    if not found and not parameters:
        raise _nothing_to_adapt("no module is named", linear, fused)
    _refuse_tied(model, found)
    return Targets([name for name in adaptable if name in found], [name for name in fused if name in parameters])


def fused_parameters(model: nn.Module, excluded: Collection[int] = ()) -> list[str]:
    """The parameters of three dims that are no convolution's: the matrices of all experts of a layer in one tensor."""
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if name and id(module) not in excluded and not isinstance(module, _ADAPTABLE)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _fused_ending(fused: list[str], suffix: str) -> list[str]:
    """Those whose name, or that of whose module, ends in the suffix."""
    return [name for name in fused if ending([name], [suffix]) or ending([name.rpartition(".")[0]], [suffix])]


def _nothing_to_adapt(problem: str, linear: list[str], fused: list[str]) -> UserError:
    remedy = f"name modules in lora.modules; the linear ones are: {last_names(linear) or 'none'}"
    if fused:
        remedy += f"; fused parameters are: {', '.join(dict.fromkeys(map(short_name, fused)))}"
    return UserError(problem, where="lora.modules", remedy=remedy)


def short_name(parameter: str) -> str:
    """The last two parts of a parameter's name: ``experts.gate_up_proj``."""
    return ".".join(parameter.split(".")[-2:])


def _attention(model: nn.Module, names: list[str]) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    usual = KNOWN.get(getattr(getattr(model, "config", None), "model_type", None), [])
    found = [name for name in names if re.fullmatch(usual, name)] if isinstance(usual, str) else ending(names, usual)
    return found or ending(names, _ATTENTION)


def _refuse_tied(model: nn.Module, targets: Collection[str]) -> None:
    """Refuse to adapt a module that shares its weight: merging its adapter would change the other module, too."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in sorted(targets):
        if any(uses[id(parameter)] > 1 for parameter in model.get_submodule(name).parameters()):
            raise UserError(
                f"{name} shares its weight with another module, and cannot get an adapter of its own",
                where="lora.modules",
                remedy=f"leave {name} out of lora.modules; lora.train trains a shared weight whole",
            )


def target_setting(model: nn.Module, targets: list[str]) -> list[str] | str:
    """peft's ``target_modules`` for exactly these: short names (last component) if unambiguous, else a pattern."""
    last_names = sorted({name.rpartition(".")[2] for name in targets})
    everywhere = ending((name for name, _ in model.named_modules()), last_names)
    return last_names if everywhere == targets else "|".join(re.escape(name) for name in targets)


def parameter_setting(model: nn.Module, parameters: list[str]) -> list[str]:
    """peft's ``target_parameters`` for exactly these: their short names if unambiguous."""
    short = sorted(set(map(short_name, parameters)))
    everywhere = ending((name for name, _ in model.named_parameters()), short)
    return short if set(everywhere) == set(parameters) else parameters


def ending(names: Iterable[str], suffixes: Iterable[str]) -> list[str]:
    """The names that are one of the suffixes, or end in a dot and one of them."""
    endings = tuple(f".{suffix}" for suffix in suffixes)
    return [name for name in names if f".{name}".endswith(endings)]


def last_names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
