"""Optimizers from the configuration: torch's own, AdamW with moments in bf16, and Muon in a chosen dtype."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from drawbar.config.schema.run_config import OptimSection
from drawbar.errors import UserError
from drawbar.optim.bf16_moments import AdamWBf16Moments
from drawbar.optim.muon import Muon
from drawbar.runtime.safetensors_reader import DTYPES


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in at most two groups: with ``weight_decay``, then without.

    No decay for norm layers, biases and any parameter with fewer than two dims; embeddings do decay. The first two are
    rules of transformers' ``Trainer``, which mostly goes by name; ``is_norm`` checks the module's type.

    Returns:
        Groups for any ``torch.optim`` optimizer, each in the order of ``model.named_parameters()``: ``params``,
        ``param_names`` (as long as ``params``; optimizers keep them in their state) and ``weight_decay``. A tied
        parameter occurs once, under its first name; a frozen one not at all; an empty group is left out.

    Raises:
        UserError: no parameter requires training.
    """
    return split_by_decay(model, trained_names(model), weight_decay)


def split_by_decay(model: nn.Module, names: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of :func:`parameter_groups`, restricted to parameters with these names."""
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


FUSED_DEVICES = {"cpu", "cuda", "mps"}
"""Devices on which torch updates all parameters in one kernel."""

MIN_BF16_ELEMENTS = 4096
"""Smaller parameters keep fp32 moments, which take next to no memory: as in bitsandbytes (``min_8bit_size``)."""

MUON_MOMENTUM = 0.95
"""Default of Muon's authors: https://kellerjordan.github.io/posts/muon/"""


def build_optimizers(model: nn.Module, config: OptimSection) -> list[Optimizer]:
    """The optimizers that together update every trained parameter of ``model`` exactly once.

    One optimizer, or two: for ``muon`` (Muon, then AdamW), and for moments in bf16 (``AdamWBf16Moments``, then AdamW).
    Each learning rate is ``config.lr``, the peak; a schedule changes it before each step. Parameter groups carry
    ``param_names``.

    - ``adamw``: decoupled weight decay (https://arxiv.org/abs/1711.05101), fused where the device can; with
      ``state_dtype=bf16`` its moments are kept in bf16 (``AdamWBf16Moments``).
    - ``sgd``: torch adds the decay to the gradient; that is decoupled decay only while momentum is 0.
    - ``adafactor``: ``lr`` is relative to the size of each parameter, at most ``1/sqrt(step)``
      (https://arxiv.org/abs/1804.04235).
    - ``muon``: for the matrices inside the model, AdamW for everything else. ``muon_precision=auto`` counts as
      fp32 here; in a run, ``build_engine`` has replaced it by what suits the device.

    Raises:
        UserError: nothing to train, or no matrix for Muon.
    """
    match config.name:
        case "adamw" if config.state_dtype == "bf16":
            return _adamw_with_bf16_moments(model, config)
        case "adamw":
            return [_adamw(parameter_groups(model, config.weight_decay), config)]
        case "sgd":
            groups = parameter_groups(model, config.weight_decay)
            return [SGD(groups, lr=config.lr, momentum=config.momentum or 0.0)]
        case "adafactor":
            return [Adafactor(parameter_groups(model, config.weight_decay), lr=config.lr)]
        case "muon":
            return _muon(model, config)


def _adamw(groups: list[dict[str, Any]], config: OptimSection, optimizer_class: type[AdamW] = AdamW) -> AdamW:
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # None, and not False, elsewhere: torch then picks the fastest of its other implementations.
    fused = True if devices <= FUSED_DEVICES else None
    return optimizer_class(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _adamw_with_bf16_moments(model: nn.Module, config: OptimSection) -> list[Optimizer]:
    names: dict[type[AdamW], list[str]] = {AdamWBf16Moments: [], AdamW: []}
    parameters = dict(model.named_parameters())
    for name in trained_names(model):
        parameter = parameters[name]
        in_bf16 = parameter.numel() >= MIN_BF16_ELEMENTS and parameter.dtype == torch.float32
        names[AdamWBf16Moments if in_bf16 else AdamW].append(name)
    return [
        _adamw(split_by_decay(model, members, config.weight_decay), config, optimizer_class)
        for optimizer_class, members in names.items()
        if members
    ]


def _muon(model: nn.Module, config: OptimSection) -> list[Optimizer]:
    names = trained_names(model)
    matrices = matrix_names(model)
    inside = [name for name in names if name in matrices]
    if not inside:
        raise UserError(
            f"{type(model).__name__} has no matrix for muon to train besides its embeddings and output head",
            where="optim.name",
            remedy="set optim.name=adamw",
        )
    muon = Muon(
        split_by_decay(model, inside, config.weight_decay),
        lr=config.lr,
        momentum=MUON_MOMENTUM if config.momentum is None else config.momentum,
        dtype=DTYPES.get(config.muon_precision, torch.float32),
    )
    rest = split_by_decay(model, [name for name in names if name not in matrices], config.weight_decay)
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
