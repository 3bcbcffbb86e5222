"""Metric files, read back by what reads them: json, and TensorBoard's own EventAccumulator."""

import errno
import json
import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from drawbar.config.schema.run_config import TrackingSection
from drawbar.errors import ExitCode, UserError
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.tracking.tensorboard import TensorBoardTracker
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import BackgroundTracker, Trackers, make_trackers


def entries(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "time"} for entry in entries(path)]


def started(folder: Path, resume_step: int | None = None, evaluated: bool = True) -> JsonlTracker:
    """A tracker that writes ``metrics.jsonl`` in a folder."""
    folder.mkdir(exist_ok=True)
    tracker = JsonlTracker()
    tracker.start(TrackedRun(folder, {}, resume_step, evaluated))
    return tracker


def log_steps(tracker: JsonlTracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {"train/loss": 1 / (step + 1), "train/weight": 64})
        if step % 2 == 0:
            tracker.log(step, {"eval/validation/loss": 2.0 / (step + 3)})


def test_a_line_is_complete_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = started(tmp_path)
    tracker.log(3, {"train/loss": 0.1, "train/weight": 64})
    (entry,) = entries(path)
    assert entry["step"] == 3
    assert entry["train/loss"] == 0.1
    assert isinstance(entry["time"], float)
    assert list(entry) == ["step", "time", "train/loss", "train/weight"]
    tracker.finish()


def test_floats_keep_every_bit_and_non_finite_ones_are_strings(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": float("nan"), "d": float("inf"), "e": float("-inf")}
    started(tmp_path).log(1, values)
    (entry,) = untimed(path)
    assert entry == {"step": 1, "a": 0.1 + 0.2, "b": 5e-324, "c": "nan", "d": "inf", "e": "-inf"}
    assert all(repr(float(entry[name])) == repr(value) for name, value in values.items())


@given(checkpoint=st.integers(0, 4), more=st.integers(1, 4), survived=st.floats(0, 1))
def test_killed_anywhere_and_resumed_reads_like_uninterrupted(checkpoint: int, more: int, survived: float) -> None:
    steps = checkpoint + more
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = (Path(folder, name, "metrics.jsonl") for name in ("straight", "killed"))
        log_steps(started(straight.parent), range(steps + 1))

        log_steps(started(killed.parent), range(checkpoint + 1))
        at_checkpoint = killed.stat().st_size
        log_steps(started(killed.parent, checkpoint), range(checkpoint + 1, steps + 1))
        written_since = killed.stat().st_size - at_checkpoint
        os.truncate(killed, at_checkpoint + round(survived * written_since))

        log_steps(started(killed.parent, checkpoint), range(checkpoint + 1, steps + 1))
        assert untimed(killed) == untimed(straight)


def test_scores_that_are_to_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(started(tmp_path), range(4))
    started(tmp_path, 2, evaluated=False)
    assert [(line["step"], "train/loss" in line) for line in untimed(path)] == [
        (0, True),
        (0, False),
        (1, True),
        (2, True),
    ]


class Frail(JsonlTracker):
    """Cannot write some steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step in (1, 2, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().log(step, values)

    def finish(self) -> None:
        raise ValueError("anything")


def test_a_tracker_that_fails_is_named_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frail = Frail()
    (tmp_path / "frail").mkdir()
    frail.start(TrackedRun(tmp_path / "frail", {}))
    trackers = Trackers([frail, started(tmp_path / "whole")])
    for step in range(6):
        trackers.log(step, {"train/loss": 1.0})
    trackers.finish()
    assert [line["step"] for line in untimed(tmp_path / "frail" / "metrics.jsonl")] == [0, 3, 5]
    assert [line["step"] for line in untimed(tmp_path / "whole" / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Frail"] * 3  # twice, and its end


class Leaves(JsonlTracker):
    """Its library ends the process where it may not log in."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise SystemExit(5)


def test_a_tracker_that_exits_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTracker(Leaves(), "Leaves")
    background.start(TrackedRun(tmp_path, {}))
    background.log(1, {"train/loss": 1.0})
    background.finish()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["Leaves: SystemExit: 5"]


def test_starting_over_begins_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(started(tmp_path), range(5))
    started(tmp_path).log(0, {"train/loss": 7.0})
    assert untimed(path) == [{"step": 0, "train/loss": 7.0}]


@pytest.mark.parametrize("damage", [b"\x00\x00\xff\n", b'{"step": 1, "tr\n', b"[1]\n", b'{"step": null}\n', b"\n"])
def test_a_damaged_line_is_named_and_dropped(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time": 1.0}\n' + damage + b'{"step": 2, "time": 2.0}')
    started(tmp_path, 2).log(3, {})
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3]
    assert "metrics.jsonl, line 2" in caplog.text


def test_resuming_leaves_no_other_file(tmp_path: Path) -> None:
    log_steps(started(tmp_path), range(5))
    started(tmp_path, 2).finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write the metrics") as caught:
            tracker.log(1, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == ExitCode.FAILED
    assert caught.value.where == str(tmp_path / "metrics.jsonl")


@pytest.fixture
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files of one second by their names, in which a process's tenth file comes before its ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def tensorboard(folder: Path, resume_step: int | None = None) -> TensorBoardTracker:
    tracker = TensorBoardTracker()
    tracker.start(TrackedRun(folder, {}, resume_step))
    return tracker


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder).Scalars(name)]


def test_tensorboard_reads_scalars(tmp_path: Path) -> None:
    tracker = tensorboard(tmp_path)
    tracker.log(1, {"train/loss": 0.5, "eval/validation/loss": 0.75})
    assert scalars(tmp_path, "train/loss") == [(1, 0.5)]  # before finish(): a run that is killed loses nothing
    assert scalars(tmp_path, "eval/validation/loss") == [(1, 0.75)]
    tracker.finish()


@pytest.mark.usefixtures("event_files_in_order")
def test_tensorboard_forgets_the_steps_made_again(tmp_path: Path) -> None:
    first = tensorboard(tmp_path)
    for step in range(6):
        first.log(step, {"train/loss": float(step)})
    first.finish()
    (events,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(events, events.stat().st_size - 7)  # killed in the middle of step 5
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [0, 1, 2, 3, 4]

    second = tensorboard(tmp_path, 3)  # resumed from the checkpoint of step 3
    second.log(4, {"train/loss": 40.0})
    second.log(5, {"train/loss": 50.0})
    second.finish()
    assert scalars(tmp_path, "train/loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


@pytest.mark.usefixtures("event_files_in_order")
@pytest.mark.parametrize("resume_step", [None, 2])
def test_both_trackers_agree_on_what_a_resume_keeps(tmp_path: Path, resume_step: int | None) -> None:
    def run(steps: range, resume_step: int | None) -> None:
        for tracker in make_trackers(TrackingSection()):
            tracker.start(TrackedRun(tmp_path, {}, resume_step))
            for step in steps:
                tracker.log(step, {"train/loss": float(step)})
            tracker.finish()

    run(range(5), None)
    first = 0 if resume_step is None else resume_step + 1
    run(range(first, 4), resume_step)
    assert [entry["step"] for entry in entries(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert scalars(tmp_path, "train/loss") == [(step, float(step)) for step in range(4)]


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    assert [type(tracker) for tracker in make_trackers(TrackingSection(tensorboard=False))] == [JsonlTracker]
