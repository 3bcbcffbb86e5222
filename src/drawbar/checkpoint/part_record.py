"""``PartRecord``: the message in which a rank describes the part it has written, for the rank that merges the index."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drawbar.checkpoint.format import FileEntry

Numbers = NDArray[np.int64]

_CACHED_TEXTS = 2**16
"""Size of the caches of tensor descriptions: all ranks name the same tensors."""


class TensorInfo(NamedTuple):
    """Name, dtype and full (unsharded) shape of a tensor of the model or of its optimizer."""

    name: str
    dtype: str
    """As safetensors calls it: ``F32``."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PartFile:
    """A file that a rank has written, and the boxes stored in it back to back, from byte ``begin`` to the end."""

    name: str
    size: int
    begin: int
    """Bytes before the first box: the header of safetensors."""
    sums: FileEntry
    """Size and checksum of the file that holds its block checksums."""
    tensors: tuple[TensorInfo, ...]
    """For each box, the tensor that it belongs to."""
    offsets: Numbers
    """Offset of each box in its tensor, one number for each dim, concatenated over the boxes."""
    sizes: Numbers
    """Sizes of each box, in the same layout."""


@dataclass(frozen=True)
class PartRecord:
    """The part that one rank has written."""

    rank: int
    files: tuple[PartFile, ...]
    """One for the model and one for the optimizer; fewer where the rank had nothing to write."""
    aliases: Mapping[str, str]
    """Tied weights: another name → the name that is stored."""

    def to_json(self) -> bytes:
        files = [_to_plain(file) for file in self.files]
        return json.dumps({"rank": self.rank, "files": files, "aliases": dict(self.aliases)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "PartRecord":
        """Inverse of ``to_json``. Not validated: only for messages from ranks of the same run."""
        fields = json.loads(text)
        return cls(fields["rank"], tuple(map(_from_plain, fields["files"])), fields["aliases"])


def _to_plain(file: PartFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "size": file.size,
        "begin": file.begin,
        "sums": file.sums.model_dump(),
        "tensors": list(map(_to_text, file.tensors)),
        "offsets": _to_base64(file.offsets),
        "sizes": _to_base64(file.sizes),
    }


def _from_plain(fields: dict[str, Any]) -> PartFile:
    return PartFile(
        name=fields["name"],
        size=fields["size"],
        begin=fields["begin"],
        sums=FileEntry(**fields["sums"]),
        tensors=tuple(map(_from_text, fields["tensors"])),
        offsets=_from_base64(fields["offsets"]),
        sizes=_from_base64(fields["sizes"]),
    )


@lru_cache(_CACHED_TEXTS)
def _to_text(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {','.join(map(str, tensor.shape))} {tensor.name}"


@lru_cache(_CACHED_TEXTS)
def _from_text(text: str) -> TensorInfo:
    dtype, shape, name = text.split(" ", 2)
    return TensorInfo(name, dtype, tuple(map(int, shape.split(","))) if shape else ())


def _to_base64(numbers: Numbers) -> str:
    return base64.b64encode(numbers.astype("<i8").tobytes()).decode()


def _from_base64(text: str) -> Numbers:
    return np.frombuffer(base64.b64decode(text), dtype="<i8").astype(np.int64)
