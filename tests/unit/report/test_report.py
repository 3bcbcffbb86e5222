"""``drawbar report``: real runs, as they are and as accidents leave them, and texts that try to be markup."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import make_project
from drawbar.jobs.records import JobEnd, JobRecord, append_records
from drawbar.report.page import MARKER
from drawbar.report.report_page import write_report
from drawbar.report.run_history import read_history
from drawbar.tracking.run_view import write_run_status
from drawbar.util.run_dir import LOCK_FILE
from harness import Finished, run_cli
from messages import check_one_message
from report_pages import HOSTILE, Page, read_page


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one process began and two finished, and another one with a larger learning rate."""
    folder = make_project(tmp_path_factory.mktemp("report"))
    train(folder, "train.steps=6")
    train(folder, "launch.nproc=2")
    train(folder, "run.name=fast", "optim.lr=3e-2")
    return folder


def train(folder: Path, *settings: str) -> None:
    done = run_cli("train", "config.yaml", *settings, cwd=folder)
    assert done.code == 0, done.err


def report(folder: Path, *arguments: str, code: int = 0) -> Finished:
    done = run_cli("report", *arguments, cwd=folder)
    assert done.code == code, done.out + done.err
    return done


def copy(project: Path, folder: Path, name: str = "tiny") -> Path:
    """A run to be damaged."""
    return Path(shutil.copytree(project / "runs" / "tiny", folder / name))


def page_of(*runs: Path) -> Page:
    target = runs[0].parent / "page.html"
    write_report(runs, target)
    return read_page(target)


