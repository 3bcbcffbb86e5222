"""Encoded samples in memory, numbered, counted and fingerprinted."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawbar.data.sources import Record
from drawbar.errors import UserError

Sample = dict[str, Any]
"""One encoded example: each field a numpy array, or a plain bool, int, float or str."""
Encode = Callable[[Record], Any]
"""record → a sample, a list of samples, or None to leave the record out."""
Progress = Callable[[int, int], None]
"""Told (records done, records in all) now and then."""

RESERVED_FIELDS = ("id", "ids", "segment_ids")
PROGRESS_EVERY = 256


@dataclass(frozen=True)
class EncodedDataset:
    """Samples 0..n-1. An item is the sample's fields, its number ``id``, and ``ids``, the list of that one number."""

    samples: list[Sample]
    record_of: NDArray[np.int64]
    """Shape (samples,): which record each sample came from."""
    lengths: NDArray[np.int64]
    """Shape (samples,): tokens in ``input_ids``, or 1 where a sample has none."""
    dropped: int
    """Records that gave no sample."""
    fingerprint: str
    """Hex digest of every field of every sample in order, the same in every process."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return {**self.samples[index], "id": index, "ids": [index]}


def encode_records(
    records: Sequence[Record], encode: Encode, *, describe: Callable[[int], str], progress: Progress | None = None
) -> EncodedDataset:
    """Encode every record, in order.

    Args:
        records: plain dicts.
        encode: see ``Encode``. Lists and tensors become numpy arrays.
        describe: says where record i came from, for messages.
        progress: see ``Progress``; the last call is (n, n).

    Raises:
        UserError: ``encode`` failed on a record or gave something else than it should, or no sample is left.
    """
    samples: list[Sample] = []
    record_of: list[int] = []
    dropped = 0
    for index, record in enumerate(records):
        encoded = _encode_one(record, encode, describe, index)
        samples += encoded
        record_of += [index] * len(encoded)
        dropped += not encoded
        if progress and (index + 1) % PROGRESS_EVERY == 0:
            progress(index + 1, len(records))
    if progress:
        progress(len(records), len(records))
    if not samples:
        raise UserError(
            f"no samples: the task's encode left out all {len(records)} records",
            where=describe(0) if len(records) else None,
            remedy="check that the records hold what the task expects, and that they are long enough",
        )
    return EncodedDataset(
        samples=samples,
        record_of=np.array(record_of, dtype=np.int64),
        lengths=np.array([len(sample.get("input_ids", (0,))) for sample in samples], dtype=np.int64),
        dropped=dropped,
        fingerprint=_fingerprint(samples),
    )


def _encode_one(record: Record, encode: Encode, describe: Callable[[int], str], index: int) -> list[Sample]:
    """The samples of one record; every failure names the record."""
    try:
        encoded = encode(record)
        if encoded is None:
            return []
        return [_compact(sample) for sample in (encoded if isinstance(encoded, list) else [encoded])]
    except UserError as error:
        raise UserError(error.what, where=error.where or describe(index), remedy=error.remedy) from error
    except Exception as error:
        raise UserError(
            f"the task's encode failed on a record: {type(error).__name__}: {error}",
            where=describe(index),
            remedy="mend the record, or let encode return None to leave it out",
        ) from error


def _compact(sample: Any) -> Sample:
    """The sample with numpy arrays for its lists and tensors."""
    if not isinstance(sample, Mapping):  # a tokenizer's BatchEncoding is a mapping, but no dict
        raise UserError(
            f"the task's encode returned {type(sample).__name__}",
            remedy="return a dict of arrays, a list of such dicts, or None to leave the record out",
        )
    taken = [name for name in RESERVED_FIELDS if name in sample]
    if taken:
        raise UserError(
            f"a sample has a field {taken[0]!r}, a name that drawbar fills in itself",
            remedy="give the field another name in the task's encode",
        )
    compact = {name: _field(name, value) for name, value in sample.items()}
    tokens = compact.get("input_ids")
    if tokens is not None and (not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not len(tokens)):
        raise UserError(
            "the input_ids of a sample are not a list of one or more token numbers",
            remedy="let the task's encode return one sample without padding, or None where there are no tokens",
        )
    return compact


def _field(name: str, value: Any) -> Any:
    """A plain scalar as it is; anything else as an array. Integers and floats of Python take 32 bits where they fit."""
    if isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biufU":
        raise UserError(
            f"the field {name!r} of a sample is {type(value).__name__}, which is neither numbers nor text",
            remedy="return numbers, strings, or lists and arrays of them",
        )
    if array.ndim == 0:
        return array.item()
    if isinstance(value, list | tuple):
        return _narrow(array)
    return array


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype == np.float64:
        return array.astype(np.float32)
    limits = np.iinfo(np.int32)
    fits = array.dtype == np.int64 and array.size and limits.min <= array.min() and array.max() <= limits.max
    return array.astype(np.int32) if fits else array


def _fingerprint(samples: list[Sample]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(b"sample\n")
        for name in sorted(sample):
            value = sample[name]
            if isinstance(value, np.ndarray):
                digest.update(f"{name!r} {value.dtype.str} {value.shape}\n".encode())
                digest.update(value.tobytes())
            else:
                digest.update(f"{name!r} {type(value).__name__} {value!r}\n".encode())
    return digest.hexdigest()
