"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) through peft, on a transformers model or any module.

A linear layer's ``W x`` becomes ``W x + (alpha / rank) B A x``: ``W`` is frozen, ``A`` is random, ``B`` starts at zero.

The adapters are injected in place (peft's ``inject_adapter_in_model``), not wrapped around the model as a
``PeftModel``: the model keeps its class, ``forward``, ``generate`` and ``config``. Modules that are trained whole are
simply not frozen, without peft's ``ModulesToSaveWrapper``: they keep their names, and tied weights stay tied.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import xxhash
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drawbar.config.schema.run_config import LoraSection, RunConfig
from drawbar.errors import UserError
from drawbar.parallel.low_precision_weights import weights_to_store_low
from drawbar.runtime.torch_internals import _BatchNorm
from drawbar.util.dtypes import DTYPES

_ADAPTER = "default"
"""peft's own name for the only adapter of a model; a part of the parameters' names (``lora_A.default.weight``)."""
_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HEADS = {"classifier", "score", "qa_outputs"}
"""Heads that peft trains fully (``modules_to_save``) in classification and question answering."""
_ATTENTION = (
    *("q_proj", "v_proj", "query", "value", "q", "v", "q_lin", "v_lin", "query_proj", "value_proj"),
    *("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv"),
)
"""Queries and values, as Hu et al. adapt them, for the models that peft does not list."""


@dataclass(frozen=True)
class FrozenBaseInfo:
    """Identifies the frozen pretrained model under the adapters, whose weights are not in the checkpoints."""

    without_file: frozenset[str]
    """Parameters missing from the pretrained files; they are trained, and so stored in the checkpoints."""
    digest: str
    """Digest of the weights that were frozen for the adapters; those that the model itself had frozen are not in it."""


def add_adapters(model: nn.Module, lora: LoraSection, without_file: Collection[str] = ()) -> nn.Module:
    """Freeze the model and give it adapters, in place; only they, its new head and ``lora.train`` are trained.

    The head is what a transformers model has besides its base model (none if it predicts tokens); in any other module,
    the modules with the names that peft looks for. The adapters depend on torch's global random state alone, and the
    model's outputs do not change until the adapters are trained.

    Args:
        without_file: parameters that start from random values, as no file has them. Their modules are trained whole,
            too: frozen at random values they would be useless, and could not be restored.

    Returns:
        The same ``model``.

    Raises:
        UserError: peft is not installed, a name fits no module, a weight to adapt is used in two places, or peft
            cannot adapt such a module.
    """
    peft = _import_peft()
    whole = _fully_trained_modules(model, lora.train, without_file)
    targets = _targets(model, lora, _inside(whole))
    _refuse_tied(model, targets)
    trained = [p for module in whole.values() for p in module.parameters() if p.requires_grad]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_target_setting(model, targets),
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)  # freezes all else
    except ValueError as error:  # peft refuses layers that an architecture never calls, such as some of Mamba's
        raise UserError(f"peft refuses: {error}", where="lora.modules", remedy="name other modules") from error
    for parameter in trained:
        parameter.requires_grad_(True)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        # torch's fast path for inference reads the weights of the linear layers and would go round their adapters
        torch.backends.mha.set_fastpath_enabled(False)
    return model


def add_adapters_to_base(model: nn.Module, lora: LoraSection, without_file: Collection[str]) -> FrozenBaseInfo:
    """As :func:`add_adapters`, on a model with loaded weights; returns what identifies the frozen weights.

    Parameters that the model itself had frozen are left out: they may be computed, and rounding differs by machine.
    """
    before = [parameter for parameter in model.parameters() if parameter.requires_grad]
    add_adapters(model, lora, without_file)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [parameter for parameter in before if not parameter.requires_grad]
    return FrozenBaseInfo(frozenset(trained & set(without_file)), _digest(frozen))


def add_adapters_to_meta_model(
    model: nn.Module, lora: LoraSection, weights: Mapping[str, torch.Tensor]
) -> FrozenBaseInfo:
    """As :func:`add_adapters_to_base`, on a model without values.

    Args:
        weights: the pretrained weights of all its parameters, by name; each is read once, and none is kept.
    """
    before = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    add_adapters(model, lora)
    frozen = [name for name, parameter in before.items() if not parameter.requires_grad]
    return FrozenBaseInfo(frozenset(), _digest(weights[name].float() for name in frozen))


