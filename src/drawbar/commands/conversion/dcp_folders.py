"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), in the layout of torch's ``get_state_dict``::

    {"model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor}}, "param_groups": [{"params": [name]}]}}

DCP joins the keys of nested dicts by dots: ``model.lm_head.weight``, ``optimizer.state.lm_head.weight.exp_avg``.
Only one tensor at a time is in memory. For writing, torch plans with meta tensors, and the values of each are read when
it is written; for reading, there is a plan for each tensor.
"""

import pickle
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from drawbar.commands.conversion.foreign_state import ForeignState, check_complete, disk_errors
from drawbar.errors import UserError
from drawbar.optim.state import ADAM_KEYS
from drawbar.runtime.on_demand_tensors import OnDemandTensor, OnDemandTensors
from drawbar.runtime.safetensors_reader import StoredTensors

METADATA_FILE = ".metadata"
_ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Module and name of each class or function that unpickling ``.metadata`` may use; torch's dtypes are allowed, too."""


def write_dcp(folder: Path, model: StoredTensors, optimizer: StoredTensors, param_groups: list[dict[str, Any]]) -> None:
    """Write a checkpoint into an existing empty folder, tensor by tensor. The caller must fsync it.

    Args:
        optimizer: by ``<parameter>/<key>``, such as ``lm_head.weight/exp_avg``.
        param_groups: as ``get_state_dict`` returns them.

    Raises:
        UserError, OSError: what reading a tensor raises, or writing one.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for name in optimizer:
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = _without_value(optimizer, name)
    tree = {
        "model": {name: _without_value(model, name) for name in model},
        "optimizer": {"state": state, "param_groups": param_groups},
    }
    sources = {f"model.{name}": (model, name) for name in model}
    sources |= {f"optimizer.state.{'.'.join(name.rsplit('/', 1))}": (optimizer, name) for name in optimizer}
    # a file for each tensor: torch keeps what it writes to a file in memory until the file is complete
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    with disk_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(tree, storage_writer=writer, planner=_OnDemandSavePlanner(sources), no_dist=True)


def _without_value(tensors: StoredTensors, name: str) -> Tensor:
    return torch.empty(tensors.shape(name), dtype=tensors.dtype(name), device="meta")


class _OnDemandSavePlanner(DefaultSavePlanner):
    """Save planner for a state dict of meta tensors: the values of a tensor are read when it is written.

    Args:
        sources: key in the checkpoint → the tensors to read from, and the name there.
    """

    def __init__(self, sources: Mapping[str, tuple[StoredTensors, str]]) -> None:
        super().__init__()
        self._sources = sources

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._sources:
            return super().lookup_object(index)
        tensors, name = self._sources[index.fqn]
        return tensors[name]


def read_dcp(folder: Path, model: nn.Module) -> ForeignState:
    """The weights and the optimizer state of a checkpoint for ``model``, whatever prefix its keys have.

    Nothing in the folder is executed: ``.metadata`` may only hold what torch writes there, and torch reads the tensors
    with ``weights_only``. Values that are no tensors (parameter groups, schedulers) are left unread.

    Raises:
        UserError: the folder is no such checkpoint, or that of another model or optimizer.
    """
    tensors = _tensors(folder)
    names = list(model.state_dict())
    prefix = _prefix(tensors, names, "weights")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    state_prefix = _prefix_of_moments(tensors, trained)
    optimizer, known, weights_there = {}, set(trained), {prefix + name for name in names}
    for key in tensors:
        parameter, _, kind = key.removeprefix(state_prefix).rpartition(".")
        if key.startswith(state_prefix) and kind in ADAM_KEYS:
            optimizer[f"{parameter}/{kind}"] = key
        elif key.startswith(state_prefix) and parameter in known and key not in weights_there:
            raise UserError(
                f"the optimizer's state is not AdamW's: it keeps {kind} of {parameter}",
                where="SOURCE",
                remedy="only the state of AdamW can be taken over, with exp_avg, exp_avg_sq and step alone; begin a "
                "new run from the weights",
            )
    check_complete(optimizer, lambda name: state_prefix + ".".join(name.rsplit("/", 1)))
    state = tensors.renamed(optimizer)
    weights = tensors.renamed({name: prefix + name for name in names})
    return ForeignState(_most_updates(folder, state), weights, state)


def _most_updates(folder: Path, state: OnDemandTensors) -> int:
    """The number of optimizer steps, which DCP folders do not store: the largest number of updates of any parameter."""
    updates = [state[name] for name in state if name.endswith("/step") and state.shape(name) == torch.Size()]
    steps = [int(count) for count in updates if bool(count.isfinite())]
    if not steps:
        raise UserError(
            "the optimizer's state does not say how often it has updated the parameters",
            where=str(folder),
            remedy="only the state of AdamW can be taken over",
        )
    return max(steps)


def _prefix(tensors: OnDemandTensors, names: list[str], what: str) -> str:
    """The one prefix that all ``names`` have in the checkpoint.

    Raises:
        UserError: no prefix fits all names, or several do.
    """
    found = {key.removesuffix(names[0]) for key in tensors if key == names[0] or key.endswith(f".{names[0]}")}
    complete = [prefix for prefix in sorted(found) if all(prefix + name in tensors for name in names)]
    if len(complete) == 1:
        return complete[0]
    missing = next((name for prefix in sorted(found) for name in names if prefix + name not in tensors), names[0])
    raise _no_one_place(what, complete, missing)


def _prefix_of_moments(tensors: OnDemandTensors, trained: list[str]) -> str:
    """The prefix that most keys of moments have before the name of a trained parameter. (A parameter that never got a
    gradient has no moments, so not all of ``trained`` need be there.)

    Raises:
        UserError: there are no moments, or several prefixes have equally many.
    """
    names, matches = set(trained), Counter[str]()
    for key in tensors:
        name, _, kind = key.rpartition(".")
        beginning = ""
        while kind in ADAM_KEYS and name:
            matches[beginning] += name in names
            first, dot, name = name.partition(".")
            beginning += first + dot
    most = max(matches.values(), default=0)
    found = sorted(prefix for prefix, count in matches.items() if count == most > 0)
    if len(found) == 1:
        return found[0]
    raise _no_one_place("moments of AdamW", found, f"{min(trained)}.exp_avg")


def _no_one_place(what: str, prefixes: list[str], missing: str) -> UserError:
    return UserError(
        f"the {what} of the model are in {len(prefixes)} places of the folder: {', '.join(prefixes)}"
        if prefixes
        else f"the folder does not have the {what} of the model: {missing} is missing",
        where="SOURCE",
        remedy="name the configuration of the model that wrote the folder; the names are those of its parameters, as "
        "torch's get_state_dict gives them",
    )


def _read(reader: dcp.FileSystemReader, metadata: Metadata, name: str, entry: TensorStorageMetadata) -> Tensor:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner.set_up_planner({name: tensor}, metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except OSError as error:
        raise _unreadable(reader.path, f"{name}: {error.strerror or error}: {error.filename or reader.path}") from error
    except Exception as error:
        raise _unreadable(reader.path, f"{name} cannot be read: {error}") from error
    return tensor


def _tensors(folder: Path) -> OnDemandTensors:
    """All tensors of a checkpoint under their keys."""
    try:
        metadata = _read_metadata(folder / METADATA_FILE)
        reader = dcp.FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        return OnDemandTensors(
            {
                name: OnDemandTensor(entry.size, entry.properties.dtype, partial(_read, reader, metadata, name, entry))
                for name, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        )
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no checkpoint of torch.distributed.checkpoint: it has no {METADATA_FILE}",
            where="SOURCE",
            remedy="name the folder that torch.distributed.checkpoint has written",
        ) from None
    except OSError as error:
        raise _unreadable(folder, f"{METADATA_FILE}: {error.strerror}") from error
    except Exception as error:
        raise _unreadable(folder, f"{METADATA_FILE} is not what torch writes: {error}") from error


def _read_metadata(path: Path) -> Metadata:
    with path.open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is something else")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"it names {info.relative_path!r}, which is no file of the folder")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that makes only what torch writes in ``.metadata``: torch's own reader would execute any code in it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unreadable(folder: Any, what: str) -> UserError:
    return UserError(what, where=str(folder), remedy="restore the folder from a copy, or write it anew")
