"""Copy a run's state to host memory, and write it to a folder that survives a power cut."""

import errno
import json
import os
import shutil
from collections.abc import Hashable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

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


def snapshot_to_host(snapshot: Snapshot) -> Snapshot:
    """A copy that shares nothing with the live run: the only time that training waits for a save.

    Names of one tensor stay names of one tensor. Views that merely overlap become tensors of their own.
    Raises TypeError for state that JSON cannot hold, here rather than later in the thread that writes.
    """
    return Snapshot(
        step=snapshot.step,
        model=_to_host(snapshot.model),
        optimizer=_to_host(snapshot.optimizer),
        rng=_to_host(snapshot.rng),
        state=decode_state(encode_state(snapshot.state)),
    )


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    first = _first_names(tensors)
    copies = {
        name: tensors[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name in set(first.values())
    }
    return {name: copies[first[name]] for name in tensors}


def _first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """For every name, the first name of the very same tensor: itself, unless the tensor is tied."""
    seen: dict[Hashable, str] = {}
    return {name: seen.setdefault(_identity(name, tensor), name) for name, tensor in tensors.items()}


def _identity(name: str, tensor: Tensor) -> Hashable:
    # Empty tensors all live at address 0, which does not tie them.
    if tensor.numel() == 0:
        return name
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write a whole checkpoint into a new folder, each file forced to the disk, the manifest last.

    Args:
        folder: must not exist yet.
        snapshot: as ``snapshot_to_host`` returns it.

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


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    first = _first_names(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if first[name] == name}
    aliases = {name: first[name] for name in tensors if first[name] != name}
    with rust_errors(path):
        # "format" is what transformers looks for; it lets from_pretrained read the file as it is
        save_file(stored, path, metadata={"format": "pt", "aliases": json.dumps(aliases)})


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; there is nothing more to do on them.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