def add_adapters_and_fill(
    model: nn.Module, lora: LoraSection, weights: Mapping[str, torch.Tensor], precision: str
) -> FrozenBaseInfo:
    """As :func:`add_adapters_to_base`, on a model whose parameters have no values yet: they are filled with
    ``weights``, one by one, each at once in the dtype that it is kept in. The base is never in memory in fp32.

    Args:
        model: on the CPU, as adapters are drawn where it is; with ``expanded_empty`` it takes no memory.
        weights: the pretrained weights of all its parameters, by name; each is read once.
        precision: of the run, whose frozen weights are stored low; ``fp32`` for all as the model has them.
    """
    before = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    add_adapters(model, lora)
    low = weights_to_store_low(model, precision)

    def fill() -> Iterator[torch.Tensor]:
        for name, (parameter, is_trained) in before.items():
            value = weights[name].to(parameter.dtype)
            parameter.data = value.to(DTYPES[precision]) if parameter in low else value
            if is_trained and not parameter.requires_grad:
                yield value

    return FrozenBaseInfo(frozenset(), _digest(fill()))


def _digest(parameters: Iterable[torch.Tensor]) -> str:
    """A digest of types, shapes and all bits of the values: hashing them takes less time than reading them did."""
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        digest.update(f"{parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state without its frozen parameters: what a checkpoint of a LoRA run holds.

    That is adapters, modules trained whole, and the buffers of the state: batch norm's statistics move in training,
    even where its weights are frozen. A tied tensor occurs under each of its names, as in ``state_dict``; parameters
    are the model's own objects, not detached tensors.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in frozen}


def saved_tensors(model: nn.Module, config: RunConfig) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model, or of stages of it: by name, the model's own tensors, no copies."""
    return model.state_dict(keep_vars=True) if config.lora is None else trained_state(model)


def merged(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights that they adapt and take them out, in place.

    Returns:
        The same ``model``, with the modules and parameter names that it had before :func:`add_adapters`. What was
        frozen is still frozen: the model is meant for use and export, not for training.
    """
    for name, layer in adapted_layers(model).items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
    return model


@torch.no_grad()
def merged_weight(
    layer: nn.Module, name: str, trained: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The weight of one adapted layer with its adapter added, in fp32.

    Args:
        layer: of :func:`adapted_layers`, without values; it stays so.
        name: of the layer.
        trained: what a checkpoint holds of the adapted model: see :func:`trained_state`.
        weights: of the model that was adapted.
    """
    layer = deepcopy(layer)
    values = {}
    for own in layer.state_dict():
        full = f"{name}.{own}"
        found = trained[full] if full in trained else weights[f"{name}.{own.removeprefix('base_layer.')}"]
        values[own] = found.float()
    layer.load_state_dict(values, assign=True)
    layer.merge()
    return layer.get_base_layer().weight.detach()


def save_adapter(model: nn.Module, folder: Path, base_name: str, read: Callable[[str], torch.Tensor]) -> None:
    """Write the adapters and the modules trained whole as a folder that ``PeftModel.from_pretrained`` loads.

    Args:
        model: with its adapters, not merged; its parameters are not read, and may be on the meta device.
        folder: is made; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_name: the pretrained model that the adapters belong to, a hub name or a folder.
        read: from a name of the model's ``state_dict`` to the tensor that is to be written.
    """
    layers = tuple(f"{name}." for name in adapted_layers(model))
    trained = trained_state(model)
    # a saved adapter's tensor names leave out the name of the adapter (``default``)
    names = {
        re.sub(rf"\.{_ADAPTER}(\.weight|\.bias)?$", r"\1", name): name for name in trained if name.startswith(layers)
    }
    whole = _modules_to_save(model, [name for name in trained if not name.startswith(layers)])
    for module in whole:
        names |= {name: name for name in model.get_submodule(module).state_dict(prefix=f"{module}.")}
    folder.mkdir(parents=True, exist_ok=True)
    # cloned, as a safetensors file must not hold a tied tensor under two names
    copies = {f"base_model.model.{stored}": read(name).detach().cpu().clone() for stored, name in names.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in copies.items()}
    save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy(model.peft_config[_ADAPTER])  # inject_adapter_in_model leaves it there
    config.base_model_name_or_path = base_name
    config.modules_to_save = whole or None
    config.inference_mode = True
    base = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=base)


def _modules_to_save(model: nn.Module, names: list[str]) -> list[str]:
    """The modules that own these tensors (both, if tied) and have trained parameters, or are batch norms."""
    owners = sorted({name.rpartition(".")[0] for name in names})
    return [
        owner
        for owner in owners
        if any(parameter.requires_grad for parameter in model.get_submodule(owner).parameters(recurse=False))
        or isinstance(model.get_submodule(owner), _BatchNorm)
    ]


def _import_peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"adapters need the package peft: {error}",
            where="lora",
            remedy='pip install "drawbar[lora]", or remove the section lora',
        ) from error
    return peft


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _fully_trained_modules(model: nn.Module, train: list[str], without_file: Collection[str]) -> dict[str, nn.Module]:
    """The new head, the modules whose names end as ``train`` says, and those of the parameters that no file
    has."""
    modules = {name: module for name, module in model.named_modules() if name and list(module.parameters())}
    unknown = [suffix for suffix in train if not _ending(modules, [suffix])]
    if unknown:
        raise UserError(
            f"no module's name ends in {unknown[0]!r}",
            where="lora.train",
            remedy="name modules of the model; these have parameters: " + _last_names(modules),
        )
    owners = [name for name in (parameter.rpartition(".")[0] for parameter in without_file) if name in modules]
    return {name: modules[name] for name in [*_head(model, modules), *_ending(modules, train), *owners]}


