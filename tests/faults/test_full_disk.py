"""Acceptance: a disk that is full, before a run starts or while it runs, and a limit on the size of files."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import make_project
from harness import run_cli
from messages import check_one_message

pytestmark = pytest.mark.exhaustive

TESTS = Path(__file__).parent.parent
RUNS = {
    "checkpoint": ["checkpoint.every=10", "tracking.log_every=1000"],
    "metrics": ["checkpoint.every=null", "tracking.tensorboard=true"],
    "warn": ["checkpoint.every=10", "checkpoint.on_error=warn", "callbacks=[full:Full]"],
}
"""Runs by what no longer fits on the disk first; the disk of ``warn`` is full for a while only."""
FULL = """
import os, shutil, time
from pathlib import Path
import drawbar

class Full(drawbar.Callback):
    def on_step(self, run, info):
        folder = run.run_dir / "checkpoints"
        if info.step == 15:  # what a failed save has left: the next one deletes it
            while not (folder / "step-00000010").exists():
                time.sleep(0.01)
            left = folder / "step-00000005.tmp"
            left.mkdir()
            fill(left / "model-00000.safetensors")
        if info.step == 25:
            while not (folder / "step-00000020").exists():
                time.sleep(0.01)
            fill(Path("filler"))
        if info.step == 35:
            while "the save of step 30 failed" not in (run.run_dir / "logs" / "rank-0000.log").read_text():
                time.sleep(0.01)
            Path("filler").unlink()

def fill(path):
    found = os.statvfs(path.parent)
    path.write_bytes(bytes(found.f_bavail * found.f_frsize - 40_000))
"""

# Runs inside a small file system, which a file beside the runs fills. Commands are forked from this process, which has
# imported everything: that takes a tenth of the time. Prints what happened as JSON.
SCRIPT = """
import contextlib, json, os, shutil, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import drawbar.train.trainer
import torch.distributed.checkpoint.state_dict
import transformers.models.llama.modeling_llama
import harness
from drawbar.checkpoint.directory import CheckpointDirectory

project, runs = Path(sys.argv[2]), json.loads(sys.argv[3])
filler = project / "filler"
seen = {}

def fill(leave):
    free = os.statvfs(project).f_bavail * os.statvfs(project).f_frsize
    with contextlib.suppress(OSError):  # the run may take some of it meanwhile
        filler.write_bytes(bytes(free - leave))

def start(name):
    (project / name).mkdir()
    pid = os.fork()
    if pid == 0:
        settings = ["train.steps=100", "eval.every=null", f"run.name={run}", *runs[run]]
        harness.run_here(["-m", "drawbar", "train", "config.yaml", *settings], str(project), {}, str(project / name))
    return pid

def finish(name, pid):
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = (project / name / "0.out").read_text() + (project / name / "0.err").read_text()
    found = checkpoints.latest()
    files = sorted(path.name for path in folder.rglob("*"))
    seen[name] = {"code": code, "output": output, "latest": found and found.name, "files": files}

for run in runs:
    folder = project / "runs" / run
    checkpoints = CheckpointDirectory(folder / "checkpoints")
    if run == "checkpoint":
        fill(leave=300_000)
        finish("before", start("before"))
        filler.unlink()

    pid = start(f"during {run}")
    if run == "warn":
        finish(f"during {run}", pid)
        continue
    end = time.monotonic() + 60
    sign = folder / ("metrics.jsonl" if run == "metrics" else "checkpoints/step-00000010")
    while not sign.exists() and time.monotonic() < end:
        time.sleep(0.002)
    fill(leave=0)
    finish(f"during {run}", pid)
    filler.unlink()

    finish(f"after {run}", start(f"after {run}"))
    shutil.rmtree(folder)
