"""The checkpoint format on disk: files, manifest, and the encoding of the state that is not tensors.

A checkpoint is a folder ``step-00001000``. Each process that saves writes a part: all tensors where one process writes
for all, its own shards where every rank writes.

===============================  ===============================================================================
``model-00003.safetensors``      what rank 3 has written of the model: tensors under their fully qualified names, and
                                 boxes of tensors, named by the place where they begin: ``lm_head.weight@512,0``
``optimizer-00003.safetensors``  the same of the optimizer: ``lm_head.weight/exp_avg``
``….safetensors.sums``           a checksum for each block of such a file: ``block_checksums``
``tensors.json``                 where each box of each tensor is, and which weights are tied: ``tensor_index``
``rng.safetensors``              RNG states, one for each set of ranks that draw the same numbers: ``seed-0003/torch``
``state.json``                   everything else: step, best score, loss scaler, position in the data, dtypes
``manifest.json``                format, version, step, and size and checksum of the other files; written last
===============================  ===============================================================================

Nothing here needs an unpickler: safetensors and JSON hold numbers, text and lists, never code.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from drawbar.util.strict_json import read_json

FORMAT = 1
"""Number of the format. A new one is taken when a drawbar from before could not read what is written."""

RNG_FILE = "rng.safetensors"
STATE_FILE = "state.json"
RESOLVED = "formats"
"""Key in ``STATE_FILE``: the dtypes and ways of computing that the run's ``auto`` settings stood for."""
RUN = "run"
"""Key in ``STATE_FILE``: the id of the run that wrote the checkpoint."""
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "tensors.json"
CHECKSUMS_SUFFIX = ".sums"
"""Suffix of the file with the checksums of a part file's blocks."""
PART_NAME = re.compile(r"(model|optimizer)-\d{5,9}\.safetensors")

STEP_NAME = re.compile(r"step-(\d{8,})")
REPLACED = ".replaced"
"""Suffix of an older checkpoint of a step while a new one of the same step replaces it."""


_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def step_name(step: int) -> str:
    """The folder name of a step: ``step-00001000``."""
    return f"step-{step:08d}"


EMA = "ema"
"""The key of the moving average of a parameter, among the optimizer's tensors."""


@dataclass
class Snapshot:
    """Everything that a run needs to go on from a step, gathered from all ranks."""

    step: int
    model: Mapping[str, Tensor]
    """Fully qualified name → full parameter or buffer. Two names may hold the very same tensor (tied weights)."""
    optimizer: Mapping[str, Tensor]
    """``<parameter>/<key>`` (``lm_head.weight/exp_avg``) → full tensor."""
    rng: dict[str, Tensor]
    """``seed-0003/torch`` → generator state; ranks that draw the same numbers share one."""
    state: dict[str, Any]
    """JSON values only: None, bool, int, float (NaN and infinities too), str, lists, and dicts with text keys."""

    def nbytes(self) -> int:
        """Bytes of the tensors, tied ones counted once: a little less than the files will take."""
        tensors = (*self.model.values(), *self.optimizer.values(), *self.rng.values())
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


class Unusable(Exception):
    """A checkpoint cannot be used; the message names the file and the reason."""


class Damaged(Unusable):
    """A file does not match its checksum, is missing, or cannot be parsed."""


class OtherFormat(Unusable):
    """Written by another version of drawbar, in a format that this one does not read."""


class FileEntry(BaseModel):
    """Size and checksum of one file, as listed in the manifest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int
    """Bytes."""
    sha256: str


class Manifest(BaseModel):
    """The list of a checkpoint's files, with a checksum of the list itself."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    drawbar: str
    """Version of drawbar that wrote the checkpoint."""
    step: int
    files: dict[str, FileEntry]
    parts: dict[str, int]
    """The size of each part file in bytes. Its content is verified block by block, when it is read."""

    @classmethod
    def of(cls, step: int, files: dict[str, FileEntry], parts: dict[str, int]) -> "Manifest":
        return cls(format=FORMAT, drawbar=version("drawbar"), step=step, files=files, parts=parts)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file of the checkpoint but the manifest."""
        return {name: entry.size for name, entry in self.files.items()} | self.parts

    def to_json(self) -> bytes:
        fields = self.model_dump()
        return json.dumps(fields | {"sha256": _checksum(fields)}, indent=2).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Raises Damaged for text that is not a whole, unchanged manifest, or OtherFormat for one of another format."""
        try:
            fields = read_json(text)
            unchanged = fields.pop("sha256") == _checksum(fields)
            known = fields["format"] == FORMAT
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Damaged(f"{MANIFEST_FILE} is not a manifest") from None
        if not known:  # first: another format may have another checksum
            raise OtherFormat(
                f"{MANIFEST_FILE} has format {fields['format']}, from drawbar {fields.get('drawbar')}; "
                f"this is drawbar {version('drawbar')}, which reads format {FORMAT}"
            )
        if not unchanged:
            raise Damaged(f"{MANIFEST_FILE} does not match its own checksum")
        try:
            manifest = cls.model_validate(fields)
        except ValidationError:
            raise Damaged(f"{MANIFEST_FILE} is not a manifest") from None
        manifest._check_names()
        return manifest

    def _check_names(self) -> None:
        """Input validation: file names must lie in the checkpoint's own folder, and part files must have checksums."""
        if min(self.sizes().values(), default=0) < 0:
            raise Damaged(f"{MANIFEST_FILE} is not a manifest")
        for name in self.files:
            if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST_FILE or name in self.parts:
                raise Damaged(f"{MANIFEST_FILE} names {name!r}, which cannot be a file of a checkpoint")
        for name in self.parts:
            if not PART_NAME.fullmatch(name) or name + CHECKSUMS_SUFFIX not in self.files:
                raise Damaged(f"{MANIFEST_FILE} names {name!r}, which cannot be a part of a checkpoint")


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def encode_state(state: dict[str, Any]) -> bytes:
    """``state.json``: floats read back as the same bits, NaN and infinities spelled as Python's ``json`` spells them.

    Tuples become lists. Raises TypeError, naming the place, for whatever would not come back as it went in.
    """
    return json.dumps(_plain(state, "state"), indent=2).encode()


def decode_state(text: bytes) -> dict[str, Any]:
    """Inverse of ``encode_state``. Raises Damaged for text that is not such a state."""
    try:
        state = read_json(text)
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise Damaged(f"{STATE_FILE} is not a checkpoint's state")
    return state


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            # json would turn the key 1 into "1" and say nothing
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: the keys of a checkpoint's state are text")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint's state holds JSON values, and no tensors")


def file_entry(path: Path) -> FileEntry:
    """Read a file to find its size and checksum."""
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
