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

from drawbar.config.schema import TrackingSection
from drawbar.errors import ExitCode, UserError
from drawbar.tracking.trackers import JsonlTracker, TensorBoardTracker, Trackers, make_trackers


def entries(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "time"} for entry in entries(path)]


def log_steps(tracker: JsonlTracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {"train/loss": 1 / (step + 1), "train/weight": 64})
        if step % 2 == 0:
            tracker.log(step, {"eval/validation/loss": 2.0 / (step + 3)})


def test_a_line_is_complete_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, None)
    tracker.log(3, {"train/loss": 0.1, "train/weight": 64})
    (entry,) = entries(path)
    assert entry["step"] == 3
    assert entry["train/loss"] == 0.1
    assert isinstance(entry["time"], float)
    assert list(entry) == ["step", "time", "train/loss", "train/weight"]
    tracker.text(4, "sample", 'def f():\n\treturn "ß"')
    assert entries(path)[1]["sample"] == 'def f():\n\treturn "ß"'
    tracker.close()


def test_floats_keep_every_bit_and_non_finite_ones_are_strings(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": float("nan"), "d": float("inf"), "e": float("-inf")}
    JsonlTracker(path, None).log(1, values)
    (entry,) = untimed(path)
    assert entry == {"step": 1, "a": 0.1 + 0.2, "b": 5e-324, "c": "nan", "d": "inf", "e": "-inf"}
    assert all(repr(float(entry[name])) == repr(value) for name, value in values.items())


@given(checkpoint=st.integers(0, 4), more=st.integers(1, 4), survived=st.floats(0, 1))
def test_killed_anywhere_and_resumed_reads_like_uninterrupted(checkpoint: int, more: int, survived: float) -> None:
    steps = checkpoint + more
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder, "straight.jsonl"), Path(folder, "killed.jsonl")
        log_steps(JsonlTracker(straight, None), range(steps + 1))

        log_steps(JsonlTracker(killed, None), range(checkpoint + 1))
        at_checkpoint = killed.stat().st_size
        log_steps(JsonlTracker(killed, checkpoint), range(checkpoint + 1, steps + 1))
        written_since = killed.stat().st_size - at_checkpoint
        os.truncate(killed, at_checkpoint + round(survived * written_since))

        log_steps(JsonlTracker(killed, checkpoint), range(checkpoint + 1, steps + 1))
        assert untimed(killed) == untimed(straight)


def test_scores_that_are_to_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlTracker(path, None), range(4))
    JsonlTracker(path, 2, evaluated=False)
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

    def close(self) -> None:
        raise ValueError("anything")


def test_a_tracker_that_fails_is_named_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frail, whole = Frail(tmp_path / "frail.jsonl", None), JsonlTracker(tmp_path / "whole.jsonl", None)
    trackers = Trackers([frail, whole])
    for step in range(6):
        trackers.log(step, {"train/loss": 1.0})
    trackers.close()
    assert [line["step"] for line in untimed(tmp_path / "frail.jsonl")] == [0, 3, 5]
    assert [line["step"] for line in untimed(tmp_path / "whole.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Frail"] * 3  # twice, and its end


def test_starting_over_begins_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlTracker(path, None), range(5))
    JsonlTracker(path, None).log(0, {"train/loss": 7.0})
    assert untimed(path) == [{"step": 0, "train/loss": 7.0}]


@pytest.mark.parametrize("damage", [b"\x00\x00\xff\n", b'{"step": 1, "tr\n', b"[1]\n", b'{"step": null}\n', b"\n"])
def test_a_damaged_line_is_named_and_dropped(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 2}')
    JsonlTracker(path, 2).log(3, {})
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3]
    assert "metrics.jsonl, line 2" in caplog.text


def test_resuming_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlTracker(path, None), range(5))
    JsonlTracker(path, 2).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", None)
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


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder).Scalars(name)]


def test_tensorboard_reads_scalars_and_text(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.log(1, {"train/loss": 0.5, "eval/validation/loss": 0.75})
    tracker.text(1, "sample", "def f():\n\n  return `x`")
    events = read_events(tmp_path)  # before close(): a run that is killed must not lose what it logged
    tracker.close()
    assert scalars(tmp_path, "train/loss") == [(1, 0.5)]
    assert scalars(tmp_path, "eval/validation/loss") == [(1, 0.75)]
    (text,) = events.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    def f():\n    \n      return `x`"


@pytest.mark.usefixtures("event_files_in_order")
def test_tensorboard_forgets_the_steps_made_again(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path, 0)
    for step in range(6):
        first.log(step, {"train/loss": float(step)})
    first.close()
    (events,) = tmp_path.iterdir()
    os.truncate(events, events.stat().st_size - 7)  # killed in the middle of step 5
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [0, 1, 2, 3, 4]

    second = TensorBoardTracker(tmp_path, 4)  # resumed from the checkpoint of step 3
    second.log(4, {"train/loss": 40.0})
    second.log(5, {"train/loss": 50.0})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


@pytest.mark.usefixtures("event_files_in_order")
@pytest.mark.parametrize("resume_step", [None, 2])
def test_both_trackers_agree_on_what_a_resume_keeps(tmp_path: Path, resume_step: int | None) -> None:
    def run(steps: range, resume_step: int | None) -> None:
        for tracker in make_trackers(tmp_path, TrackingSection(), resume_step):
            for step in steps:
                tracker.log(step, {"train/loss": float(step)})
            tracker.close()

    run(range(5), None)
    first = 0 if resume_step is None else resume_step + 1
    run(range(first, 4), resume_step)
    assert [entry["step"] for entry in entries(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(step, float(step)) for step in range(4)]


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    (tracker,) = make_trackers(tmp_path, TrackingSection(tensorboard=False), None)
    tracker.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