def _head(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    if _output_embeddings(model):
        return []  # predicts tokens: its head is pretrained
    if isinstance(model, PreTrainedModel) and model.base_model is not model:
        return [name for name, module in model.named_children() if name in modules and module is not model.base_model]
    return [name for name in modules if name.rpartition(".")[2] in _HEADS]


def _output_embeddings(model: nn.Module) -> list[nn.Module]:
    """The output embeddings (LM heads) of this model and of models nested in it."""
    layers = [module.get_output_embeddings() for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [layer for layer in layers if layer is not None]


def _inside(whole: dict[str, nn.Module]) -> set[int]:
    return {id(module) for parent in whole.values() for module in parent.modules()}


def _targets(model: nn.Module, lora: LoraSection, excluded: set[int]) -> list[str]:
    """Full names of the modules to adapt, none of them ``excluded`` (by identity)."""
    adaptable = {
        name: module
        for name, module in model.named_modules()
        if name
        and isinstance(module, _ADAPTABLE)
        and id(module) not in excluded
        # the output projection of nn.MultiheadAttention, which reads its weight and never calls it
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    }
    heads = {id(layer) for layer in _output_embeddings(model)}
    linear = [name for name, module in adaptable.items() if isinstance(module, _LINEAR) and id(module) not in heads]
    if lora.modules == "linear":
        found, problem = linear, f"{type(model).__name__} has no linear layers to adapt"
    elif lora.modules == "attention":
        found, problem = (
            _attention(model, linear),
            f"{type(model).__name__} has no attention projections that are known",
        )
    else:
        unknown = [suffix for suffix in lora.modules if not _ending(adaptable, [suffix])]
        found = [] if unknown else _ending(adaptable, lora.modules)
        problem = f"no module to adapt has a name that ends in {unknown[0]!r}" if unknown else "no module is named"
    if not found:
        remedy = f"name modules in lora.modules; the linear ones are: {_last_names(linear) or 'none'}"
        raise UserError(problem, where="lora.modules", remedy=remedy)
    return found


def _attention(model: nn.Module, names: list[str]) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    usual = KNOWN.get(getattr(getattr(model, "config", None), "model_type", None), [])
    found = [name for name in names if re.fullmatch(usual, name)] if isinstance(usual, str) else _ending(names, usual)
    return found or _ending(names, _ATTENTION)


def _refuse_tied(model: nn.Module, targets: list[str]) -> None:
    """Refuse to adapt a module that shares its weight: merging its adapter would change the other module, too."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in targets:
        if any(uses[id(parameter)] > 1 for parameter in model.get_submodule(name).parameters()):
            raise UserError(
                f"{name} shares its weight with another module, and cannot get an adapter of its own",
                where="lora.modules",
                remedy=f"leave {name} out of lora.modules; lora.train trains a shared weight whole",
            )


def _target_setting(model: nn.Module, targets: list[str]) -> list[str] | str:
    """peft's ``target_modules`` for exactly these: short names (last component) if unambiguous, else a pattern."""
    last_names = sorted({name.rpartition(".")[2] for name in targets})
    everywhere = _ending((name for name, _ in model.named_modules()), last_names)
    return last_names if everywhere == targets else "|".join(re.escape(name) for name in targets)


def _ending(names: Iterable[str], suffixes: Iterable[str]) -> list[str]:
    """The names that are one of the suffixes, or end in a dot and one of them."""
    endings = tuple(f".{suffix}" for suffix in suffixes)
    return [name for name in names if f".{name}".endswith(endings)]


def _last_names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
