"""What a checkpoint on disk is: its files, its manifest, and how the state that is not tensors is written.

A checkpoint is a folder ``step-00001000`` with five files:

=========================  =====================================================================================
``model.safetensors``      parameters and buffers under their fully qualified names; tied ones are stored once
``optimizer.safetensors``  the optimizer's tensors by ``<parameter>/<key>``: ``lm_head.weight/exp_avg``
``rng.safetensors``        generators' states, one for each set of ranks that draw alike: ``seed-0003/torch``
``state.json``             everything else: step, best score, loss scaler, position in the data, number formats
``manifest.json``          format, version, step, and the size and SHA-256 of the other four; written last
=========================  =====================================================================================

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

from pydantic import BaseModel, ConfigDict
from torch import Tensor

FORMAT = 1
"""Number of the format, one higher each time that an older drawbar could no longer read what is written."""

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"

STEP_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The folder name of a step: ``step-00001000``."""
    return f"step-{step:08d}"


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


class Unusable(Exception):
    """A checkpoint cannot be used; the message names the file and what is wrong with it."""


class Damaged(Unusable):
    """It is not as it was written."""


class OtherFormat(Unusable):
    """Another version of drawbar wrote it, and can read it."""


class FileEntry(BaseModel):
    """What the manifest knows of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int
    """Bytes."""
    sha256: str


class Manifest(BaseModel):
    """The list of a checkpoint's files. Its own text ends with a checksum of all the rest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    drawbar: str
    """Version of drawbar that wrote the checkpoint."""
    step: int
    files: dict[str, FileEntry]

    @classmethod
    def of(cls, step: int, files: dict[str, FileEntry]) -> "Manifest":
        return cls(format=FORMAT, drawbar=version("drawbar"), step=step, files=files)

    def to_json(self) -> bytes:
        fields = self.model_dump()
        return json.dumps(fields | {"sha256": _checksum(fields)}, indent=2).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Raises Damaged for text that is not a whole, unchanged manifest, or OtherFormat for one of another format."""
        try:
            fields = json.loads(text)
            unchanged = fields.pop("sha256") == _checksum(fields)
            known = fields["format"] == FORMAT
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Damaged(f"{MANIFEST_FILE} is not a manifest") from None
        if not known:  # first: another format may have another checksum
            raise OtherFormat(
                f"{MANIFEST_FILE} has format {fields['format']}, from drawbar {fields.get('drawbar')}; "
                f"this is drawbar {version('drawbar')}, which reads format {FORMAT}"
            )
        if not unchanged:
            raise Damaged(f"{MANIFEST_FILE} does not match its own checksum")
        return cls.model_validate(fields)


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def encode_state(state: dict[str, Any]) -> bytes:
    """``state.json``: floats read back as the same bits, NaN and infinities spelled as Python's ``json`` spells them.

    Tuples become lists. Raises TypeError, naming the place, for whatever would not come back as it went in.
    """
    return json.dumps(_plain(state, "state"), indent=2).encode()


def decode_state(text: bytes) -> dict[str, Any]:
    return json.loads(text)


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


def describe(path: Path) -> FileEntry:
    """Size and checksum of a file, as it reads back."""
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
