"""Describes a rank's part of each tensor as boxes, and assigns each box to one rank, which writes it to a checkpoint.

The local shard of a DTensor is a box. Flat partitions, such as those of ZeRO, are split into boxes: a range of elements
of a matrix gives at most three. A box held by several ranks (replicas) is assigned to one of them such that all ranks
write about the same number of bytes.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drawbar.distributed.device_mesh import local_shape_and_offset
from drawbar.distributed.process_group import Distributed
from drawbar.parallel.tensor import FusedLayout

Ints: TypeAlias = npt.NDArray[np.int64]

_MAX_BANDS = 8
_MIN_BAND_BYTES = 2**20
"""Minimum size of a band, in bytes. A reader of some of its rows reads up to one extra checksum block
(``checkpoint.block_checksums``) at each end, which would be too much overhead for smaller bands."""


@dataclass(frozen=True)
class LocalBox:
    """A box of a full tensor, held by this rank and possibly by others."""

    name: str
    """Name of the full tensor: `lm_head.weight`; for optimizer state, `lm_head.weight/exp_avg`."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Start of the box, one number per dimension."""
    sizes: tuple[int, ...]
    """Sizes of the box, one per dimension."""
    dtype: torch.dtype
    get: Callable[[], Tensor] = field(repr=False)
    """Returns the box: a view of the live tensor if possible."""
    is_collective: bool = False
    """Whether ``get`` is collective: it gathers the tensor, so every rank that holds a shard must call it."""

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> int:
        """A 64-bit hash of name, offset and sizes."""
        text = f"{self.name} {self.offset} {self.sizes}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def boxes_of(name: str, tensor: Tensor, fused: FusedLayout | None = None) -> Iterator[LocalBox]:
    """The boxes of this rank's shard of a DTensor (several for a ``fused`` one); for a plain tensor, a single box that
    covers it."""
    if not isinstance(tensor, DTensor):
        yield whole_box(name, tensor)
        return
    local = tensor.detach().to_local()
    shape, (sizes, offset) = tuple(tensor.shape), local_shape_and_offset(tensor)
    for part, at in boxes_of_shard(sizes, offset, shape, fused):
        get = partial(local.__getitem__, part)
        if prod(_sizes(part)) or not prod(shape):  # ranks beyond the rows of a short tensor have no part of it
            yield LocalBox(name, shape, at, _sizes(part), tensor.dtype, get)


def whole_box(name: str, tensor: Tensor) -> LocalBox:
    """The box of an unsharded tensor."""
    shape = tuple(tensor.shape)
    return LocalBox(name, shape, (0,) * len(shape), shape, tensor.dtype, tensor.detach)


