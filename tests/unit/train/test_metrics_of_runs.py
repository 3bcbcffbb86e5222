"""What a run writes about itself: ``metrics.jsonl`` as ``docs/metrics.md`` describes it, TensorBoard, profiles."""

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Fit, losses, metrics, scores

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented() -> dict[str, str]:
    """The names in the table of ``docs/metrics.md``, and when each is written."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 8
    return dict(rows)


def test_the_documented_names_are_the_written_ones(fit: Fit, run: Path) -> None:
    fit("tracking.log_every=5")
    elsewhere = ("on known GPUs", "where samples have no tokens", "with `train/loss`, once there is one")
    names = {name: when for name, when in documented().items() if not when.startswith(elsewhere)}
    written = {re.sub(r"^eval/\w+/\w+$", "eval/<split>/<score>", name) for line in metrics(run) for name in line}
    assert written == set(names)
    always = {name for name, when in names.items() if when == "every line"}
    training = {name for name, when in names.items() if "`train/loss`" in when} | {"train/loss"}
    for line in metrics(run):
        if "train/loss" in line:
            assert set(line) == always | training
        else:
            assert {name.split("/")[0] for name in set(line) - always} == {"eval"}
            assert always < set(line)


@pytest.mark.parametrize(
    ("every", "steps"), [(1, list(range(1, 13))), (5, [1, 5, 10, 12]), (12, [1, 12]), (50, [1, 12])]
)
def test_when_a_line_is_written(every: int, steps: list[int], fit: Fit, run: Path) -> None:
    fit(f"tracking.log_every={every}", "eval.every=4", "eval.at_start=true")
    assert list(losses(run)) == steps
    assert list(scores(run)) == [0, 4, 8, 12]
    times = [line["time"] for line in metrics(run)]
    assert times == sorted(times)


def test_logging_changes_no_number(fit: Fit, project: Path) -> None:
    fit("tracking.log_every=1", "run.name=every")
    fit("tracking.log_every=4", "run.name=fourth")
    every = {line["step"]: line for line in metrics(project / "runs" / "every") if "train/loss" in line}
    for line in metrics(project / "runs" / "fourth"):
        if "train/loss" in line:
            same = ("train/loss", "train/lr", "train/grad_norm", "train/weight", "train/epoch", "train/skipped")
            assert [line[name] for name in same] == [every[line["step"]][name] for name in same]


def test_tensorboard_holds_the_same_numbers(fit: Fit, run: Path) -> None:
    fit("tracking.tensorboard=true", "tracking.log_every=3")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = metrics(run)
    assert set(events.Tags()["scalars"]) == {name for line in lines for name in line} - {"step", "time"}
    for name in events.Tags()["scalars"]:
        kept = {event.step: event.value for event in events.Scalars(name)}
        assert kept == pytest.approx({line["step"]: line[name] for line in lines if name in line}, rel=1e-6)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3, 6, 9, 12]


def test_without_tensorboard_there_are_no_event_files(fit: Fit, run: Path) -> None:
    fit("tracking.tensorboard=false")
    assert not (run / "tensorboard").exists()


@pytest.mark.parametrize(("start", "steps", "profiled"), [(1, 1, 1), (3, 2, 2), (12, 1, 1), (11, 5, 2)], ids=str)
def test_a_profile_of_chosen_steps(start: int, steps: int, profiled: int, fit: Fit, run: Path) -> None:
    fit(
        f"tracking.profile={{start: {start}, steps: {steps}}}",
        "data.validation=null",
        "eval.every=null",
        "train.micro_batch=4",
    )
    files = list((run / "profile").iterdir())
    assert [file.name for file in files] == ["rank-0000.json"]
    names = [event.get("name", "") for event in json.loads(files[0].read_text())["traceEvents"]]
    assert sum(bool(re.fullmatch(r"Optimizer\.step#AdamW\.step", name)) for name in names) == profiled
    assert sum(name == "aten::embedding" for name in names) == 2 * profiled  # two micro-batches a step


@pytest.mark.exhaustive
def test_a_profile_is_of_the_same_training(fit: Fit, project: Path) -> None:
    fit("tracking.profile={start: 2, steps: 3}", "run.name=profiled")
    fit("run.name=plain")
    assert losses(project / "runs" / "profiled") == losses(project / "runs" / "plain")
