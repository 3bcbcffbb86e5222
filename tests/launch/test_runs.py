"""``drawbar runs``: the state of each run, from its files."""

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drawbar.jobs.records import JobEnd, JobRecord, JobStatus, append_records
from drawbar.jobs.run_jobs import run_job
from drawbar.tracking.run_view import RunState, list_runs, read_run, write_run_status
from drawbar.util.run_dir import LOCK_FILE
from harness import run_cli
from messages import check_one_message

DAY = 86400.0


def make_run(folder: Path, state: RunState | None, written: float, loss: float | str = 2.5) -> Path:
    """A run as its own files tell of it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 20}\n")
    line = {"step": 10, "time": written, "train/loss": loss}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / LOCK_FILE).write_text("process 12 on gpu7\n")
    if state is not None:
        write_run_status(folder, state, 10, 20, started=0.0)
    return folder


def submit(folder: Path) -> JobRecord:
    place = {name: str(folder / name) for name in ("workdir", "log", "script")}
    job = JobRecord(
        "7", time.time(), folder.name, str(folder), **place, nodes=1, processes=2, arguments=(), launcher="slurm"
    )
    append_records([job])
    return job


def states(folder: Path) -> dict[str, str]:
    return {run.folder.name: run.state for run in list_runs(folder)}


def test_real_runs(project: Path) -> None:
    assert run_cli("train", "config.yaml", "train.steps=5", cwd=project).code == 0
    assert run_cli("train", "config.yaml", "optim.lr=1e9", "run.name=wild", cwd=project).code in (0, 1)
    done = run_cli("runs", cwd=project)
    assert done.code == 0, done.err
    rows = {line.split()[0]: line for line in done.out.splitlines()[4:]}
    assert rows.keys() == {"tiny", "wild"}
    assert "complete" in rows["tiny"]
    assert "5/5" in rows["tiny"]
    best = json.loads((project / "runs" / "tiny" / "checkpoints" / "best.json").read_text())
    assert f"loss {best['score']:.3f}" in rows["tiny"]


def test_every_state_newest_first(tmp_path: Path) -> None:
    now = time.time()
    make_run(tmp_path / "done", "complete", now - 5)
    make_run(tmp_path / "wild", "failed", now - 4, loss="nan")
    make_run(tmp_path / "later", "stopped", now - 3)
    make_run(tmp_path / "busy", "training", now - 2)
    make_run(tmp_path / "killed", "training", now - DAY)
    make_run(tmp_path / "slow", "training", now - 2 * DAY)
    make_run(tmp_path / "ancient", None, now - 3 * DAY)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").touch()
    submit(tmp_path / "queued")
    JobEnd(1, time.time()).write(submit(tmp_path / "refused").end_file)
    with (tmp_path / "slow" / LOCK_FILE).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the process that trains it does
        found = states(tmp_path)
    assert list(found)[2:] == ["busy", "later", "wild", "done", "killed", "slow", "ancient"]
    assert found == {
        "queued": "submitted", "refused": "failed", "busy": "training", "later": "stopped", "wild": "failed",
        "done": "complete", "killed": "stale", "slow": "training", "ancient": "unknown",
    }  # fmt: skip
    assert states(tmp_path / "slow") == {"slow": "stale"}  # nobody holds the lock any more

    said = run_cli("status", str(tmp_path / "killed"), cwd=tmp_path)
    assert "stale" in said.out, said.err
    told = json.loads(run_cli("status", str(tmp_path / "killed"), "--json", cwd=tmp_path).out)
    assert told["state"] == "stale"

    done = run_cli("runs", str(tmp_path), "--json", cwd=tmp_path)
    values = {line["run"]: line for line in map(json.loads, done.out.splitlines())}
    assert values["wild"]["progress"]["loss"] == "nan"
    assert (values["busy"]["host"], values["busy"]["job"]) == ("gpu7", None)
    assert values["queued"]["job"] == {"launcher": "slurm", "number": "7"}
    assert (values["done"]["progress"]["step"], values["done"]["progress"]["total"]) == (10, 20)
    table = run_cli("runs", str(tmp_path), cwd=tmp_path).out
    assert "slurm 7" in table
    assert "gpu7" in table


def test_a_job_tells_whether_its_run_still_trains(tmp_path: Path) -> None:
    """Where the job has ended there is nothing to wait for; where it runs, silence is no death."""
    ended, silent = make_run(tmp_path / "ended", "training", time.time() - 2), tmp_path / "silent"
    JobEnd(137, time.time() + 1).write(submit(ended).end_file)
    assert read_run(ended).state == "stale"
    job = submit(make_run(silent, "training", time.time() - DAY))
    assert read_run(silent).state == "stale"
    assert read_run(silent, run_job(job, JobStatus(job, "RUNNING", is_active=True))).state == "training"
    assert read_run(silent, run_job(job, JobStatus(job, "PENDING", is_active=True))).state == "stale"


def test_the_folder_of_a_sweep_is_no_run(tmp_path: Path) -> None:
    place = {name: str(tmp_path / "sweep" / "launch" / name) for name in ("workdir", "log", "script")}
    element = JobRecord(
        "7_0",
        1.0,
        "lr-1",
        str(tmp_path / "lr-1"),
        **place,
        nodes=1,
        processes=1,
        arguments=(),
        launcher="slurm",
        sweep="sweep",
    )
    append_records([element])
    assert states(tmp_path) == {"lr-1": "submitted"}


def test_a_run_that_trains_and_has_not_logged_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "new", "training", time.time())
    (run / "metrics.jsonl").unlink()
    [found] = list_runs(tmp_path)
    assert found.state == "training"
    assert found.written == pytest.approx(time.time(), abs=60)


def test_no_runs(tmp_path: Path) -> None:
    assert run_cli("runs", ".", cwd=tmp_path).out == "no runs in .\n"
    check_one_message(run_cli("runs", cwd=tmp_path).err, "No such file or directory", "drawbar runs DIR")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "done", "complete", 5.0)
    script = "import sys; from drawbar.cli import group; group.main(['runs', '.'], standalone_mode=False); "
    command = [sys.executable, "-c", script + "print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("Runs in .\n")
    assert done.stdout.endswith("False\n")
