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
from typing import NamedTuple

import torch
import xxhash
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drawbar.config.schema.run_config import LoraSection, RunConfig
from drawbar.errors import UserError
from drawbar.models.stored_base import AsPacked, can_pack, pack, shapes, unpack_all
from drawbar.parallel.precision import weights_to_store_low
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.runtime.torch_internals import _BatchNorm

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


_ADAPTER = "default"
"""peft's own name for the only adapter of a model; a part of the parameters' names (``lora_A.default.weight``)."""
_HEADS = {"classifier", "score", "qa_outputs"}
"""Heads that peft trains fully (``modules_to_save``) in classification and question answering."""


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
    the modules with the names that peft looks for. The adapters depend only on torch's global random state, and the
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
    targets = find_targets(model, lora, inside(whole))
    if targets.parameters and lora.dropout:
        raise UserError(
            f"adapters of fused parameters, such as {short_name(targets.parameters[0])}, take no dropout",
            where="lora.dropout",
            remedy="set lora.dropout=0, or leave them out of lora.modules",
        )
    _check_ranks(lora.ranks, targets)
    trained = [p for module in whole.values() for p in module.parameters() if p.requires_grad]
    config = peft.LoraConfig(
        r=lora.rank,
        rank_pattern=lora.ranks,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        lora_dropout=lora.dropout,
        target_modules=target_setting(model, targets.modules),
        target_parameters=parameter_setting(model, targets.parameters) or None,
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets.modules)
        and not targets.parameters,
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


def _check_ranks(ranks: Collection[str], targets: Targets) -> None:
    names = [*targets.modules, *(name.rpartition(".")[0] for name in targets.parameters)]
    for pattern in ranks:
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):  # as peft matches them
            raise UserError(
                f"no module with an adapter has a name that ends in {pattern!r}",
                where="lora.ranks",
                remedy=f"name some of: {last_names(names)}",
            )


def add_adapters_to_base(model: nn.Module, lora: LoraSection, without_file: Collection[str]) -> FrozenBaseInfo:
    """As :func:`add_adapters`, on a model with loaded weights; returns what identifies the frozen weights.

    Parameters that the model itself had frozen are left out: they may be computed, and rounding differs by machine.
    """
    before = [parameter for parameter in model.parameters() if parameter.requires_grad]
    add_adapters(model, lora, without_file)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    digest = _digest(parameter for parameter in before if not parameter.requires_grad)
    pack_base(model, lora)
    return FrozenBaseInfo(frozenset(trained & set(without_file)), digest)


def pack_base(model: nn.Module, lora: LoraSection) -> None:
    """Store the base as ``lora.base`` says, in place."""
    packed = _layers_to_pack(model, lora)
    for layer in packed.values():
        pack(layer, str(lora.base), layer.weight.detach())
    for name, adapted in adapted_parameters(model).items():
        if name in packed:
            _set_lengths(adapted.layer)


def _set_lengths(layer: nn.Module) -> None:
    """Under DoRA, let a layer with an adapter begin with the lengths that the rows of its weight have now."""
    for adapter, variant in layer.lora_variant.items():
        variant.init(layer, adapter)


def _layers_to_pack(model: nn.Module, lora: LoraSection) -> dict[str, nn.Module]:
    """The linear layers that are stored as ``lora.base`` says, by the name of their weight in the model without
    adapters: all but output embeddings, those that are trained whole, and those that share a weight."""
    if not lora.packs:
        return {}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    heads = {id(layer) for layer in output_embeddings(model)}
    return {
        without_adapters(f"{name}.weight"): module
        for name, module in model.named_modules()
        if can_pack(module, str(lora.base)) and id(module) not in heads and uses[id(module.weight)] == 1
    }


