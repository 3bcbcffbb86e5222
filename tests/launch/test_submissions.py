"""What a job carries from the moment that it is submitted: its configuration, and the version of the user's code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.config.io.user_code import SNAPSHOT
from drawbar.errors import UserError
from drawbar.jobs.code_snapshot import code_version, copy_code, is_tracked, snapshot_name
from drawbar.jobs.records import read, run_file
from harness import Finished, run_cli
from messages import check_one_message

SLURM = {
    "sbatch": 'cat > "$SCRIPTS/$(($(ls "$SCRIPTS" | wc -l) + 1)).sh"; ls "$SCRIPTS" | wc -l',
    "scontrol": 'case "$*" in *hostnames*) echo n1;; *) echo "NodeName=n1 NodeAddr=127.0.0.1 Port=1";; esac',
    "srun": 'while [[ $1 == --* ]]; do shift; done\ncase "$*" in *first_node*) echo 127.0.0.1:20000;; *) "$@";; esac',
}
"""Programs that stand for Slurm's: jobs have the numbers 1, 2 and so on, and wait until a test runs their scripts."""
TRAINS = f"""\
#!/bin/bash
if [[ "$3" != train ]]; then exec {sys.executable} "$@"; fi
cp "$4" arrived.yaml
{sys.executable} -c 'from drawbar.config.io.user_modules import import_user_module as get; print(get("clean").VERSION)'
"""
"""Stands for Python: in place of training, it keeps the configuration, and says which code it finds."""