def write_metrics(run: Path, *lines: dict[str, object]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_run(project: Path) -> None:
    assert report(project, "runs/tiny").out == "report: runs/tiny/report.html\n"
    page = read_page(project / "runs" / "tiny" / "report.html")
    assert page.one("h1").text.strip() == "tiny"
    assert "12/12" in page.section("summary")
    assert "complete" in page.section("summary")

    written = [json.loads(line) for line in (project / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in written if "train/loss" in line}
    loss, score = page.figure("Loss")["traces"]
    assert (loss["name"], score["name"]) == ("train/loss", "eval/validation/loss")
    assert loss["x"] == sorted(losses)
    assert loss["y"] == pytest.approx([losses[step] for step in loss["x"]], rel=1e-6)
    assert score["x"] == [5, 6, 10, 12]
    titles = {element.text for element in page.all("figcaption")}
    assert {"Learning rate", "Gradient norm, before clipping", "Throughput", "Peak memory of rank 0"} <= titles
    assert {"Evaluation: perplexity", "Waiting for data", "Targets of the global batch"} <= titles
    assert not [title for title in titles if "/" in title]  # each is in words

    for kind in ("training steps", "waiting for data", "evaluations", "stopped, and started again"):
        assert kind in page.section("time")
    events = page.section("events")
    for said in ("resumed from", "saved by 1 process, resumed by 2", "train.steps was 6 and is now 12"):
        assert said in events
    for end in ("complete at step 6/6", "complete at step 12/12"):
        assert events.count(end) == 1
    assert "best" in page.section("checkpoints")
    assert "optim.lr" in page.section("settings")
    assert "0.01" in page.section("settings")


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_run_without_padding_says_so(project: Path, tmp_path: Path, padding_free: bool) -> None:
    """What ``auto`` chose is in the checkpoints, and not in the settings."""
    run = copy(project, tmp_path)
    for state in run.glob("checkpoints/*/state.json"):
        values = json.loads(state.read_text())
        values["formats"]["padding_free"] = padding_free
        state.write_text(json.dumps(values))
    assert ("end to end in one row" in page_of(run).source) is padding_free


def test_packed_rows_have_padding_though_they_are_padding_free(project: Path, tmp_path: Path) -> None:
    """``data.padding_free`` changes their attention alone."""
    run = copy(project, tmp_path)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("batching: padded", "batching: packed"))
    for state in run.glob("checkpoints/*/state.json"):
        values = json.loads(state.read_text())
        values["formats"]["padding_free"] = True
        state.write_text(json.dumps(values))
    assert "batching: packed" in config.read_text()
    assert "end to end in one row" not in page_of(run).source


def test_an_evaluation_leaves_the_start_of_a_killed_run(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    with (run / "logs" / "rank-0000.log").open("a", encoding="utf-8") as log:
        log.write("2030-01-01 00:00:00,000 INFO strategy: zero1 (as set; 2 processes)\n")
        log.write("2030-01-01 00:00:01,000 INFO training: 7 samples\n")
        log.write("2030-01-01 00:00:02,000 INFO checkpoint: runs/tiny/checkpoints/step-00000008\n")
    assert read_history(run).strategy == "zero1 (as set; 2 processes)"


def test_several_runs(project: Path) -> None:
    assert report(project, "runs/tiny", "runs/fast", "runs/tiny").out == "report: report.html\n"
    page = read_page(project / "report.html")
    assert {trace["name"] for trace in page.figure("Loss")["traces"]} == {
        f"{run} {metric}" for run in ("tiny", "fast") for metric in ("train/loss", "eval/validation/loss")
    }
    assert page.one("title").text == "tiny, fast – drawbar report"
    assert " ".join(page.one("h1").text.split()) == "tiny, fast"
    table = page.one("table", id="settings-table")
    rows = {line.split("\n")[0] for line in table.text.split("\n\n")}
    assert "optim.lr" in table.text
    assert "0.03" in table.text
    assert "data.train" not in table.text, rows
    assert [element.text for element in page.all("h3")].count("fast") == 6


def test_runs_of_one_name_are_told_apart(project: Path, tmp_path: Path) -> None:
    runs = [copy(project, tmp_path / "a"), copy(project, tmp_path / "b")]
    assert [trace["name"] for trace in page_of(*runs).figure("Learning rate")["traces"]] == ["a/tiny", "b/tiny"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_text(project: Path, tmp_path: Path, text: str) -> None:
    name = text.replace("/", "∕").replace("\x00", "")  # what a file system takes
    run = copy(project, tmp_path, name)
    config = run / "config.yaml"
    train = f"train: {json.dumps(text, ensure_ascii=False)}"
    config.write_text(config.read_text().replace("train: train.txt", train), encoding="utf-8")
    with (run / "logs" / "rank-0000.log").open("a", encoding="utf-8") as log:
        log.write(f"2026-01-01 00:00:00,000 ERROR error: {text}\n  {text}\n")
    (run / "eval" / "validation" / "predictions.jsonl").write_text(
        json.dumps({"id": 0, text: [text], "prediction": text}) + "\n", encoding="utf-8"
    )
    samples = json.loads((run / "first_samples.json").read_text())
    samples[0]["parts"] = {text: [{"text": text, "is_learned": True, "is_special": True}]}
    (run / "first_samples.json").write_text(json.dumps(samples))
    (run / "eval" / "validation" / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": text, "text": text}))
    scores = run / "eval" / "validation" / "scores.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {text: 1.5}))
    write_metrics(
        run, *({"step": step, "time": float(step), f"eval/a/{text}": 1.0, "train/loss": 2.0} for step in (1, 2))
    )
    page = page_of(run)
    assert name in page.one("h1").text
    plain = text.replace("\x00", "�")  # as every HTML parser reads it
    for section in ("settings", "events", "evaluations", "learned"):
        assert text in page.section(section) or plain in page.section(section), section
    assert not page.all("svg", "b")
    drawn = next(trace["name"] for figure in page.figures for trace in figure["traces"] if "eval/a/" in trace["name"])
    assert "<" not in drawn
    assert "<" not in page.source.split('id="figure-data">')[1].split("</script>")[0]


def test_half_of_a_surrogate_pair(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    (run / "eval" / "validation" / "predictions.jsonl").write_text('{"id": 0, "prediction": "\\ud83d!"}\n')
    assert "?!" in page_of(run).section("evaluations")


def test_a_run_that_has_not_measured_anything(tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: new}\n")
    page = page_of(run)
    assert "Nothing is measured yet" in page.section("curves")
    assert "No evaluation" in page.section("evaluations")
    assert "There is no checkpoint" in page.section("checkpoints")


def test_a_run_that_still_trains_after_one_step(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    write_metrics(run, first | {"time": time.time()})
    write_run_status(run, "training", 1, 12, started=0.0)
    (run / LOCK_FILE).write_text("process 12 on gpu7\n")
    page = page_of(run)
    assert "training" in page.section("summary")
    assert page.figure("Loss")["traces"][0]["x"] == [1]
    assert "no time between them" in page.section("time")


def test_a_loss_that_is_not_a_number_and_a_last_line_that_was_cut_off(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    lines = [
        {"step": step, "time": float(step), "train/loss": loss} for step, loss in ((1, 4.0), (2, "nan"), (3, "inf"))
    ]
    write_metrics(run, *lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "time": 4.0, "train/lo')
    page = page_of(run)
    [loss] = page.figure("Loss")["traces"]
    assert (loss["x"], loss["y"]) == ([1, 2, 3], [4.0, None, None])
    assert "2 values not finite" in page.one("div", id="figure-0").attributes["aria-label"]
    assert "2 lines of metrics.jsonl cannot be read" in page.section("summary")


def test_damaged_files(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    (run / "config.yaml").write_text("run: [\n")
    (run / "status.json").write_text("{")
    (run / "checkpoints" / "best.json").write_text("[]")
    (run / "checkpoints" / "step-00000012" / "state.json").write_text("null")
    (run / "eval" / "validation" / "scores.json").write_bytes(b"\xff")
    (run / "eval" / "validation" / "predictions.jsonl").write_bytes(b'{"id": 0}\n\xff\n{"id"')
    (run / "logs" / "rank-0000.log").write_bytes(b"2026-99-99 00:00:00,000 WARNING \xff\nno date\n")
    page = page_of(run)
    for name in ("config.yaml", "status.json", "state.json", "scores.json"):
        assert f"{name} is damaged" in page.section("summary")
    assert "2 of its lines cannot be read" in page.section("evaluations")
    assert "warning" in page.section("events")


def test_where_the_time_went(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    (run / "logs" / "rank-0000.log").write_text("2026-01-01 00:00:00,000 INFO resumed from runs/x at step 20\n")
    write_metrics(
        run,
        {"step": 10, "time": 100.0, "train/loss": 3.0, "train/data_wait_seconds": 0.5},
        {"step": 20, "time": 200.0, "train/loss": 3.0, "train/data_wait_seconds": 2.0},
        {"step": 20, "time": 230.0, "eval/validation/loss": 3.0},
        {"step": 30, "time": 1230.0, "train/loss": 3.0, "train/data_wait_seconds": 0.0},
        {"step": 35, "time": 1290.0, "eval/validation/loss": 3.0},
    )
    section = page_of(run).section("time")
    for kind, shown in {
        "waiting for data": "20s",
        "training steps": "1m20s",
        "evaluations, each with the save before it": "30s",
        "stopped, and started again": "16m40s",
        "steps and an evaluation, between two lines of metrics.jsonl": "1m00s",
    }.items():
        assert section.split(kind)[-1].split("%")[0].startswith(shown), kind


def stamp(seconds: float) -> str:
    """The time as the log writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + ",000"


@pytest.mark.parametrize(("says_stop", "stood", "trained"), [(True, "10m00s", "1m30s"), (False, "10m20s", "1m10s")])
def test_a_run_stood_from_its_stop_to_its_start(
    project: Path, tmp_path: Path, says_stop: bool, stood: str, trained: str
) -> None:
    """It does not log the first step after a start, so that its next line comes much later."""
    run = copy(project, tmp_path)
    start = 1.7e9
    stop = f"{stamp(start + 20)} INFO stopped at step 12/30\n" if says_stop else ""
    resume = f"{stamp(start + 620)} INFO resumed from runs/x at step 12\n"
    (run / "logs" / "rank-0000.log").write_text(stop + resume)
    write_metrics(run, *({"step": s, "time": start + t, "train/loss": 3.0} for s, t in ((10, 0), (20, 690))))
    section = page_of(run).section("time")
    for kind, shown in {"training steps": trained, "stopped, and started again": stood}.items():
        assert section.split(kind)[-1].split("%")[0].startswith(shown), kind


def test_a_long_run_is_thinned_and_keeps_its_spikes(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    steps = 30_000
    lines = [{"step": step, "time": float(step), "train/loss": 2.0, "train/lr": 0.1} for step in range(1, steps + 1)]
    lines[12_345]["train/loss"] = 99.0
    lines[23_456]["train/loss"] = -99.0
    write_metrics(run, *lines)
    page = page_of(run)
    [loss] = page.figure("Loss")["traces"]
    assert len(loss["x"]) <= 1000
    assert loss["x"][0] == 1
    assert loss["x"][-1] > 0.99 * steps
    assert (loss["x"][loss["y"].index(99.0)], loss["x"][loss["y"].index(-99.0)]) == (12_346, 23_457)
    assert "There are more values than are drawn" in page.section("curves")
    assert "30,000" in page.section("curves")


def test_many_predictions_and_many_metrics_are_bounded(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    with (run / "eval" / "validation" / "predictions.jsonl").open("w") as file:
        for number in range(1000):
            columns = {f"c{column}": "x" * 3000 for column in range(20)}
            file.write(json.dumps({"id": number, **columns, "prediction": f"p{number}"}) + "\n")
    write_metrics(run, {"step": 1, "time": 1.0, **{f"mine/{number}": 1.0 for number in range(200)}})
    page = page_of(run)
    assert "holds more records than are shown" in page.section("evaluations")
    assert "(3,000 characters)" in page.section("evaluations")
    assert "p0" in page.section("evaluations")
    assert len(page.section("evaluations")) < 3_000_000
    assert "120 more metrics" in page.section("curves")


def test_jobs_and_signals_are_events(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    place = {name: str(tmp_path / name) for name in ("workdir", "log", "script")}
    job = JobRecord("7", 1e9, "tiny", str(run), **place, nodes=2, processes=8, arguments=(), launcher="slurm")
    append_records([job])
    JobEnd(75, 1e9 + 60, restarts=1).write(job.end_file)
    with (run / "logs" / "rank-0000.log").open("a") as log:
        log.write("2026-01-01 00:00:00,000 WARNING SIGTERM: saving at the end of this step\n")
    events = page_of(run).section("events")
    assert "slurm job 7: 2 nodes × 8 processes" in events
    assert "slurm job 7: exit code 75: stopped; what there was to save is saved; restarted 1 time" in events
    assert "signal" in events


def test_every_stop_is_an_event(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    write_run_status(run, "stopped", 90, 100, started=0.0)
    with (run / "logs" / "rank-0000.log").open("a") as log:
        log.write("2026-01-01 00:00:00,000 INFO stopped at step 60/100\n")
    events = page_of(run).section("events")
    assert events.count("stopped at step 60/100") == events.count("stopped at step 90/100") == 1


def test_a_value_that_never_changes_is_shown_on_a_narrow_axis(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    scores = {"eval/a/accuracy": 0.5, "eval/a/zero": 0.0}
    write_metrics(run, *({"step": step, "time": float(step), "train/loss": 1 / step, **scores} for step in (1, 2)))
    page = page_of(run)
    assert page.figure("Evaluation: accuracy")["range"] == pytest.approx([0.45, 0.55])
    assert page.figure("Evaluation: zero")["range"] == [-1.0, 1.0]
    assert page.figure("Loss")["range"] is None


def test_only_reports_are_replaced(project: Path, tmp_path: Path) -> None:
    report(project, "runs/fast", "--to", str(tmp_path / "new" / "mine.html"))
    report(project, "runs/fast", "--to", str(tmp_path / "new" / "mine.html"))
    other = tmp_path / "other.html"
    other.write_text("<!doctype html><p>precious")
    refused = report(project, "runs/fast", "--to", str(other), code=2)
    check_one_message(refused.err, "is there already, and is no report of drawbar's")
    assert other.read_text() == "<!doctype html><p>precious"
    check_one_message(report(project, "runs/fast", "--to", str(tmp_path), code=2).err, "is a folder")
    assert MARKER in (tmp_path / "new" / "mine.html").read_bytes().splitlines()[0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.html"]


def test_what_is_no_run(project: Path) -> None:
    check_one_message(report(project, "runs/fats", code=2).err, "did you mean", "runs/fast")
    assert report(project, code=2).err.startswith("Usage: drawbar report")


def test_it_needs_plotly_and_no_torch(project: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n{}\nfrom drawbar.cli import group\n"
        "try:\n    group.main(sys.argv[1:], standalone_mode=False)\n"
        "except Exception as error:\n    print(error)\nprint('torch' in sys.modules)"
    )
    command = ["report", str(project / "runs" / "tiny"), "--to", str(tmp_path / "a.html")]
    done = [
        subprocess.run(
            [sys.executable, "-c", script.format(first), *command], capture_output=True, text=True, check=True
        )
        for first in ("", "sys.modules['plotly'] = None")
    ]
    assert done[0].stdout == f"report: {tmp_path / 'a.html'}\nFalse\n"
    assert 'pip install "drawbar[report]"' in done[1].stdout
    assert done[1].stdout.endswith("False\n")
