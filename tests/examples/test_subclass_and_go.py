"""Workflow 1: a task class of one's own, by torchrun too, and the same results at any number of processes."""

import json
from pathlib import Path

import pytest
from walkthrough import copy_example, walk, write_sentiments

from runs import largest_difference, losses

SMALLER = {
    **{f"data.{split}": f"{name}.tsv" for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))},
    "train.epochs": 4,
    "train.global_batch": 16,
    "eval.every": 10,
}


@pytest.mark.exhaustive
def test_two_processes_come_to_the_results_of_one(tmp_path: Path) -> None:
    write_sentiments(tmp_path)
    copy_example("subclass_and_go", tmp_path, config=SMALLER)
    walk("subclass_and_go", tmp_path)

    one, pair = tmp_path / "runs" / "sentiment", tmp_path / "runs" / "sentiment-pair"
    assert len(losses(one)) > 3
    assert largest_difference(losses(one), losses(pair)) < 1e-5
    for split, labels in (("validation", "dev"), ("test", "test")):
        mine, theirs = (json.loads((run / "eval" / split / "scores.json").read_text()) for run in (one, pair))
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert mine["accuracy"] > 0.9, "the made-up sentences are easy"
        mine, theirs = ((run / "eval" / split / "predictions.jsonl").read_text() for run in (one, pair))
        assert mine == theirs
        assert len(mine.splitlines()) == len((tmp_path / f"{labels}.tsv").read_text().splitlines())
    logs = sorted(path.name for path in (pair / "logs").iterdir())
    assert logs == ["rank-0000.log", "rank-0001.log"]

    predicted = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    reviews = (tmp_path / "reviews.tsv").read_text().splitlines()
    assert [record["sentence"] for record in predicted] == reviews
    assert {record["prediction"] for record in predicted} <= {0, 1}
