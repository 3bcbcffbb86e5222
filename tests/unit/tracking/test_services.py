"""Weights & Biases, MLflow and Trackio: what a run that was killed and went on has told them, read back from disk."""

import json
import math
import socket
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from drawbar.config.schema.run_config import TrackingSection
from drawbar.errors import UserError
from drawbar.tracking import trackers as module
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.tracking.mlflow import MLflowTracker
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import Trackers, make_trackers
from drawbar.tracking.wandb import WandbTracker

SETTINGS = {"run": {"name": "demo", "seed": 3}, "optim": {"lr": 0.1}}
LOSSES = [(1, 0.5), (2, 0.25), (3, 0.125)]


def track(folder: Path, name: str, options: dict[str, Any]) -> Path:
    """Three steps and an evaluation, by a process that is killed after step 2 and one that goes on from step 1."""
    run_dir = folder / "demo"
    run_dir.mkdir()
    section = TrackingSection(tensorboard=False, trackers={name: options})
    for resume_step, steps in ((None, (1, 2)), (1, (2, 3))):
        trackers = Trackers(make_trackers(section)[1:])
        trackers.start(TrackedRun(run_dir, SETTINGS, resume_step))
        for step in steps:
            trackers.log(step, {"train/loss": 0.5**step})
            trackers.log_texts(step, {"samples/1": f"the load\n\n<b> at {step}"})
        if 3 in steps:
            trackers.log(3, {"eval/validation/loss": math.nan})
        trackers.finish()
    return run_dir


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: W&B's own messages, in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""  # behind the magic number
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.exhaustive
def test_weights_and_biases(tmp_path: Path) -> None:
    import wandb

    run_dir = track(tmp_path, "wandb", {"project": "trains", "mode": "offline"})
    wandb.teardown()  # what a process does at its end: W&B's own process has then written its files
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    kept = json.loads((run_dir / "tracking" / "wandb.json").read_text())
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(kept["id"], "trains", "demo")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim"] == {"lr": 0.1}
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert sorted((line["_step"], line["train/loss"]) for line in history if "train/loss" in line) == LOSSES
    assert [line["_step"] for line in history if "eval/validation/loss" in line] == [3]
    pages = [file.read_text() for file in run_dir.glob("wandb/offline-run-*/files/media/html/samples/*.html")]
    assert len(pages) == 3
    assert any("<pre>the load\n\n&lt;b&gt; at 3</pre>" in page for page in pages)


@pytest.mark.exhaustive
def test_mlflow(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    track(tmp_path, "mlflow", {"experiment": "trains", "uri": uri})
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("trains").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"run.name": "demo", "run.seed": "3", "optim.lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == LOSSES
    (score,) = client.get_metric_history(run.info.run_id, "eval/validation/loss")
    assert math.isnan(score.value)
    texts = client.list_artifacts(run.info.run_id, "samples/1")
    assert [Path(text.path).name for text in texts] == [f"step-{step:08d}.txt" for step in (1, 2, 3)]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read when trackio is imported: nowhere else
    from trackio import Api, SQLiteStorage

    track(tmp_path, "trackio", {"project": "trains"})
    (run,) = Api().runs("trains")
    assert run.config["optim"] == {"lr": 0.1}
    logs = SQLiteStorage.get_logs("trains", "demo")
    assert [(line["step"], line["train/loss"]) for line in logs if "train/loss" in line] == LOSSES
    assert [line["step"] for line in logs if "eval/validation/loss" in line] == [3]
    texts = [line["samples/1"] for line in logs if "samples/1" in line]
    assert [text["_value"].rpartition(" ")[2] for text in texts] == ["1", "2", "3"]


def test_a_service_that_cannot_be_had_leaves_the_run_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **_: False)
    run_dir = track(tmp_path, "wandb", {"project": "trains"})
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert "there is no API key" in caplog.text


def test_a_service_that_fails_warns_once_and_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: WandbTracker, run: TrackedRun) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WandbTracker, "start", fail)
    track(tmp_path, "wandb", {"project": "trains"})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # one a process
    assert "No space left on device" in told[0]
    assert "without the tracker wandb" in told[0]


