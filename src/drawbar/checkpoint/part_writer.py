"""Writes one rank's part of a checkpoint: two safetensors files, and the checksums of their blocks."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drawbar.checkpoint.block_checksums import BlockHasher
from drawbar.checkpoint.format import CHECKSUMS_SUFFIX, file_entry
from drawbar.checkpoint.part_record import PartFile, PartRecord, TensorInfo
from drawbar.checkpoint.tensor_index import KINDS, stored_order
from drawbar.runtime.safetensors_reader import STORED_DTYPES, StoredTensors, bytes_of
from drawbar.runtime.tensor_boxes import TensorBox
from drawbar.util.atomic_files import sync

_DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_WRITE_BYTES = 16 * 2**20
"""Upper limit on the bytes of one write call."""
_SMALL_BYTES = _WRITE_BYTES // 32
"""Upper limit on the bytes of a tensor that is copied to be written together with others."""
_SYNC_BYTES = 64 * 2**20
"""Bytes written between two fsyncs, at least."""


def write_part(
    folder: Path,
    rank: int,
    model: Iterable[TensorBox],
    optimizer: Iterable[TensorBox],
    aliases: Mapping[str, str],
    load: Callable[[TensorBox], Tensor] = lambda box: box.data,
) -> PartRecord:
    """Write a rank's part into the folder of a new checkpoint; each file is fsynced.

    Args:
        folder: where all parts are written: ``CheckpointDirectory.begin_write`` has made it.
        model, optimizer: boxes in host memory, which must not change meanwhile. Large contiguous
            ones are written without a copy; of the others some 16 MiB are copied at a time.
        aliases: tied weights: another name → the name that is stored, by this rank or another one.
        load: returns the values of a box when it is written, for boxes of ``meta_boxes``.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    files = []
    for kind, tensors in zip(KINDS, (model, optimizer), strict=True):
        boxes = sorted(filter(_is_stored, tensors), key=lambda box: (*stored_order(_tensor_info(box)), box.offset))
        if boxes:
            files.append(_write_file(folder / f"{kind}-{rank:05d}.safetensors", boxes, load))
    return PartRecord(rank, tuple(files), dict(aliases))


def meta_boxes(tensors: StoredTensors) -> list[TensorBox]:
    """Full tensors as boxes without values (meta tensors) for ``write_part``, whose ``load`` reads each. Tied ones
    once."""
    tied = tensors.tied()
    return [
        TensorBox(
            name,
            tuple(tensors.shape(name)),
            (0,) * len(tensors.shape(name)),
            torch.empty(tensors.shape(name), dtype=tensors.dtype(name), device="meta"),
        )
        for name in tensors
        if name not in tied
    ]


def write_tensors(path: Path, tensors: StoredTensors) -> None:
    """Write a file of format 1 tensor by tensor, for models larger than the memory.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    boxes = sorted(meta_boxes(tensors), key=lambda box: stored_order(_tensor_info(box)))
    header = _header(boxes, {"aliases": json.dumps(tensors.tied()), "format": "pt"})
    with path.open("wb", buffering=0) as file:
        contents = chain.from_iterable(_contents(tensors[box.name]) for box in boxes)
        _write_and_sync(file.fileno(), _write_buffers(chain((memoryview(header),), contents)))


def _is_stored(box: TensorBox) -> bool:
    """False for an empty box of a tensor that has elements."""
    return box.data.numel() > 0 or 0 in box.shape


def _tensor_info(box: TensorBox) -> TensorInfo:
    return TensorInfo(box.name, _DTYPE_NAMES[box.data.dtype], tuple(box.shape))


def _write_file(path: Path, boxes: list[TensorBox], load: Callable[[TensorBox], Tensor]) -> PartFile:
    header = _header(boxes, {"format": "pt"})
    with path.open("wb", buffering=0) as file:
        contents = chain.from_iterable(_contents(load(box)) for box in boxes)
        digests = _write_and_sync(file.fileno(), _write_buffers(chain((memoryview(header),), contents)))
        size = file.tell()
    sums = path.with_name(path.name + CHECKSUMS_SUFFIX)
    sums.write_bytes(digests)
    sync(sums)
    return PartFile(
        name=path.name,
        size=size,
        begin=len(header),
        sums=file_entry(sums),
        tensors=tuple(map(_tensor_info, boxes)),
        offsets=np.array([number for box in boxes for number in box.offset], dtype=np.int64),
        sizes=np.array([number for box in boxes for number in box.data.shape], dtype=np.int64),
    )


def _write_and_sync(descriptor: int, pieces: Iterable[memoryview]) -> bytes:
    """Write a file and fsync it. Returns the checksums of its blocks. A second thread computes the checksums meanwhile,
    and a third one fsyncs what is written so far, so that the disk is busy from the beginning.
    """
    hasher = BlockHasher()
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as syncing:
        hashed: Future[None] | None = None
        synced: Future[None] | None = None
        unsynced = 0
        for piece in pieces:
            if hashed is not None:
                hashed.result()
            hashed = hashing.submit(hasher.update, piece)
            _write_all(descriptor, piece)
            unsynced += len(piece)
            if unsynced >= _SYNC_BYTES and (synced is None or synced.done()):
                if synced is not None:
                    synced.result()  # the kernel reports a write error only once: it must not be lost
                synced, unsynced = syncing.submit(os.fdatasync, descriptor), 0
        for task in filter(None, (hashed, synced)):
            task.result()
    os.fsync(descriptor)
    return hasher.digests()


def _contents(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, elements in row-major order: without a copy, or, where it is not contiguous (columns of a
    matrix), copied some rows at a time."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        yield bytes_of(tensor)
        return
    for rows in tensor.split(max(1, _WRITE_BYTES // (tensor.nbytes // len(tensor)))):
        yield bytes_of(rows.contiguous())


def _write_buffers(contents: Iterable[memoryview]) -> Iterator[memoryview]:
    """The buffers for the write calls: slices of large tensors without a copy, and small tensors copied together."""
    small = bytearray()
    for content in contents:
        is_small = len(content) <= _SMALL_BYTES
        if small and (not is_small or len(small) + len(content) > _WRITE_BYTES):
            yield memoryview(small)
            small = bytearray()
        if is_small:
            small += content
        else:
            for first in range(0, len(content), _WRITE_BYTES):
                yield content[first : first + _WRITE_BYTES]
    if small:
        yield memoryview(small)


def _header(boxes: list[TensorBox], metadata: Mapping[str, str]) -> bytes:
    """The safetensors header: length of the JSON in 8 bytes, then the JSON, padded with blanks so that tensors are
    aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for box in boxes:
        key = stored_key(box.name, box.shape, box.offset, box.data.shape)
        if key in entries:
            raise ValueError(f"{key} was given twice")
        begin, end = end, end + box.data.nbytes
        entries[key] = {
            "dtype": _DTYPE_NAMES[box.data.dtype],
            "shape": list(box.data.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def stored_key(name: str, shape: Iterable[int], offset: Iterable[int], sizes: Iterable[int]) -> str:
    """The key of a box in its file: the tensor's name if the box is the full tensor, else ``name@512,0``."""
    return name if tuple(sizes) == tuple(shape) else f"{name}@{','.join(map(str, offset))}"


def _write_all(descriptor: int, content: memoryview) -> None:
    while len(content) > 0:
        content = content[os.write(descriptor, content) :]
