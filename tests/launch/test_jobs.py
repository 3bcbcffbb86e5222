"""What is known of jobs: their records, what Slurm says, how far their runs are. Without a Slurm; for one, see
``test_slurm_users``."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drawbar.config.schema.run_config import LaunchSection, RunConfig
from drawbar.errors import UserError
from drawbar.jobs.commands.cancel import describe_cancelled
from drawbar.jobs.commands.logs import Output
from drawbar.jobs.commands.resume import resumable_jobs
from drawbar.jobs.records import JobEnd, JobRecord, JobStatus, append_records, find, read, run_file, user_file
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm import allocation
from drawbar.jobs.slurm.allocation import Allocation
from drawbar.jobs.slurm.queries import COLUMNS, QueueEntry, expand, parse
from drawbar.jobs.slurm.slurm_launcher import few_cpus, judge_job
from drawbar.jobs.submission import SubmitRequest, prepare_job
from drawbar.tracking.run_view import read_run, write_run_status
from drawbar.util.best_score import BestScore
from drawbar.util.run_dir import LOCK_FILE
from harness import Finished, run_cli
from messages import check_one_message

HOSTILE = ["it's", "$(touch planted)", "two words", "a\nb", '{"number": "9"}', "é \udce9", "RUNNING", "-f", ""]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of jobs of its own for each test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def record(number: str, run_dir: Path, **values: object) -> JobRecord:
    folder = run_dir / "launch"
    known = {"number": number, "time": 1000.0, "run": run_dir.name, "run_dir": str(run_dir)}
    known |= {"workdir": str(run_dir.parent.parent)}
    known |= {"log": str(folder / f"slurm-{number}.log"), "script": str(folder / f"job-{number.split('_')[0]}.sh")}
    return JobRecord(**{**known, "nodes": 1, "processes": 2, "arguments": (), "launcher": "slurm", **values})  # type: ignore[arg-type]


def end(job: JobRecord, code: int, when: float = 2000.0, restarts: int = 0) -> None:
    job.end_file.parent.mkdir(parents=True, exist_ok=True)
    job.end_file.write_text(json.dumps({"code": code, "time": when, "restarts": restarts}))


def entry(number: str = "7", state: str = "RUNNING", **values: object) -> QueueEntry:
    known = {"status": 0, "restarts": 0, "start": "N/A", "used": "0:05", "limit": "1:00:00", "reason": "None"}
    return QueueEntry(number, state, **{**known, "nodes": "n[1-2]", "name": "tiny", **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("word", HOSTILE)
def test_a_record_comes_back_as_it_was_written(tmp_path: Path, word: str) -> None:
    job = record("7", tmp_path / "run", arguments=(word, word), workdir=word, settings=(word,), profile=word)
    append_records([job])
    append_records([replace(job, number="8")])
    for file in (user_file(), run_file(tmp_path / "run")):
        assert read(file) == [job, replace(job, number="8")]
        with file.open("a") as lines:
            lines.write('no record\n{"number": "9"}\n[]\n')
            lines.write(
                file.read_text().splitlines()[0].replace('{"number"', '{"of_a_later_drawbar": 1, "number"') + "\n"
            )
        assert read(file) == [job, replace(job, number="8"), job]


def test_a_job_is_found_by_its_number_its_run_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    first, again = record("7", runs / "tiny"), record("9", runs / "tiny", time=2000.0)
    script = str(runs / "lr" / "launch" / "job-8.sh")
    sweep = [record(f"8_{n}", runs / f"lr-{n}", sweep="lr", script=script, time=1500.0) for n in range(3)]
    for jobs in ([first], sweep, [again]):
        append_records(jobs)
    assert find("7") == [first]
    assert find("9") == find("tiny") == find("runs/tiny") == [again]
    assert find("8") == find("lr") == find("runs/lr") == sweep
    assert find("8_1") == find("lr-1") == find("runs/lr-1/") == sweep[1:2]
    append_records([replace(first, time=3000.0)])  # numbers have begun again
    assert find("7") == [replace(first, time=3000.0)]
    (runs / "lr-2").rename(tmp_path / "lr-2")
    assert find("./lr-2") == [replace(sweep[2], run_dir=str(tmp_path / "lr-2"))]
    for name, says in {
        "tny": "did you mean tiny",
        "8_7": "8_",
        "nothing": "drawbar jobs --all",
        "": "a run's folder",
    }.items():
        with pytest.raises(UserError, match=says):
            find(name)


def test_a_name_is_that_of_this_folders_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other projects have runs of the same name: nobody wants to cancel theirs."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for number, project in (("7", mine), ("8", other)):
        project.mkdir()
        append_records([record(number, project / "runs" / "run", workdir=str(project))])
    for project, number in ((mine, "7"), (other, "8")):
        monkeypatch.chdir(project)
        assert [found.number for found in find("run")] == [number]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"from several folders: {mine}, {other}"):
        find("run")


def test_a_run_that_is_complete_is_not_to_be_resumed(tmp_path: Path) -> None:
    job = record("7", tmp_path / "runs" / "tiny")
    said = describe_cancelled(JobStatus(job, "COMPLETED", code=0))
    assert said == f"job 7 of {job.run_dir}: completed before it was told to stop"
    assert "stopped; nothing was saved" in describe_cancelled(JobStatus(job, "STOPPED", code=75))


def line(**values: str) -> str:
    """A job as ``squeue`` prints it."""
    known = {"JobArrayID": "7_1", "State": "RUNNING", "exit_code": "256", "RestartCnt": "2", "StartTime": "N/A"}
    known |= {"TimeUsed": "0:05", "TimeLimit": "1:00:00", "Reason": "None", "NodeList": "n[1-2]", "Name": "tiny"}
    return "".join(f"{({**known, **values})[name]:<{width}}" for name, width in COLUMNS.items())


@pytest.mark.parametrize("word", [*HOSTILE, " COMPLETED 0 0", "x" * 160, "|", "\t"])
def test_nobodys_words_shift_a_column(word: str) -> None:
    found = parse(line(Name=word))
    assert found == entry("7_1", status=256, restarts=2, name=word.strip())
    assert (found.exit_code, found.is_active) == (1, True)
    assert parse(line(exit_code="9", State="CANCELLED")).exit_code == 137


@pytest.mark.parametrize(
    ("number", "elements"),
    [
        ("7", ["7"]),
        ("7_3", ["7_3"]),
        ("7_[3]", ["7_3"]),
        ("7_[0-2,5]", ["7_0", "7_1", "7_2", "7_5"]),
        ("7_[0-6:3,9-10%2]", ["7_0", "7_3", "7_6", "7_9", "7_10"]),
    ],
)
def test_elements_that_slurm_lists_together(number: str, elements: list[str]) -> None:
    assert expand(number) == elements


@pytest.mark.parametrize(
    ("says", "left", "state", "words", "code"),
    [
        (entry(state="PENDING", reason="Priority", nodes=""), None, "PENDING", "waits: Priority", None),
        (
            entry(state="PENDING", reason="Resources", start="2026-01-01T08:00:00", restarts=1),
            (75, 0),
            "PENDING",
            "waits: Resources, starts about 2026-01-01 08:00:00; restarted 1 time",
            None,
        ),
        (entry(restarts=2), None, "RUNNING", "on n[1-2]; restarted 2 times", None),
        (entry(state="COMPLETING"), (0, 0), "COMPLETING", "on n[1-2]", None),
        (entry(state="COMPLETED"), (0, 1), "COMPLETED", "restarted 1 time", 0),
        (entry(state="FAILED", status=256), (1, 0), "FAILED", "exit code 1: failed", 1),
        (
            entry(state="FAILED", status=75 << 8),
            (75, 0),
            "STOPPED",
            "exit code 75: stopped; what there was to save is saved",
            75,
        ),
        (entry(state="CANCELLED"), None, "CANCELLED", "exit code 1: failed", 1),
        (entry(state="OUT_OF_MEMORY", status=9), None, "OUT_OF_MEMORY", "exit code 137: killed, perhaps", 137),
        (entry(state="TIMEOUT", status=15), (143, 0), "TIMEOUT", "exit code 143: killed by signal 15", 143),
        (None, (0, 3), "COMPLETED", "restarted 3 times", 0),
        (None, (2, 0), "FAILED", "exit code 2: the request is wrong", 2),
        (None, (130, 0), "STOPPED", "exit code 130: interrupted; what there was to save is saved", 130),
        (None, None, "LOST", "Slurm has forgotten it", None),
    ],
)
def test_how_a_job_stands(
    tmp_path: Path, says: QueueEntry | None, left: tuple[int, int] | None, state: str, words: str, code: int | None
) -> None:
    job = record("7", tmp_path / "tiny")
    if left is not None:
        end(job, left[0], restarts=left[1])
    found = judge_job(job, says, JobEnd.read(job))
    assert (found.state, found.code) == (state, code)
    assert found.remarks.startswith(words)
    assert found.is_active is (says is not None and says.is_active)


def test_a_complete_run_goes_on_with_more_steps_alone(tmp_path: Path) -> None:
    done = judge_job(record("7", tmp_path / "tiny"), entry(state="COMPLETED"), None)
    with pytest.raises(UserError, match="tiny is complete") as refused:
        resumable_jobs("tiny", [done], ("cluster.nodes=2",))
    assert "drawbar resume tiny train.steps=N" in str(refused.value.remedy)
    assert resumable_jobs("tiny", [done], ("cluster.nodes=2", "train.steps=50")) == [done]


def test_lost_nodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho n1 idle\necho n2 'down*'\necho n3 'allocated*'\necho n4 mixed\necho n2 down\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = record("7", tmp_path / "tiny")
    assert judge_job(job, entry(state="NODE_FAIL"), None).remarks == "lost n2, n3; exit code 1: failed"


def test_how_far_a_run_is(tmp_path: Path) -> None:
    assert read_run(tmp_path).progress.step_of_total == ""
    rows = [
        {"step": 1, "time": 1000.0, "train/loss": 4.0, "train/tokens_per_second": 5.0, "train/epoch": 0.5},
        {"step": 2, "time": 1030.0, "train/loss": "nan", "train/tokens_per_second": 6.0, "train/epoch": 1.0},
        {"step": 2, "time": 1031.0, "eval/validation/loss": 3.0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(f'{text}[]\n{{"step": "x"}}\n{text[:30]}')  # the last one is cut off
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-00000002", "step-00000004.tmp"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "best.json").write_text(BestScore(step=2, metric="loss", score=3.0).to_json())
    found = read_run(tmp_path).progress
    assert (found.step_of_total, found.checkpoint, found.written) == ("2", 2, 1031.0)
    assert found.loss != found.loss  # not a number
    assert found.best == BestScore(step=2, metric="loss", score=3.0)
    view = read_run(tmp_path)  # a line took 30 seconds
    assert [replace(view, looked=1031.0 + ago).is_silent for ago in (299, 301)] == [False, True]

    write_run_status(tmp_path, "training", 2, 20, started=1030.5)  # it stood still for 30 seconds, and was resumed
    assert read_run(tmp_path).progress.patience < 300

    write_run_status(tmp_path, "stopped", 2, 20, started=0.0)
    found = read_run(tmp_path).progress
    assert (found.run_state, found.step_of_total) == ("stopped", "2/20")
    (tmp_path / "status.json").write_text("{")
    assert read_run(tmp_path).progress.step_of_total == "2"


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "time": 1.0, "train/loss": 1.0, "text": "é" * 10}) + "\n")
    assert read_run(tmp_path).progress.step == 19_999


def test_a_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "log"
    output = Output({"log": file})
    assert output.read("log") == b""
    file.write_bytes(b"one\n")
    assert output.read("log") == b"one\n"
    assert output.read("log") == b""
    with file.open("ab") as more:
        more.write(b"two")
    assert output.read("log") == b"two"
    file.write_bytes(b"new\n")  # shorter: begun anew
    assert output.read("log") == b"new\n"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "DRAWBAR_JOB": "7"}, None),  # one of ours
        ({"SLURM_JOB_ID": "7", "DRAWBAR_JOB": "6"}, Allocation("7", 1, None, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "1"}, Allocation("7", 2, None, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}, Allocation("7", 2, 8, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "a100:4"}, Allocation("7", 1, 4, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "0", "SLURM_CPUS_PER_TASK": "6"}, Allocation("7", 1, None, 6)),
    ],
)
def test_allocations(environ: dict[str, str], found: Allocation | None) -> None:
    assert Allocation.here(environ) == found


def test_a_run_fits_into_an_allocation() -> None:
    here = Allocation("7", 4, 8, 16)
    default = here.fit(RunConfig(), False)
    assert (default.nodes, default.gpus_per_node, default.cpus_per_task, default.requeue) == (4, 8, 16, False)
    assert here.fit(RunConfig(device="cpu"), False).gpus_per_node is None
    chosen = here.fit(RunConfig(cluster=ClusterSection(nodes=1, gpus_per_node=2, cpus_per_task=3)), True)
    assert (chosen.nodes, chosen.gpus_per_node, chosen.cpus_per_task) == (1, 2, 3)
    with pytest.raises(UserError, match="asks for 5 nodes, but the allocation 7 has 4"):
        here.fit(RunConfig(cluster=ClusterSection(nodes=5)), True)


DETAILS = """\
JobId=7 JobName=interactive NodeList=n[1-3] NumNodes=3 NumCPUs=12 CPUs/Task=1 Socks/Node=* JOB_GRES=gpu:a100:20 \
  Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:8(IDX:0-7),nvme(CNT:1) \
  Nodes=n3 CPU_IDs=0-3 Mem=0 GRES=gpu:a100:{last}(IDX:0-3) MinCPUsNode=1 TresPerNode=gres:gpu:4
