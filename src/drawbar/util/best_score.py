"""``checkpoints/best.json``: which checkpoint of a run has the best score."""

from pydantic import BaseModel, ConfigDict

BEST_FILE = "best.json"


class BestScore(BaseModel):
    """The step of the best checkpoint, and its score."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    step: int
    metric: str
    score: float
