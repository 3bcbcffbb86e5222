"""``checkpoints/best.json``: which checkpoint of a run has the best score."""

import hashlib
import json
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
