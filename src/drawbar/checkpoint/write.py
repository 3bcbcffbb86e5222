"""Writes a checkpoint durably (fsynced): the part of each process that saves, then the files that all parts share.

A process that writes alone calls ``write_files``. The ranks of a run make the same steps in phases
(``train.checkpoint_layouts``): rank 0 makes the folder, every rank calls ``write_part``, and rank 0 calls
``write_common_files``. The manifest comes last, and then the folder is renamed (``CheckpointDirectory``): so the
checkpoint is complete or absent whenever a process is killed.
"""

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import Tensor

from drawbar.checkpoint.block_checksums import BlockHasher
from drawbar.checkpoint.format import (
    CHECKSUMS_SUFFIX,
    INDEX_FILE,
    MANIFEST_FILE,
    RNG_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    Snapshot,
    decode_state,
    encode_state,
    file_entry,
)
from drawbar.checkpoint.tensor_index import KINDS, PartFile, PartRecord, TensorIndex, TensorInfo, stored_order
from drawbar.runtime.safetensors_reader import STORED_DTYPES, TensorBox, bytes_of, tied_names, unique_names
from drawbar.util.atomic_files import link_or_copy, sync

_DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_WRITE_BYTES = 16 * 2**20
"""Upper limit on the bytes of one write call."""
_SMALL_BYTES = _WRITE_BYTES // 32
"""Upper limit on the bytes of a tensor that is copied to be written together with others."""
_SYNC_BYTES = 64 * 2**20
"""Bytes written between two fsyncs, at least."""
_VISIBLE_WITHIN_SECONDS = 60.0
"""Seconds within which a file written by another node must become visible: network file systems cache folder listings
for up to a minute (``acdirmax``)."""


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint into a new folder, as one part.

    Args:
        folder: must not exist yet.
        snapshot: in host memory; its tensors must not change meanwhile.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    folder.mkdir()
    model, optimizer = whole_boxes(snapshot.model), whole_boxes(snapshot.optimizer)
    record = write_part(folder, 0, model, optimizer, tied_names(snapshot.model))
    write_common_files(folder, snapshot.step, [record], snapshot.state, snapshot.rng)


def write_part(
    folder: Path,
    rank: int,
    model: Iterable[TensorBox],
    optimizer: Iterable[TensorBox],
    aliases: Mapping[str, str],
) -> PartRecord:
    """Write a rank's part into the folder of a new checkpoint; each file is fsynced.

    Args:
        folder: where all parts are written: ``CheckpointDirectory.begin_write`` has made it.
        model, optimizer: boxes in host memory, which must not change meanwhile. Large contiguous ones are written
            without a copy; of the others some 16 MiB are copied at a time.
        aliases: tied weights: another name → the name that is stored, by this rank or another one.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    files = []
    for kind, tensors in zip(KINDS, (model, optimizer), strict=True):
        boxes = sorted(filter(_is_stored, tensors), key=lambda box: (*stored_order(_tensor_info(box)), box.offset))
        if boxes:
            files.append(_write_file(folder / f"{kind}-{rank:05d}.safetensors", boxes))
    return PartRecord(rank, tuple(files), dict(aliases))


def whole_boxes(tensors: Mapping[str, Tensor]) -> list[TensorBox]:
    """Full tensors as boxes; tied ones once."""
    whole = ((name, tensors[name]) for name in unique_names(tensors))
    return [TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in whole]


def _is_stored(box: TensorBox) -> bool:
    """False for an empty box of a tensor that has elements."""
    return box.data.numel() > 0 or 0 in box.shape


def _tensor_info(box: TensorBox) -> TensorInfo:
    return TensorInfo(box.name, _DTYPE_NAMES[box.data.dtype], tuple(box.shape))


def _write_file(path: Path, boxes: list[TensorBox]) -> PartFile:
    header = _header(boxes, {"format": "pt"})
    with path.open("wb", buffering=0) as file:
        contents = chain.from_iterable(_contents(box.data) for box in boxes)
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


def write_common_files(
    folder: Path,
    step: int,
    records: Iterable[PartRecord],
    state: dict[str, Any],
    rng: Mapping[str, Tensor],
) -> None:
    """Write index, state, RNG states and manifest into the folder of the parts, once all of them are on the disk.

    Args:
        records: one from every rank that has written; consumed one by one.
        state, rng: as in ``Snapshot``.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
        ValueError: the parts do not cover all tensors.
    """
    parts: dict[str, int] = {}
    files: dict[str, FileEntry] = {}

    def listed() -> Iterable[PartRecord]:
        for record in records:
            for file in record.files:
                parts[file.name] = file.size
                files[file.name + CHECKSUMS_SUFFIX] = file.sums
            yield record

    index = TensorIndex.merge(listed())
    _wait_until_visible(folder, parts | {name: entry.size for name, entry in files.items()})
    (folder / STATE_FILE).write_bytes(encode_state(state))
    (folder / INDEX_FILE).write_bytes(index.to_json())
    (folder / RNG_FILE).write_bytes(save(dict(rng)))
    _write_manifest(folder, step, [STATE_FILE, INDEX_FILE, RNG_FILE], files, parts)


def _wait_until_visible(folder: Path, sizes: Mapping[str, int]) -> None:
    """Wait until the files that other nodes wrote are visible here. Raises OSError, naming the first that is not."""
    end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    for name, size in sizes.items():
        while (found := _size(folder / name)) != size:
            if time.monotonic() > end:
                raise OSError(errno.EIO, f"{name} has {found} bytes, and its rank has written {size}")
            time.sleep(0.1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write_manifest(
    folder: Path, step: int, names: Iterable[str], known: Mapping[str, FileEntry], parts: dict[str, int]
) -> None:
    """Fsync the files of a checkpoint, then write its manifest, which makes it complete.

    Args:
        names: files that were just written.
        known: entries of files that were written before.
        parts: size of each part file.
    """
    files = dict(known)
    for name in names:
        sync(folder / name)
        files[name] = file_entry(folder / name)
    (folder / MANIFEST_FILE).write_bytes(Manifest.of(step, files, parts).to_json())
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
    _write_manifest(folder, manifest.step, [STATE_FILE], linked, manifest.parts)