def bands(box: LocalBox) -> Iterator[LocalBox]:
    """Split the box of a large matrix into boxes of some columns each (bands), so that a tensor-parallel rank, which
    needs only some columns, reads little more than these. A box that must be gathered is not split."""
    count = 0 if box.is_collective or len(box.sizes) < 2 else min(_MAX_BANDS, box.bytes // _MIN_BAND_BYTES)
    count = 1 << max(0, count.bit_length() - 1)  # a power of two, as tensor-parallel degrees usually are
    while box.sizes[1:2] and box.sizes[1] % count:
        count //= 2
    if count == 1:
        yield box
        return
    width = box.sizes[1] // count
    for first in range(0, box.sizes[1], width):
        offset = (box.offset[0], box.offset[1] + first, *box.offset[2:])
        sizes = (box.sizes[0], width, *box.sizes[2:])
        yield replace(box, offset=offset, sizes=sizes, get=partial(_columns_of, box.get, first, width))


def _columns_of(get: Callable[[], Tensor], first: int, width: int) -> Tensor:
    return get().narrow(1, first, width)


def boxes_of_shard(
    sizes: Sequence[int], offset: Sequence[int], shape: Sequence[int], fused: FusedLayout | None
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes of a shard: for each, its slices in the shard and its offset in the full tensor.

    Args:
        sizes: sizes of the shard.
        offset: offset of the shard, in the layout of the DTensor (a fused one holds its rows in another order).
        shape: shape of the full tensor.
    """
    every = tuple(slice(0, size) for size in sizes)
    if fused is None:
        yield every, tuple(offset)
        return
    begin = offset[fused.dim]
    for sharded, logical, length in fused.pieces(begin, begin + sizes[fused.dim], shape[fused.dim]):
        part = (*every[: fused.dim], slice(sharded - begin, sharded - begin + length), *every[fused.dim + 1 :])
        yield part, (*offset[: fused.dim], logical, *offset[fused.dim + 1 :])


def flat_boxes(name: str, shape: Sequence[int], start: int, flat: Tensor) -> Iterator[LocalBox]:
    """The boxes of a range of a tensor's elements in row-major order.

    Args:
        start: index of the first element.
        flat: the elements (1-d). Elements beyond the end of the tensor are padding, and are ignored.
    """
    shape = tuple(shape)
    if prod(shape) == 0:  # an empty tensor is one empty box, on every rank
        yield LocalBox(name, shape, (0,) * len(shape), shape, flat.dtype, lambda: flat.detach()[:0].view(shape))
        return
    end = min(start + flat.numel(), prod(shape))
    for offset, sizes in boxes_of_range(shape, start, max(start, end)):
        begin = sum(number * prod(shape[dim + 1 :]) for dim, number in enumerate(offset))
        get = partial(_box_of_flat, flat.detach(), begin - start, sizes)
        yield LocalBox(name, shape, offset, sizes, flat.dtype, get)


def _box_of_flat(flat: Tensor, begin: int, sizes: tuple[int, ...]) -> Tensor:
    return flat.narrow(0, begin, prod(sizes)).view(sizes)


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the elements ``start`` to ``end`` of a tensor, in row-major order, into boxes: (offset, sizes) of each."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,)[: len(shape)], (end - start,)[: len(shape)]
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # rows first to last (exclusive) are entirely in the range
    if first > last:  # the range is within row ``last``
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = shape[1:]
        yield (first, *(0,) * len(rest)), (last - first, *rest)
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(
    shape: tuple[int, ...], number: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, sizes in boxes_of_range(shape[1:], start, end):
        yield (number, *offset), (1, *sizes)


def _sizes(part: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)


class WriterAssignment:
    """Assigns each box to one of the ranks that hold it, which writes it to checkpoints."""

    def __init__(self, world: Distributed) -> None:
        self._world = world
        self._keys: list[int] | None = None
        self._assigned_keys: set[int] = set()

    def chosen(self, boxes: Sequence[LocalBox]) -> list[bool]:
        """For each of this rank's ``boxes``, whether this rank writes it; exactly one rank writes each box. Collective.
        The ranks exchange their boxes only when these change: at the first call, and after the first step, which
        creates the optimizer state.
        """
        keys = [box.key for box in boxes]
        if self._world.sum(keys != self._keys):
            bytes_of = [box.bytes for box in boxes]
            all_boxes = self._world.all_gather((np.array(keys, np.int64), np.array(bytes_of, np.int64)))
            own = assign_writers([keys for keys, _ in all_boxes], [sizes for _, sizes in all_boxes])[self._world.rank]
            self._keys, self._assigned_keys = keys, set(own.tolist())
        return [key in self._assigned_keys for key in keys]


def assign_writers(keys: Sequence[Ints], sizes: Sequence[Ints]) -> list[Ints]:
    """Assign each box to one of its holders: largest first, to the rank with the fewest bytes to write so far.

    Args:
        keys: for each rank, the keys of the boxes that it holds.
        sizes: their sizes, in bytes.

    Returns:
        For each rank, the keys of the boxes that it writes.
    """
    key = np.concatenate(list(keys))
    rank = np.repeat(np.arange(len(keys)), [len(some) for some in keys])
    size = np.concatenate(list(sizes))
    order = np.lexsort((rank, key))
    key, rank, size = key[order], rank[order], size[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
    count = np.diff(np.r_[first, len(key)])
    alone = first[count == 1]
    load = np.bincount(rank[alone], size[alone], len(keys))
    chosen = [alone]
    several = np.flatnonzero(count > 1)
    for group in several[np.argsort(-size[first[several]], kind="stable")]:
        begin = first[group]
        holders = rank[begin : begin + count[group]]
        at = begin + load[holders].argmin()
        load[rank[at]] += size[at]
        chosen.append(np.array([at]))
    places = np.concatenate(chosen)
    return [key[places[rank[places] == number]] for number in range(len(keys))]