def test_the_end_of_a_run_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from threading import Event

    hangs = Event()
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.01)
    monkeypatch.setattr(module, "SECONDS_TO_CHECK", 0.005)
    monkeypatch.setattr(module, "LONGEST_QUEUE", 2)
    monkeypatch.setattr(WandbTracker, "start", lambda self, run: hangs.wait())
    trackers = Trackers(make_trackers(TrackingSection(tensorboard=False, trackers={"wandb": {"project": "trains"}})))
    trackers.start(TrackedRun(tmp_path, {}))
    for step in range(5):
        trackers.log(step, {"train/loss": 1.0})
    trackers.finish()
    hangs.set()
    assert "it does not get all values" in caplog.text
    assert "has not sent everything" in caplog.text


def test_the_end_of_a_run_does_not_wait_for_an_mlflow_server_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SECONDS_TO_CHECK", 0.01)
    monkeypatch.setattr(module, "FINISH_SECONDS", 10_000.0)
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{server}")
        trackers = Trackers(make_trackers(TrackingSection(tensorboard=False, trackers={"mlflow": {}}))[1:])
        trackers.start(TrackedRun(tmp_path, SETTINGS))
        trackers.log(1, {"train/loss": 0.5})
        trackers.finish()
    at_start, at_end = (record.getMessage() for record in caplog.records)
    assert f"the MLflow server {server} does not answer" in at_start
    assert f"has not sent everything, and the run ends: the MLflow server {server} does not answer" in at_end
    assert "secret" not in caplog.text


def test_which_mlflow_server_does_not_answer() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(int(self.path.removeprefix("/")))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        problems = [MLflowTracker(uri=f"{uri}/{status}").service_problem() for status in (405, 503)]
        server.shutdown()
    assert problems == [None, f"the MLflow server {uri[7:]} does not answer: 503 Service Unavailable"]
    assert MLflowTracker(uri="sqlite:///no.db").service_problem() is None


@pytest.mark.parametrize(
    ("trackers", "what", "remedy"),
    [
        ({"wandbb": {}}, "there is no tracker 'wandbb'", "did you mean wandb?"),
        ({"wandb": {}}, "missing a required argument: 'project'", "it takes: project"),
        ({"wandb": {"project": "x", "color": 1}}, "unexpected keyword argument 'color'", "it takes: project"),
        ({"wandb": {"project": "x", "mode": "sometimes"}}, "must be online or offline", "correct its options"),
        ({"mlflow": {}}, "MLFLOW_TRACKING_URI", "correct its options"),
        ({"json:loads": {}}, "json:loads is not a subclass of drawbar.Tracker", "name a subclass"),
        ({"no_such_module:Tracker": {}}, "cannot be imported", "package.module:Class"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_refused_before_training(
    trackers: dict[str, Any], what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError) as caught:
        make_trackers(TrackingSection(trackers=trackers))
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_package_that_is_missing_is_said_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"the tracker {name} needs {name}, which is not installed") as caught:
        make_trackers(TrackingSection(trackers={name: {"project": "x"}}))
    assert str(caught.value.remedy).startswith(f'pip install "drawbar[{name}]"')


def test_a_package_inside_one_that_is_missing_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner_package.py").write_text(
        "from drawbar import Tracker\n\n\nclass Cloud(Tracker):\n"
        '    packages = {"no_such_cloud.store": "no-such-cloud"}\n'
        "    start = log = finish = lambda *_: None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"needs no_such_cloud.store, which is not installed"):
        make_trackers(TrackingSection(trackers={"inner_package:Cloud": {}}))


def test_two_trackers_with_one_class_name_know_their_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_notes", "second_notes"):
        (tmp_path / f"{name}.py").write_text(
            "from drawbar import Tracker\n\n\nclass Notes(Tracker):\n    start = log = finish = lambda *_: None\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    both = {"first_notes:Notes": {}, "second_notes:Notes": {}}
    trackers = Trackers(make_trackers(TrackingSection(tensorboard=False, trackers=both)))
    trackers.start(TrackedRun(tmp_path, {}))
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    kept = {path.name for path in (tmp_path / "tracking").iterdir()}
    assert kept == {"first_notes.Notes.json", "second_notes.Notes.json"}


def test_a_tracker_in_the_foreground_that_does_not_start_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(JsonlTracker):
        def start(self, run: TrackedRun) -> None:
            raise ValueError("no such board")

    trackers = Trackers([Fails(), JsonlTracker()])
    trackers.start(TrackedRun(tmp_path, {}))
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    assert "no such board" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_tracker_is_left_out_by_null() -> None:
    assert len(make_trackers(TrackingSection(trackers={"wandb": None, "tensorboard": None}))) == 1
