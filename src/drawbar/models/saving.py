"""Save models in the format of transformers: names, files and index of ``save_pretrained``, one file at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from drawbar.errors import UserError

Tensors = dict[str, Tensor]


@torch.no_grad()
def save_transformers(
    model: PreTrainedModel, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype, largest_file: str
) -> None:
    """Write what ``save_pretrained`` writes. Holds one file's weights and one tensor at a time; the whole model where
    transformers converts all of its tensors together.

    Args:
        model: has names, shapes, ties and config. Its parameters are not read, and may be on the meta device.
        read: from a name of the model's ``state_dict`` to the full tensor, in host memory.
        folder: exists, and is empty.
        dtype: what floating-point weights are rounded to.
        largest_file: the most that one file of weights may hold (``5GB``); a tensor that is larger has its own file.

    Raises:
        UserError: a number is too large for ``dtype``.
        OSError, SafetensorError: the disk takes no more.
    """
    config: Any = model.config
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    shapes = _shapes(model, dtype)
    groups = _groups(model, shapes)
    split = split_torch_state_dict_into_shards(
        {name: tensor for group in groups for name, tensor in group.stored.items()}, max_shard_size=largest_file
    )
    for file, names in split.filename_to_tensors.items():
        wanted, content = set(names), Tensors()
        for group in groups:
            if not wanted.isdisjoint(group.stored):
                own = {name: rounded(name, read(name), dtype) for name in group.own}
                stored = own if group.as_it_is else revert_weight_conversion(model, own)
                content |= {name: tensor.contiguous() for name, tensor in stored.items() if name in wanted}
                del own, stored
        save_file(content, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in ``dtype``, if it holds floating-point numbers. Raises UserError if one of them becomes infinite."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    if not _is_finite(found) and _is_finite(tensor):
        raise UserError(
            f"{name} has numbers too large for {str(dtype).removeprefix('torch.')}",
            where="--dtype",
            remedy="export it in bf16, which reaches as far as fp32, or in fp32",
        )
    return found


def _is_finite(tensor: Tensor) -> bool:
    """Without a second tensor of its size, which ``isfinite`` makes."""
    return tensor.numel() == 0 or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _shapes(model: PreTrainedModel, dtype: torch.dtype) -> Tensors:
    """What is saved of a model, as tensors without values: of weights that its class ties, only the first."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    ignored = set(model._keys_to_ignore_on_save or ())
    names = [name for name in model.state_dict() if name not in ignored]
    # a weight that no declaration of the class ties is stored under each of its names, as loading would not tie it
    kept = {id(own[name]) for name in names if name not in model.all_tied_weights_keys}
    stored = [name for name in names if name not in model.all_tied_weights_keys or id(own[name]) not in kept]
    return {name: torch.empty(own[name].shape, dtype=_stored_dtype(own[name], dtype), device="meta") for name in stored}


def _stored_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class _Group:
    """Model tensors that are converted together, and the stored tensors they become; usually one to one."""

    own: list[str]
    stored: Tensors
    """Name in the files → its shape and type, without values."""

    @property
    def as_it_is(self) -> bool:
        return self.own == list(self.stored)


def _groups(model: PreTrainedModel, shapes: Tensors) -> list[_Group]:
    """Groups of tensors to convert together: transformers stores the weights of some architectures under other names
    than its models have, or split differently (the experts of a mixture one by one)."""
    wanted = revert_weight_conversion(model, dict(shapes))
    if _described(wanted) == _described(shapes):
        return [_Group([name], {name: tensor}) for name, tensor in shapes.items()]
    together: dict[str, list[str]] = {}
    try:
        for name, tensor in shapes.items():
            together.setdefault(min(revert_weight_conversion(model, {name: tensor})), []).append(name)
        groups = [
            _Group(names, revert_weight_conversion(model, {name: shapes[name] for name in names}))
            for names in together.values()
        ]
    except Exception:  # noqa: BLE001 - some conversion needs more tensors; it does not say which
        groups = []
    found = {name: tensor for group in groups for name, tensor in group.stored.items()}
    fits = _described(found) == _described(wanted) and sum(len(group.stored) for group in groups) == len(wanted)
    return groups if fits else [_Group(list(shapes), wanted)]


def _described(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
