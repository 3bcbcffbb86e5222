"""Checkpoints of ``torch.distributed.checkpoint`` (DCP). They are written in the layout of torch's
``get_state_dict``, without ``param_groups``::

    {"model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor}}}}

DCP joins the keys of nested dicts by dots: ``model.lm_head.weight``,
``optimizer.state.lm_head.weight.exp_avg``. Only one tensor at a time is in memory. For writing, torch plans
with meta tensors, and the values of each are read when it is written; for reading, there is a plan for each
tensor."""

import pickle
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from drawbar.errors import UserError
from drawbar.runtime.safetensors_reader import OnDemandTensor, OnDemandTensors, StoredTensors

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
"""Module and name of each class or function that unpickling ``.metadata`` may use; torch's dtypes are
allowed, too."""


def write_dcp(folder: Path, model: StoredTensors, optimizer: StoredTensors) -> None:
    """Write a checkpoint into an existing empty folder, tensor by tensor. The caller must fsync it.

    Args:
        optimizer: by ``<parameter>/<key>``, such as ``lm_head.weight/exp_avg``.

    Raises:
        UserError, CheckpointException: what reading a tensor raises, or writing one.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for name in optimizer:
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = _without_value(optimizer, name)
    tree = {"model": {name: _without_value(model, name) for name in model}, "optimizer": {"state": state}}
    sources = {f"model.{name}": (model, name) for name in model}
    sources |= {f"optimizer.state.{'.'.join(name.rsplit('/', 1))}": (optimizer, name) for name in optimizer}
    # a file for each tensor: torch keeps what it writes to a file in memory until the file is complete
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    with warnings.catch_warnings():
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


def read_dcp(folder: Path) -> OnDemandTensors:
    """All tensors of a checkpoint by their keys; what is no tensor is left unread.

    Nothing in the folder is executed: ``.metadata`` may only hold what torch writes there, and torch reads
    the tensors with ``weights_only``.

    Raises:
        UserError: the folder is no such checkpoint, or cannot be read; reading a tensor raises it, too.
    """
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
    """Unpickler that makes only what torch writes in ``.metadata``: torch's own reader would execute any code
    in it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unreadable(folder: Any, what: str) -> UserError:
    return UserError(what, where=str(folder), remedy="restore the folder from a copy, or write it anew")