def as_stored(model: nn.Module, lora: LoraSection, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The pretrained weights as training computed with them.

    Args:
        model: with its adapters, possibly without values; its base is not packed.
        weights: the pretrained weights, by name.
    """
    layers = _layers_to_pack(model, lora)
    return AsPacked(weights, layers, str(lora.base)) if layers else weights


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
        precision: of the run, whose frozen weights are stored low; ``fp32`` for all as the model has them. What
            ``lora.base`` packs is packed in any case.
    """
    before = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    add_adapters(model, lora)
    packed, adapted = _layers_to_pack(model, lora), adapted_parameters(model)
    low = set() if lora.base == "fp32" else weights_to_store_low(model, precision)
    low -= {parameter for layer in packed.values() for parameter in layer.parameters(recurse=False)}

    def fill() -> Iterator[torch.Tensor]:
        for name, (parameter, is_trained) in before.items():
            value = weights[name].to(parameter.dtype)
            if name in packed:
                pack(packed[name], str(lora.base), value)
            else:
                parameter.data = value
            if name in adapted:
                _set_lengths(adapted[name].layer)
            if parameter in low:
                parameter.data = value.to(DTYPES[precision])
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
    unpack_all(model)
    for name, layer in reversed(adapted_layers(model).items()):  # the inner one first: several may be around a module
        layer.merge()
        model.set_submodule(name, layer.base_layer)
    del model.peft_config
    return model


class AdaptedParameter(NamedTuple):
    """A weight with an adapter."""

    name: str
    """Of the layer with the adapter."""
    layer: nn.Module
    own: str
    """The name of the weight within the innermost module of the layer."""


def adapted_parameters(model: nn.Module) -> dict[str, AdaptedParameter]:
    """The weights of a model that have adapters, by the names that they have without them."""
    found = {}
    for name, layer in adapted_layers(model).items():
        own = getattr(layer, "parameter_name", "weight")
        found[f"{without_adapters(name)}.{own}"] = AdaptedParameter(name, layer, own)
    return found


def without_adapters(name: str) -> str:
    """The name of a module, or of a tensor, in the model before it was adapted."""
    return name.replace(".base_layer", "")


@torch.no_grad()
def merged_weight(
    adapted: AdaptedParameter, trained: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The weight of one adapted layer with its adapter added, in fp32.

    Args:
        adapted: of a layer without values; it stays so.
        trained: what a checkpoint holds of the adapted model: see :func:`trained_state`.
        weights: of the model that was adapted.
    """
    layer = deepcopy(adapted.layer)
    values = {}
    for key in layer.state_dict():
        own, full = without_adapters(f".{key}")[1:], f"{adapted.name}.{key}"
        if key.startswith("base_layer.") and own != adapted.own:
            continue  # a bias, or what another adapter is for
        values[key] = (trained[full] if full in trained else weights[without_adapters(full)]).float()
    layer.load_state_dict(values, assign=True, strict=False)
    layer.merge()
    return getattr(layer.get_base_layer(), adapted.own).detach()


def save_adapter(model: nn.Module, folder: Path, base_name: str, read: Callable[[str], torch.Tensor]) -> None:
    """Write the adapters and the modules trained whole as a folder that ``PeftModel.from_pretrained`` loads.

    Args:
        model: with its adapters, not merged; its parameters are not read, and may be on the meta device.
        folder: is made; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_name: the pretrained model that the adapters belong to, a hub name or a folder.
        read: from a name of the model's ``state_dict`` to the tensor to write.
    """
    layers = tuple(f"{name}." for name in adapted_layers(model))
    trained = trained_state(model)
    # a saved adapter's tensor names leave out the name of the adapter (``default``), and those of DoRA's lengths more
    names = {
        re.sub(rf"(_vector)?\.{_ADAPTER}(\.weight|\.bias)?$", lambda end: end[1] or end[2] or "", name): name
        for name in trained
        if name.startswith(layers)
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
    unknown = [suffix for suffix in train if not ending(modules, [suffix])]
    if unknown:
        raise UserError(
            f"no module's name ends in {unknown[0]!r}",
            where="lora.train",
            remedy="name modules of the model; these have parameters: " + last_names(modules),
        )
    owners = [name for name in (parameter.rpartition(".")[0] for parameter in without_file) if name in modules]
    return {name: modules[name] for name in [*_head(model, modules), *ending(modules, train), *owners]}


def _head(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    if output_embeddings(model):
        return []  # predicts tokens: its head is pretrained
    if isinstance(model, PreTrainedModel) and model.base_model is not model:
        return [name for name, module in model.named_children() if name in modules and module is not model.base_model]
    return [name for name in modules if name.rpartition(".")[2] in _HEADS]


def describe_adapters(model: nn.Module) -> str:
    """How much of a model is trained, and what has no adapters, for the log: its matrices, by the ends of their names,
    the largest first."""
    sizes, adapted = Counter[str](), adapted_parameters(model)
    every = shapes(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, shape in every.items():
        own = without_adapters(name)
        if len(shape) > 1 and name not in trained and own not in adapted:
            sizes[own.removesuffix(".weight").rpartition(".")[2]] += shape.numel()
    learned, total = sum(every[name].numel() for name in trained), sum(shape.numel() for shape in every.values())
    rest = ", ".join(f"{name} ({size:,})" for name, size in sizes.most_common(6))
    more = ", …" if len(sizes) > 6 else ""
    return f"lora: {learned:,} of {total:,} parameters are trained; without adapters: {rest or 'none'}{more}"
