"""Copy a run's state to host memory, and write it to a folder that survives a power cut."""

import json
import os
import shutil
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from drawbar.checkpoint.format import (
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    STATE_FILE,
    Manifest,
    Snapshot,
    decode_state,
    describe,
    encode_state,
)
from drawbar.checkpoint.space import rust_errors
from drawbar.runtime.safetensors_reader import read_header
from drawbar.util.atomic_files import sync


def host_copies(
    tensors: Mapping[str, Tensor],
    keep: bool = True,
    convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor.detach(),
) -> dict[str, Tensor]:
    """Copies in host memory that share nothing with the live tensors: training goes on while they are written.

    Names that share a tensor share its copy. Views that merely overlap become tensors of their own.

    Args:
        keep: False on a rank that only takes part in ``convert``; it gets nothing.
        convert: returns the full tensor (collective if sharded); called once per tensor, in one order on all ranks.
    """
    first = _first_names(tensors)
    copies: dict[str, Tensor] = {}
    for name in dict.fromkeys(first.values()):
        converted = convert(name, tensors[name])
        if keep:
            copies[name] = converted.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {name: copies[first[name]] for name in tensors} if keep else {}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For every name, the first name of the very same tensor: itself, unless the tensor is tied."""
    seen: dict[Hashable, str] = {}
    return {name: seen.setdefault(_identity(name, tensor), name) for name, tensor in tensors.items()}


def _identity(name: str, tensor: Tensor) -> Hashable:
    if isinstance(tensor, DTensor):
        return id(tensor)  # a rank's part of it may be empty, and every rank must give the same answer
    # Empty tensors all live at address 0, which does not tie them.
    if tensor.numel() == 0:
        return name
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write a whole checkpoint into a new folder, each file forced to the disk, the manifest last.

    Args:
        folder: must not exist yet.
        snapshot: in host memory; its tensors must not change meanwhile.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    folder.mkdir()
    (folder / STATE_FILE).write_bytes(encode_state(snapshot.state))
    for name, tensors in (
        (MODEL_FILE, snapshot.model),
        (OPTIMIZER_FILE, snapshot.optimizer),
        (RNG_FILE, snapshot.rng),
    ):
        _save_tensors(folder / name, tensors)
        # safetensors makes files that nobody else may read; let the user's umask decide
        shutil.copymode(folder / STATE_FILE, folder / name)

    files = {}
    for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE):
        sync(folder / name)
        files[name] = describe(folder / name)
    (folder / MANIFEST_FILE).write_bytes(Manifest.of(snapshot.step, files).to_json())
    sync(folder / MANIFEST_FILE)
    sync(folder)


def write_amended(folder: Path, old: Path, changes: dict[str, Any]) -> None:
    """Write a checkpoint that is ``old`` with some entries of its state changed. Tensors are linked, not written again.

    Raises:
        OSError: as ``write_files`` does.
    """
    manifest = Manifest.from_json((old / MANIFEST_FILE).read_bytes())
    state = decode_state((old / STATE_FILE).read_bytes()) | changes
    folder.mkdir()
    for name in manifest.files.keys() - {STATE_FILE}:
        _link(old / name, folder / name)
    (folder / STATE_FILE).write_bytes(encode_state(state))
    sync(folder / STATE_FILE)
    files = manifest.files | {STATE_FILE: describe(folder / STATE_FILE)}
    (folder / MANIFEST_FILE).write_bytes(Manifest.of(manifest.step, files).to_json())
    sync(folder / MANIFEST_FILE)
    sync(folder)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; where the file system has no such links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
        sync(target)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    first = _first_names(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if first[name] == name}
    aliases = {name: first[name] for name in tensors if first[name] != name}
    with rust_errors(path):
        # "format" is what transformers looks for; it lets from_pretrained read the file as it is
        save_file(stored, path, metadata={"format": "pt", "aliases": json.dumps(aliases)})
    _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Give equal tensors equal files: safetensors writes the metadata in an order that every process chooses anew."""
    with path.open("r+b") as file:
        header, begin = read_header(file.fileno(), path)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if 8 + len(text) <= begin:  # the rest is spaces, which align the tensors
            file.seek(8)
            file.write(text.ljust(begin - 8))
