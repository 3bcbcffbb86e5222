"""Copies a run's state to host memory, and writes it durably (fsynced) to a folder."""

import json
import shutil
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
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
    FileEntry,
    Manifest,
    Snapshot,
    decode_state,
    encode_state,
    file_entry,
)
from drawbar.checkpoint.part_writer import write_tensors
from drawbar.checkpoint.space import rust_errors_as_oserror
from drawbar.runtime.safetensors_reader import StoredTensors, read_header
from drawbar.util.atomic_files import link_or_copy, sync


def host_copies(
    tensors: Mapping[str, Tensor],
    keeps: bool = True,
    convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor.detach(),
) -> dict[str, Tensor]:
    """Copies in host memory that share no memory with the live tensors, so that training can go on while they are
    written.

    Names that share a tensor share its copy. Views that merely overlap become tensors of their own.

    Args:
        keeps: False on a rank that only takes part in the collectives of ``convert``; it gets an empty dict.
        convert: returns the full tensor (collective if sharded); called once per tensor, in one order on all ranks.
    """
    first = _first_names(tensors)
    copies: dict[str, Tensor] = {}
    for name in unique_names(tensors):
        converted = convert(name, tensors[name])
        if keeps:
            copies[name] = converted.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {name: copies[first[name]] for name in tensors} if keeps else {}


def unique_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors, of tied ones the first."""
    return list(dict.fromkeys(_first_names(tensors).values()))


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each further name of a tied tensor to its first name."""
    return {name: first for name, first in _first_names(tensors).items() if name != first}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each name to the first name of the same tensor (itself, unless the tensor is tied)."""
    seen: dict[Hashable, str] = {}
    return {name: seen.setdefault(_identity(tensor), name) for name, tensor in tensors.items()}


def _identity(tensor: Tensor) -> Hashable:
    # Of a DTensor a rank's part may be empty, and every rank must give the same answer. Empty tensors all live at
    # address 0, which does not tie them; they may be parameters that ZeRO-3 has freed.
    if isinstance(tensor, DTensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint of format 1 into a new folder; each file is fsynced, the manifest last.

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
        save_tensors(folder / name, tensors)
    write_manifest(folder, snapshot.step, [MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE])


def write_manifest(
    folder: Path,
    step: int,
    names: Iterable[str],
    known: Mapping[str, FileEntry] = MappingProxyType({}),
    parts: Mapping[str, int] | None = None,
) -> None:
    """Fsync the files of a checkpoint, then write its manifest, which makes it complete.

    Args:
        names: files that were just written.
        known: entries of files that were written before.
        parts: size of each part file, for a checkpoint of format 2.

    Raises:
        OSError: as ``write_files`` does.
    """
    files = dict(known)
    for name in names:
        sync(folder / name)
        files[name] = file_entry(folder / name)
    manifest = Manifest.of(step, files, None if parts is None else dict(parts))
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    sync(folder / MANIFEST_FILE)
    sync(folder)


def write_with_changed_state(folder: Path, old: Path, changes: dict[str, Any]) -> None:
    """Write a copy of the checkpoint ``old`` with some entries of its state changed. Tensor files are hard links.

    Raises:
        OSError: as ``write_files`` does.
    """
    manifest = Manifest.from_json((old / MANIFEST_FILE).read_bytes())
    state = decode_state((old / STATE_FILE).read_bytes()) | changes
    folder.mkdir()
    for name in manifest.sizes().keys() - {STATE_FILE}:
        link_or_copy(old / name, folder / name)
    (folder / STATE_FILE).write_bytes(encode_state(state))
    linked = {name: entry for name, entry in manifest.files.items() if name != STATE_FILE}
    write_manifest(folder, manifest.step, [STATE_FILE], linked, manifest.parts)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write full tensors to a safetensors file. Tied ones are stored once, their further names in the metadata. Tensors
    that lie in other files are read one by one."""
    if isinstance(tensors, StoredTensors):
        write_tensors(path, tensors)
        return
    first = _first_names(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if first[name] == name}
    aliases = tied_names(tensors)
    with rust_errors_as_oserror(path):
        # "format" is what transformers looks for; it lets from_pretrained read the file as it is
        save_file(stored, path, metadata={"format": "pt", "aliases": json.dumps(aliases)})
    _sort_metadata(path)
    # safetensors makes files that nobody else may read; let the user's umask decide
    shutil.copymode(path.with_name(STATE_FILE), path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata so that equal tensors give equal files: safetensors writes it in random order."""
    with path.open("r+b") as file:
        header, begin = read_header(file.fileno(), path)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if 8 + len(text) <= begin:  # the rest is spaces, which align the tensors
            file.seek(8)
            file.write(text.ljust(begin - 8))
