"""The names of files in a run directory, and how to recognize one by them. Does not import torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from drawbar.util.strict_json import read_json

BEST_FILE = "best.json"


class BestScore(BaseModel):
    """The step of the best checkpoint, and its score. Its text ends with a checksum of all the rest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    step: int
    metric: str
    score: float

    def to_json(self) -> str:
        fields = self.model_dump()
        return json.dumps(fields | {"sha256": _checksum(fields)}, indent=2)

    @classmethod
    def from_json(cls, text: bytes) -> "BestScore":
        """What ``to_json`` has made. Raises ValueError for other text."""
        fields = read_json(text)
        checksum = fields.pop("sha256", None) if isinstance(fields, dict) else None
        found = cls.model_validate(fields)
        if checksum != _checksum(found.model_dump()):
            raise ValueError("it does not match its own checksum")
        return found


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
"""In a run directory: locked by the process that trains the run, and says which one that is."""
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_ONLY_OF_RUNS = (LOCK_FILE, STATUS_FILE, METRICS_FILE, CHECKPOINTS)
"""Names that only a run directory has; each run directory has at least one. The lock file is there before
``config.yaml``, but a copy may lack it, as it is hidden. What `drawbar convert` writes has only checkpoints."""


def is_run_dir(folder: Path) -> bool:
    """Whether this folder is a run directory. A ``config.yaml`` alone does not make it one: a project folder has that,
    too."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).exists() for name in _ONLY_OF_RUNS)