class Queue:
    """A project, and a Slurm in which jobs wait."""

    def __init__(self, project: Path) -> None:
        self.project, self.scripts = project, project / "scripts"
        tools = project / "bin"
        for folder in (tools, self.scripts):
            folder.mkdir()
        for name, text in {
            **{name: f"#!/bin/bash\n{text}\n" for name, text in SLURM.items()},
            "python": TRAINS,
        }.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.python = tools / "python"
        (project / "clean.py").write_text("VERSION = 'first'\n")
        self.environ = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SCRIPTS": str(self.scripts),
            "XDG_STATE_HOME": str(project / "state"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def call(self, *arguments: str) -> Finished:
        return run_cli(*arguments, cwd=self.project, env=self.environ)

    def submit(self, *arguments: str) -> Finished:
        settings = (f"cluster.python={self.python}", "cluster.preflight=false")
        done = self.call("submit", "config.yaml", *settings, "--to", "slurm", *arguments)
        assert done.code == 0, done.err
        return done

    def edit(self, before: str, after: str) -> None:
        """The user's next idea, in the same file."""
        file = self.project / "config.yaml"
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))

    def start(self, number: int, **environ: str) -> str:
        """What the job says when it runs, or runs again."""
        slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
        done = subprocess.run(
            ["bash", str(self.scripts / f"{number}.sh")],
            cwd=self.project,
            env={**os.environ, **self.environ, **slurm, "SLURM_JOB_ID": str(number), **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def arrived(self) -> tuple[str, float]:
        """Name and learning rate of the run that the job would have trained."""
        config = load_config(self.project / "arrived.yaml").config
        return config.run.name, config.optim.lr


@pytest.fixture
def queue(project: Path) -> Queue:
    return Queue(project)


@pytest.mark.exhaustive
def test_a_job_trains_what_was_submitted(queue: Queue) -> None:
    """Whatever the file says when the job starts, or starts again."""
    queue.submit("run.name=one", "optim.warmup=3")
    queue.edit("lr: 1.0e-2", "lr: 2.0e-2")
    queue.submit("run.name=two")
    queue.edit("steps: 12", "steps: [")
    for _ in range(2):
        queue.start(1)
        assert queue.arrived() == ("one", 1e-2)
    queue.start(2)
    assert queue.arrived() == ("two", 2e-2)
    kept = queue.project / "runs" / "one" / "launch" / "config-1.yaml"
    assert load_config(kept).config.optim.warmup == 3


def test_so_does_each_run_of_a_sweep(queue: Queue) -> None:
    queue.submit("run.name=wide", "--sweep", "optim.lr=3e-3,4e-3")
    queue.edit("task:", "tusk:")
    queue.start(1, SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="1")
    assert queue.arrived() == ("wide-lr4e-3", 4e-3)
    assert (queue.project / "runs" / "wide-lr4e-3" / "launch" / "config-1_1.yaml").is_file()


@pytest.mark.parametrize("sweep", [(), ("--sweep", "train.steps=5,6")])
def test_a_job_is_resumed_as_it_was_submitted(queue: Queue, sweep: tuple[str, ...]) -> None:
    queue.submit("run.name=one", *sweep)
    for folder in (queue.project / "runs").glob("one*/launch"):
        for record in read(run_file(folder.parent)):
            record.end_file.write_text('{"code": 75, "time": 0, "restarts": 0}')
    queue.edit("lr: 1.0e-2", "lr: 2.0e-2")
    done = queue.call("resume", "one", "cluster.time=7", "--dry-run")
    assert done.code == 0, done.err
    assert "#SBATCH --time=7\n" in done.out
    assert done.out.count("\n  lr: 0.01\n") == max(1, len(sweep))
    assert [line for line in done.out.splitlines() if line.startswith("  steps: ")] == (
        ["  steps: 5", "  steps: 6"] if sweep else ["  steps: 12"]
    )


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@x", *arguments], cwd=folder, check=True)


def test_a_job_knows_its_code(queue: Queue) -> None:
    """With ``--snapshot`` it takes a copy of the code along."""
    git(queue.project, "init", "--quiet")
    git(queue.project, "add", "clean.py", "config.yaml")
    git(queue.project, "commit", "--quiet", "--message=x")
    version = code_version(queue.project)
    assert version is not None
    assert "changes" not in version
    said = queue.submit("run.name=as-it-is").out
    assert f"code: {version}; the job takes what is there when it starts" in said
    (queue.project / "clean.py").write_text("VERSION = 'second'\n")
    said = queue.submit("run.name=copied", "--snapshot").out
    (record,) = read(run_file(queue.project / "runs" / "copied"))
    assert sorted(os.listdir(record.snapshot)) == ["clean.py", "config.yaml"]
    (queue.project / "clean.py").write_text("VERSION = 'third'\n")
    assert queue.start(1).splitlines()[-1] == "third"
    log = queue.start(2).splitlines()
    assert (log[0], log[-1]) == (f"drawbar: submitted with the code of {version} with changes", "second")
    assert f"code: a copy in {record.snapshot}" in said
    assert record.code == f"{version} with changes"
    record.end_file.write_text('{"code": 75, "time": 0, "restarts": 0}')
    again = queue.call("resume", "copied", "--dry-run").out
    assert f"export {SNAPSHOT}={record.snapshot}\n" in again
    assert f"the code of {version} with changes" in again
    (status,) = map(json.loads, queue.call("status", "copied", "--json").out.splitlines())
    assert (status["job"]["code"], status["job"]["snapshot"]) == (record.code, record.snapshot)
    shutil.rmtree(record.snapshot)
    check_one_message(queue.call("resume", "copied", "--dry-run").err, "the copy of the code", "is gone")


def test_what_git_knows_is_copied(tmp_path: Path) -> None:
    """With changes and without a commit; links as links; of the folder alone, and nothing that is not there."""
    project = tmp_path / "repository" / "project"
    (project / "text").mkdir(parents=True)
    git(project.parent, "init", "--quiet")
    assert code_version(project) is None
    with pytest.raises(UserError, match="git knows no files"):
        snapshot_name(project)
    for name in ("a.py", "text/é 1.py", "gone.py", "new.py", "../outside.py"):
        (project / name).write_text(name)
    (project / "link").symlink_to("a.py")
    git(project, "add", "--all", "..")
    git(project, "rm", "--quiet", "--cached", "new.py")
    (project / "gone.py").unlink()
    name = snapshot_name(project)
    (project / "a.py").write_text("changed")
    assert snapshot_name(project) != name
    copy_code(project, tmp_path / "copy")
    found = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if not path.is_dir()}
    assert found == {"a.py", "text/é 1.py", "link"}
    assert (tmp_path / "copy" / "link").readlink() == Path("a.py")
    assert (tmp_path / "copy" / "a.py").read_text() == "changed"


def test_a_copy_of_the_code_is_made_whole_or_not_at_all(project: Path, tmp_path: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "config.yaml")
    for _ in range(2):  # the second time, another process was faster
        copy_code(project, tmp_path / "copy")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot copy the code") as caught:
        copy_code(project, tmp_path / "file" / "copy")
    assert "submit without --snapshot" in str(caught.value.remedy)
    assert sorted(path.name for path in tmp_path.iterdir() if "copy" in path.name) == ["copy"]


def test_without_git(queue: Queue) -> None:
    assert "code:" not in queue.submit("run.name=plain").out
    done = queue.call("submit", "config.yaml", "--to", "slurm", "--snapshot")
    assert done.code == 2
    check_one_message(done.err, "git knows no files", "git init")


def test_a_copy_leaves_out_a_submodule_that_is_not_checked_out(project: Path) -> None:
    """git lists it as one path, which is an empty folder."""
    (project / "library").mkdir()
    git(project, "init", "-q")
    git(project, "add", "config.yaml")
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{'0' * 39}1,library")
    copy_code(project, project / "copy")
    assert os.listdir(project / "copy") == ["config.yaml"]
    assert is_tracked(project, Path("config.yaml"))
    assert not is_tracked(project, Path("train.txt"))
