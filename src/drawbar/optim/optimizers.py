"""Optimizers from the configuration: torch's own, AdamW with moments in bf16, and Muon in a chosen dtype."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from drawbar.config.io.user_modules import import_user_object, make_with_options
from drawbar.config.schema.run_config import OptimSection
from drawbar.errors import UserError
from drawbar.optim.average import WeightAverage
from drawbar.optim.bf16_moments import AdamWBf16Moments, AdamWOwnMoments
from drawbar.optim.groups import ParameterSettings, grouped, parameter_settings, undecayed_names
from drawbar.optim.int8_moments import AdamWInt8Moments, fits
from drawbar.optim.muon import Muon
from drawbar.runtime.safetensors_reader import DTYPES

Settings = Mapping[str, ParameterSettings]

FUSED_DEVICES = {"cpu", "cuda", "mps"}
"""Devices on which torch updates all parameters in one kernel."""

MIN_LOW_ELEMENTS = 4096
"""Smaller parameters keep fp32 moments, which take next to no memory: as in bitsandbytes (``min_8bit_size``)."""

MUON_MOMENTUM = 0.95
"""Default of Muon's authors: https://kellerjordan.github.io/posts/muon/"""


def build_optimizers(model: nn.Module, config: OptimSection, full_model: nn.Module | None = None) -> list[Optimizer]:
    """The optimizers that together update every trained parameter of ``model`` exactly once.

    One optimizer, or two: for ``muon`` (Muon, then AdamW), and for moments in bf16 or int8 (one for large parameters,
    then AdamW).
    Each learning rate is ``config.lr``, the peak; ``set_learning_rate`` changes it before each step. The parameter
    groups are those of ``grouped``. With ``config.ema``, the last one is a ``WeightAverage``.

    - ``adamw``: decoupled weight decay (https://arxiv.org/abs/1711.05101), fused where the device can; with
      ``state_dtype`` its moments are kept in bf16 (``AdamWBf16Moments``) or in 8 bits (``AdamWInt8Moments``).
    - ``sgd``: torch adds the decay to the gradient; that is decoupled decay only while momentum is 0.
    - ``adafactor``: ``lr`` is relative to the size of each parameter, at most ``1/sqrt(step)``
      (https://arxiv.org/abs/1804.04235).
    - ``package.module:Class``: that, with the parameter groups, ``lr`` and ``config.options``. Under strategies that
      shard parameters it must update each element by itself.
    - ``muon``: for the matrices inside the model, AdamW for everything else. ``muon_precision=auto`` counts as
      fp32 here; in a run, ``build_engine`` has replaced it by what suits the device.

    Args:
        full_model: the model whose pipeline stages ``model`` has; default: ``model`` itself.

    Raises:
        UserError: nothing to train, no matrix for Muon, or no blocks for ``layer_lr_decay``.
    """
    settings = parameter_settings(full_model or model, config)
    optimizers = _optimizers(model, config, settings)
    return optimizers if config.ema is None else [*optimizers, WeightAverage(grouped(model, settings), config.ema)]


def _optimizers(model: nn.Module, config: OptimSection, settings: Settings) -> list[Optimizer]:
    match config.name:
        case "adamw" if config.state_dtype == "bf16":
            return _adamw_with_moments(AdamWBf16Moments, lambda parameter: True, model, config, settings)
        case "adamw" if config.state_dtype == "int8":
            return _adamw_with_moments(AdamWInt8Moments, fits, model, config, settings)
        case "adamw":
            return [_adamw(grouped(model, settings), config)]
        case "sgd":
            return [SGD(grouped(model, settings), lr=config.lr, momentum=config.momentum or 0.0)]
        case "adafactor":
            return [Adafactor(grouped(model, settings), lr=config.lr)]
        case "muon":
            return _muon(model, config, settings)
        case _:
            return [_own(grouped(model, settings), config)]


def _own(groups: list[dict[str, Any]], config: OptimSection) -> Optimizer:
    """An optimizer of a library's or of a user's."""
    name = config.name
    factory = import_user_object(name, "optimizer", "optim.name", "Class")
    make = partial(factory, groups, lr=config.lr)
    optimizer = make_with_options(make, config.options, f"the optimizer {name}", "optim.options")
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise UserError(
        f"{name} makes a {type(optimizer).__name__}, which is no torch.optim.Optimizer",
        where="optim.name",
        remedy="name a class of optimizers, or a function that returns one",
    )


def _adamw(groups: list[dict[str, Any]], config: OptimSection, optimizer_class: type[AdamW] = AdamW) -> AdamW:
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # None, and not False, elsewhere: torch then picks the fastest of its other implementations.
    fused = True if devices <= FUSED_DEVICES else None
    return optimizer_class(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _adamw_with_moments(
    optimizer_class: type[AdamWOwnMoments],
    suits: Callable[[nn.Parameter], bool],
    model: nn.Module,
    config: OptimSection,
    settings: Settings,
) -> list[Optimizer]:
    low = {
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() >= MIN_LOW_ELEMENTS and parameter.dtype == torch.float32 and suits(parameter)
    }
    large, small = _split(model, settings, low)
    optimizers = [_adamw(large, config, optimizer_class)] if large else []
    return [*optimizers, _adamw(small, config)] if small else optimizers


def _split(model: nn.Module, settings: Settings, names: set[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parameter groups of those with these names, and of the others."""
    inside = {name: chosen for name, chosen in settings.items() if name in names}
    return grouped(model, inside), grouped(model, {name: settings[name] for name in settings.keys() - names})


def _muon(model: nn.Module, config: OptimSection, settings: Settings) -> list[Optimizer]:
    inside, rest = _split(model, settings, matrix_names(model))
    if not inside:
        raise UserError(
            f"{type(model).__name__} has no matrix for muon to train besides its embeddings and output head",
            where="optim.name",
            remedy="set optim.name=adamw",
        )
    muon = Muon(
        inside,
        lr=config.lr,
        momentum=MUON_MOMENTUM if config.momentum is None else config.momentum,
        dtype=DTYPES.get(config.muon_precision, torch.float32),
    )
    return [muon, _adamw(rest, config)] if rest else [muon]


def matrix_names(model: nn.Module) -> set[str]:
    """Names of the parameters with two dims that belong to neither an embedding, the output head nor a norm.

    A row of an embedding or of the output head is one token; Muon is meant for maps from one hidden space to
    another, and its author keeps it from the vocabulary. The output head is what ``get_output_embeddings()`` returns,
    a method of every transformers model; a head over a few classes is not returned by it, and gets Muon.
    """
    vocabulary = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        vocabulary.append(head)
    excluded = {id(parameter) for module in vocabulary for parameter in module.parameters()}
    undecayed = undecayed_names(model)
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in excluded and name not in undecayed
    }