"""


@pytest.mark.parametrize("last", [8, 4])
def test_salloc_tells_no_gpus_but_slurm_does(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """As ``scontrol show job --details`` of Slurm 22.05 writes it, after ``salloc --gres=gpu:…``."""
    monkeypatch.setattr(
        allocation, "slurm_output", lambda *command: DETAILS.format(last=last) if command[-1] == "7" else None
    )
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "3",
        "SLURM_JOB_CPUS_PER_NODE": "6(x2),4",
        "SLURM_CPUS_PER_TASK": "2",
    }
    here = Allocation.here(environ)
    assert here is not None
    assert (here.gpus_per_node, here.cpus_per_task) == (last, 4)
    if last == 8:
        assert here.fit(RunConfig(), False).gpus_per_node == 8
        return
    with pytest.raises(UserError, match=r"n\[1-2\] has 8, n3 has 4[\s\S]*cluster\.gpus_per_node=4"):
        here.fit(RunConfig(), False)
    assert here.fit(RunConfig(launch=LaunchSection(nproc=2)), False).gpus_per_node == 4
    assert here.fit(RunConfig(device="cpu"), False).gpus_per_node is None


def test_few_cpus_in_an_allocation_are_told() -> None:
    assert few_cpus(ClusterSection(cpus_per_task=1), 8) == [
        "the allocation has 1 CPU on a node, for 8 processes (salloc -c)"
    ]
    assert few_cpus(ClusterSection(cpus_per_task=8), 8) == few_cpus(ClusterSection(), 8) == []


def test_cpus_that_slurm_counts_in_another_way() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "128", "SLURM_CPUS_PER_TASK": "64"}
    assert Allocation.here(environ) == Allocation("7", 1, None, 128)
    assert Allocation.here({**environ, "SLURM_HINT": "nomultithread"}) == Allocation("7", 1, None, 64)


def call(*arguments: str, cwd: Path, **environ: str) -> Finished:
    known = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], "PATH": "/nowhere"}
    return run_cli(*arguments, cwd=cwd, env={**known, **environ})


@pytest.mark.exhaustive
def test_what_the_files_know_needs_no_slurm(tmp_path: Path) -> None:
    assert call("jobs", cwd=tmp_path).out == "no jobs\n"
    old, done = record("7", tmp_path / "runs" / "old"), record("8", tmp_path / "runs" / "tiny", time=time.time())
    for job in (old, done):
        append_records([job])
        end(job, 0, when=job.time + 60)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").write_text('{"step": 3, "time": 5.0, "train/loss": 2.0}\n')
    Path(done.log).write_text("all is well\n")
    listed = call("jobs", cwd=tmp_path)
    assert (listed.code, "old" in listed.out) == (0, False), listed.err
    assert listed.out.splitlines()[-1].split() == ["8", "tiny", "COMPLETED", "3"]
    assert "old" in call("jobs", "--all", cwd=tmp_path).out
    assert call("logs", "tiny", cwd=tmp_path).out == "all is well\n"
    followed = call("logs", "8", "-f", cwd=tmp_path)
    assert (followed.code, followed.out) == (0, "all is well\n"), followed.err
    told = call("status", "runs/tiny", cwd=tmp_path)
    assert "8: COMPLETED" in told.out
    assert json.loads(call("status", "8", "--json", cwd=tmp_path).out)["progress"]["step"] == 3
    for command, says in {"cancel": "there is nothing to cancel: 8: COMPLETED", "resume": "8 is complete"}.items():
        refused = call(command, "8", cwd=tmp_path)
        assert refused.code == 2
        check_one_message(refused.err, says)

    append_records([replace(record("9", tmp_path / "runs" / "own"), program="/me/my task.py")])
    end(record("9", tmp_path / "runs" / "own"), 1)
    check_one_message(call("resume", "own", cwd=tmp_path).err, "was submitted by /me/my task.py", "resume own")

    done.end_file.unlink()
    listed = call("jobs", cwd=tmp_path)  # another launcher's jobs are shown in any case
    assert listed.code == 0, listed.err
    assert listed.out.splitlines()[-1].split() == ["8", "tiny", "UNKNOWN", "3"]
    assert "warning: some jobs are UNKNOWN: there is no Slurm here" in listed.err
    for command in (["status", "8"], ["cancel", "8"], ["logs", "8", "-f"], ["resume", "8"]):
        asked = call(*command, cwd=tmp_path)
        assert asked.code == 2
        check_one_message(asked.err, "there is no Slurm here: the command squeue is not installed")
    check_one_message(call("status", "nothing", cwd=tmp_path).err, "no job of 'nothing' is known")


def test_a_run_that_was_never_submitted_has_a_status(project: Path) -> None:
    (project / "runs" / "here").mkdir(parents=True)
    (project / "runs" / "here" / "config.yaml").write_text("train:\n  steps: 5\n")
    (project / "runs" / "here" / LOCK_FILE).touch()
    told = call("status", "runs/here", cwd=project)
    assert (told.code, told.out.splitlines()[1]) == (0, "step        none yet"), told.err
    assert json.loads(call("status", "runs/here", "--json", cwd=project).out)["job"] is None


def test_a_job_that_is_submitted_again_waits_for_nobody(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has waited once, and Slurm may not know the other job any more."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/nowhere")
    dependency = "cluster.options.dependency=afterok:5"
    assert f"--{dependency[16:]}" in prepare_job(SubmitRequest(("config.yaml", dependency))).script()
    kept = (project / "config.yaml").read_text() + "cluster: {options: {dependency: 'afterok:5', qos: high}}\n"
    (project / "kept.yaml").write_text(kept)
    script = prepare_job(SubmitRequest((), resubmitted=("kept.yaml",))).script()
    assert "--qos=high" in script
    assert "dependency" not in script.partition("drawbar_yaml")[0]
    assert f"--{dependency[16:]}" in prepare_job(SubmitRequest((), resubmitted=("kept.yaml", dependency))).script()


def test_several_tasks_are_no_world(project: Path) -> None:
    for settings in ([], ["launch.nproc=2"]):
        done = call("train", "config.yaml", *settings, cwd=project, SLURM_STEP_NUM_TASKS="2")
        assert done.code == 2
        check_one_message(done.err, "srun started 2 tasks", "drawbar submit config.yaml --to slurm")
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sweep", "optim.lr=1e-2,fast"], ["the run with optim.lr=fast run.name=tiny-lrfast: ", "optim.lr"]),
        (["--sweep", "optim.lr"], ["expected KEY=VALUE,VALUE"]),
        (["--sweep", "optim.lr=1e-2,"], ["expected KEY=VALUE,VALUE"]),
        (["--sweep", "run.name=a,b"], ["run.name cannot be swept"]),
        (["--sweep", "cluster.nodes=1,2"], ["cluster.nodes cannot be swept"]),
        (["--sweep", "optim.lr=1,1"], ["optim.lr has the value 1 twice"]),
        (["--sweep", "optim.lr=1", "--sweep", "optim.lr=2"], ["optim.lr is swept twice"]),
        (["--at-once", "2"], ["--at-once is for a --sweep"]),
        (["run.name=other"], ["the run other exists already, with another configuration", "optim.lr"]),
    ],
)
def test_what_cannot_be_submitted(project: Path, arguments: list[str], says: list[str]) -> None:
    (project / "runs" / "other").mkdir(parents=True)
    text = (project / "config.yaml").read_text().replace("lr: 1.0e-2", "lr: 2.0e-2")
    (project / "runs" / "other" / "config.yaml").write_text(text)
    done = call("submit", "config.yaml", "--to", "slurm", *arguments, "--dry-run", cwd=project)
    assert (done.code, done.out) == (2, "")
    check_one_message(done.err, *says)


def test_a_sweep_in_an_allocation_is_refused(project: Path) -> None:
    sweep = ("submit", "config.yaml", "--to", "slurm", "--sweep", "optim.lr=1,2")
    done = call(*sweep, cwd=project, SLURM_JOB_ID="7")
    check_one_message(done.err, "a sweep is a job of its own, and this is the allocation 7")
    assert call(*sweep, "--dry-run", cwd=project, SLURM_JOB_ID="7", DRAWBAR_JOB="7").code == 0


def test_nothing_about_jobs_imports_torch() -> None:
    modules = "jobs.submission, drawbar.jobs.records, drawbar.tracking.run_view"
    script = f"import sys, drawbar.{modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
