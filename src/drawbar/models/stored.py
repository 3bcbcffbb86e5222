"""Sharded loading of pretrained models: the model without weights, and lazy access to its weight files.

Together these are equivalent to ``load_pretrained``, which is still needed where weights must be computed from the
stored tensors, and not just read.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from drawbar.models.heads import HEADS, Head, check_head
from drawbar.models.huggingface import from_hub, quiet_transformers, set_fields, warn_of_unused
from drawbar.runtime.pretrained_files import make_model, read_config, read_generation_config
from drawbar.runtime.safetensors_reader import TensorFiles, parameters_on_meta

_ROWS = 512
"""How many rows of two tensors are compared at once."""
_SPECIAL = ("quantization_config", "transformers_weights")
"""Config fields which mean that weights are in other files, or must be computed from the stored tensors."""


def build_meta_model(name: str, head: Head = "causal_lm", find_weights: bool = True, **fields: Any) -> nn.Module:
    """The model of ``load_pretrained`` without its weights: parameters are on the meta device, buffers are real.

    Args:
        name: a folder or a hub name.
        head: what the model is for.
        find_weights: look for the weight files, which downloads them. The files tell which tied weights differ, and
            hold buffers. If False, no weight file is read: ties are as the config says, and buffers as the class makes
            them.
        fields: what the task sets in the config, such as ``num_labels`` or ``id2label``.

    Raises:
        UserError: the model does not exist, is a folder without the safetensors that were to be found, or does not
            have such a head.
    """

    def build(name: str, local_files_only: bool) -> nn.Module:
        config = read_config(name, local_files_only=local_files_only)
        check_head(config, head)
        set_fields(config, fields)
        with quiet_transformers(), parameters_on_meta():
            model = make_model(HEADS[head].model_class, config, dtype=torch.float32)
        model.config.name_or_path = name
        if model.can_generate():
            model.generation_config = read_generation_config(name, local_files_only=local_files_only)
        files = _open_files(name, model, local_files_only) if find_weights else None
        if files is not None:
            _untie_what_differs(model, files)
            _load_buffers(model, files)
        return model.eval()

    return from_hub(build, name)


def stored_tensors(name: str, model: nn.Module) -> TensorFiles | None:
    """The pretrained weights of all parameters of ``model``, under its names and in the types of the files.

    None if the files do not hold all of them as they are: there are new heads or more tokens, or transformers
    computes them from several tensors. ``load_pretrained`` can do that.

    Args:
        name: a folder or a hub name.
        model: as ``build_meta_model`` returns it.

    Raises:
        UserError: the model does not exist, is a folder without safetensors, or has one that is cut short.
    """
    files = from_hub(lambda name, local_files_only: _open_files(name, model, local_files_only), name)
    if files is None:
        return None
    of_parameter: dict[nn.Parameter, list[str]] = defaultdict(list)
    for own, parameter in model.named_parameters(remove_duplicate=False):
        of_parameter[parameter].append(own)
    found: dict[str, str] = {}
    for parameter, names in of_parameter.items():
        # of tied weights, one is stored
        stored = next((own for own in names if own in files), None)
        if stored is None or files.shape(stored) != parameter.shape:
            return None
        found |= dict.fromkeys(names, stored)
    warn_of_unused(name, model, files.keys() - model.state_dict().keys())
    return files.renamed(found)


def _open_files(name: str, model: nn.Module, local_files_only: bool) -> TensorFiles | None:
    """The files' tensors under the model's parameter names; None if loading them takes more than renaming."""
    if not isinstance(model, PreTrainedModel) or any(hasattr(model.config, field) for field in _SPECIAL):
        return None
    paths = _paths(name, local_files_only)
    if paths is None:
        return None
    files = TensorFiles(paths)
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    tensors = model.state_dict()
    own_names = {}
    for stored in files:
        own, converter = rename_source_key(stored, renamings, converters, model.base_model_prefix, tensors)
        if converter is not None:
            return None
        own_names[own] = stored
    return files.renamed(own_names)


def _paths(name: str, local_files_only: bool) -> list[Path] | None:
    """The safetensors files, fetched from the hub if need be; None if transformers may convert other kinds of files.

    Raises:
        OSError: a folder has none.
    """
    options: dict[str, Any] = {"local_files_only": local_files_only}
    whole, index = (
        cached_file(name, file, _raise_exceptions_for_missing_entries=False, **options)
        for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if whole is not None:
        return [Path(whole)]
    if index is not None:
        return [Path(part) for part in get_checkpoint_shard_files(name, index, **options)[0]]
    if Path(name).is_dir():
        raise OSError(f"there is no {SAFE_WEIGHTS_NAME} in {name}")
    return None


def _untie_what_differs(model: PreTrainedModel, files: TensorFiles) -> None:
    """Weights that are tied by the config, and yet differ in the files, are two weights to ``from_pretrained`` too."""
    of_source: dict[str, list[str]] = defaultdict(list)
    for target, source in model.all_tied_weights_keys.items():
        of_source[source].append(target)
    for source, targets in of_source.items():
        first, *others = [own for own in (source, *targets) if own in files] or [source]
        for own in others:
            if not _equal(files, first, own):
                module, _, leaf = own.rpartition(".")
                weight = model.get_parameter(own)
                setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty_like(weight)))
                del model.all_tied_weights_keys[own]


def _equal(files: TensorFiles, first: str, second: str) -> bool:
    if files.shape(first) != files.shape(second):
        return False
    count, *columns = files.shape(first)
    rest = tuple(slice(0, size) for size in columns)
    for start in range(0, count, _ROWS):
        index = (slice(start, start + _ROWS), *rest)
        if not torch.equal(files.read(first, index).float(), files.read(second, index).float()):
            return False
    return True


def _load_buffers(model: PreTrainedModel, files: TensorFiles) -> None:
    """Load stored buffers, such as the logits bias of mBART and Marian; the caller loads the parameters."""
    kept = model.state_dict().keys() & files.keys()
    for name, buffer in model.named_buffers():
        if name in kept and files.shape(name) == buffer.shape:
            buffer.copy_(files[name])