print(json.dumps(seen))
"""


@dataclass(frozen=True)
class Seen:
    """A command on the small disk, and what it left there."""

    code: int
    output: str
    latest: str | None
    files: list[str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What the script saw, in a mount name space of its own: it needs no rights outside, and goes with the process."""
    disk, source = tmp_path_factory.mktemp("disk"), make_project(tmp_path_factory.mktemp("source"))
    (source / "full.py").write_text(FULL)
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)]
    if shutil.which("unshare") is None or subprocess.run([*inside, *mount], capture_output=True).returncode != 0:
        pytest.skip("no user name spaces here, so no small file system can be mounted")
    command = 'mount -t tmpfs -o size=5m tmpfs "$1" && cp -r "$2"/. "$1" && shift 2 && exec "$@"'
    script = [sys.executable, "-c", SCRIPT, str(TESTS), str(disk), json.dumps(RUNS)]
    result = subprocess.run(
        [*inside, "sh", "-c", command, "sh", str(disk), str(source), *script],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {name: Seen(**facts) for name, facts in json.loads(result.stdout.splitlines()[-1]).items()}


@pytest.mark.exhaustive
def test_full_before_the_start(seen: dict[str, Seen]) -> None:
    before = seen["before"]
    assert before.code == 2, before.output
    check_one_message(before.output, "not enough disk space for the checkpoints", "needed", "free", "checkpoint.keep")
    assert before.files == []


@pytest.mark.parametrize("run", ["checkpoint", "metrics"])
def test_full_during_the_run(run: str, seen: dict[str, Seen]) -> None:
    during = seen[f"during {run}"]
    assert during.code == 1, during.output
    check_one_message(during.output, f"runs/{run}", "free some space")
    assert re.search(r"No space left on device|does not fit: .* needed, .* free", during.output)
    assert not [name for name in during.files if name.endswith((".tmp", ".deleting"))]
    if run == "checkpoint":
        assert f"{during.latest}, is intact" in during.output


def test_a_run_that_is_to_warn_goes_on_when_there_is_room_again(seen: dict[str, Seen]) -> None:
    during = seen["during warn"]
    assert during.code == 0, during.output
    assert during.latest == "step-00000100"
    assert not [name for name in during.files if name.endswith((".tmp", ".deleting"))]
    [warning] = re.findall(r"the save of step (\d+) failed; the run continues", during.output)
    assert warning == "30"
    assert re.search(r"step-00000030 was not begun, as it does not fit: \d.* needed, .* free", during.output)


@pytest.mark.parametrize("run", ["checkpoint", "metrics"])
def test_the_same_command_goes_on_when_there_is_room(run: str, seen: dict[str, Seen]) -> None:
    during, after = seen[f"during {run}"], seen[f"after {run}"]
    assert after.code == 0, after.output
    assert after.latest == "step-00000100"
    assert ("resumed from" in after.output) == (during.latest is not None)
    if during.latest is not None:
        assert f"{during.latest} at step" in after.output


LIMITED = """
import os, resource
import drawbar

if "LIMIT" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]), resource.RLIM_INFINITY))

class Limited(drawbar.CausalLM):
    pass
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("limit", "stopped"), [(1000, "a file of the run"), (4000, "runs/tiny/tokenizer.tmp")])
def test_a_run_directory_that_is_opened_half(limit: int, stopped: str, project: Path) -> None:
    """The first files come after all checks. Where they cannot be written, the same command must work later."""
    (project / "limited.py").write_text(LIMITED)
    command = ("train", "config.yaml", "task.type=limited:Limited")
    assert run_cli("prepare", *command[1:], cwd=project).code == 0  # so that encoded data are not what is stopped
    done = run_cli(*command, cwd=project, env={"LIMIT": str(limit)})
    assert done.code == 1, done.err
    says = (f"cannot write {stopped}: File too large", "runs/tiny", "ulimit -f unlimited")
    check_one_message(done.out + done.err, *says)
    done = run_cli(*command, cwd=project)
    assert done.code == 0, done.err
