"""JSON that any reader takes, whatever a task has predicted."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.evaluation.scoring import Evaluation, write_results
from drawbar.util.strict_json import json_line


def read(line: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1.5, 1.5),
        (float("nan"), "nan"),
        ([1.0, float("inf"), {"a": -float("inf")}], [1.0, "inf", {"a": "-inf"}]),
        ({float("nan"): 1}, {"nan": 1}),
        (np.float32("nan"), "nan"),
        (np.array([[1.0, np.nan]]), [[1.0, "nan"]]),
        ((np.int64(3), True, None), [3, True, None]),
        ([datetime.date(2026, 1, 2), float("nan")], ["2026-01-02", "nan"]),
        ("half a pair: \ud800", "half a pair: \ud800"),
        ("naïve", "naïve"),
        (10**300, 10**300),
    ],
)
def test_a_line(value: Any, written: Any) -> None:
    line = json_line({"prediction": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert read(line) == {"prediction": written}


def test_predictions_and_scores_of_an_evaluation(tmp_path: Path) -> None:
    records = [{"id": 0, "prediction": float("nan")}, {"id": 1, "prediction": 0.5}]
    write_results(tmp_path, Evaluation({"loss": float("inf"), "size": 10**400}, records), step=3)
    lines = (tmp_path / "predictions.jsonl").read_bytes().splitlines()
    assert [read(line)["prediction"] for line in lines] == ["nan", 0.5]
    assert read((tmp_path / "scores.json").read_bytes())["loss"] == "inf"
