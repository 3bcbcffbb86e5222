"""Sources of an evaluation that have names: scores of each by itself, besides those of all."""

from pathlib import Path
from typing import Any

import pytest

from drawbar.errors import UserError
from runs import Fit, scores

COUNTS = {"short": 2, "long": 3}
SHORT, LONG = ["the load", "an engine and a load"], ["the engine pulls the load along " * n for n in (1, 2, 3)]
TWO = "data.validation=[{name: short, files: short.txt}, {name: long, files: long.txt}]"


@pytest.fixture(autouse=True)
def files(project: Path) -> None:
    (project / "short.txt").write_text("\n".join(SHORT) + "\n")
    (project / "long.txt").write_text("\n".join(LONG) + "\n")


def evaluated(fit: Fit, run: Path, *settings: str) -> dict[str, float]:
    """The scores of a run of one step, by their names without ``eval/validation``."""
    name = f"run{len(list(run.parent.glob('run*')))}"
    fit("train.steps=1", "optim.warmup=0", f"run.name={name}", *settings)
    return {name.removeprefix("eval/validation/"): value for name, value in scores(run.with_name(name))[1].items()}


def test_each_has_the_scores_that_it_has_alone(fit: Fit, run: Path) -> None:
    both = evaluated(fit, run, TWO)
    for name in COUNTS:
        alone = evaluated(fit, run, f"data.validation={name}.txt")
        assert {score: both[f"{name}/{score}"] for score in alone} == pytest.approx(alone, rel=1e-6)
    together = evaluated(fit, run, "data.validation=[short.txt, long.txt]")
    assert {score: both[score] for score in together} == pytest.approx(together, rel=1e-6)
    assert both.keys() == {*together, *(f"{name}/{score}" for name in COUNTS for score in together)}


def test_one_of_them_chooses_the_best(fit: Fit, run: Path) -> None:
    settings = ("train.steps=2", "optim.warmup=0", "eval.every=1", TWO, "eval.metric=long/loss")
    outcome = fit(*settings)
    assert outcome.progress.best_score == min(one["eval/validation/long/loss"] for one in scores(run).values())
    with pytest.raises(UserError, match="did you mean long/loss"):
        fit(*settings[:-1], "eval.metric=lon/loss", "run.name=other")


def test_a_source_without_a_name_counts_for_all_alone(fit: Fit, run: Path) -> None:
    found = evaluated(fit, run, "data.validation=[short.txt, {name: long, files: long.txt}]")
    assert {name.partition("/")[0] for name in found if "/" in name} == {"long"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.validation=[{name: a, files: short.txt}, {name: a, files: long.txt}]", "two sources have the name 'a'"),
        (TWO + " data.limit.validation=2", "the source 'long' gives no sample"),
    ],
)
def test_a_source_that_could_have_no_scores_is_refused(setting: str, message: str, fit: Fit, run: Path) -> None:
    with pytest.raises(UserError, match=message):
        fit("train.steps=3", *setting.replace("] data", "]\ndata").split("\n"))
    assert not run.exists()


def test_the_sources_of_held_out_records_may_have_names(fit: Fit, run: Path, project: Path) -> None:
    lines: list[Any] = [f"{word} {number}" for number in range(40) for word in ("load", "engine")]
    for name, start in (("one", 0), ("two", 1)):
        (project / f"{name}.txt").write_text("\n".join(lines[start::2]) + "\n")
    train = "data.train=[{name: one, files: one.txt}, {name: two, files: two.txt}]"
    found = evaluated(fit, run, train, "data.validation=null", "data.validation_share=0.3")
    assert {"loss", "one/loss", "two/loss"} <= found.keys()
