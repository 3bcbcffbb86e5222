"""Ranks that are forked from a process with their imports: they are as new ones, or they are not forked."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.cli.train import RANK_MODULES
from drawbar.launch.process_tree import descendants
from drawbar.launch.warm_process import ForkedRank, WarmProcess
from harness import run_cli, run_ranks, wait_until
from programs import need_library
from runs import losses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
OWN = """
import json, multiprocessing, os, signal, sys, time
from pathlib import Path
from drawbar.config.schema.task_sections import TaskConfig

class Own:
    class Config(TaskConfig):
        pass

if "MARK" in os.environ:
    opened = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(abs, (-3,))
    Path(os.environ["MARK"]).write_text(json.dumps({
        "parent": os.getppid(), "session": os.getsid(0), "process": os.getpid(), "arguments": sys.argv[1:],
        "main": sys.modules["__main__"].__spec__.name, "open": opened, "spawned": spawned,
        "imported": "colorsys" in sys.modules, "heeds SIGTERM": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }))
    time.sleep(float(os.environ.get("SECONDS", 0)))
"""
SEES_TORCHAO = (
    OWN
    + """
    before = "torchao" in sys.modules
    import torchao
    Path(os.environ["MARK"]).write_text(f"before: {before}, then: {torchao.__name__}")
"""
)
SHOW = ["-P", "-m", "drawbar", "config", "show", "config.yaml"]
STARTS_A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
OPENS_A_FILE = "import sys\nfile = open(sys.executable, 'rb')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.yaml").write_text("task: {type: own:Own}\n")
    (tmp_path / "thread.py").write_text(STARTS_A_THREAD)
    (tmp_path / "opens.py").write_text(OPENS_A_FILE)
    (tmp_path / "asks_cuda.py").write_text("import torch\ntorch.cuda.is_available()\n")
    return tmp_path


@contextmanager
def project_of(folder: str) -> Iterator[None]:
    """The warm process imports what the current folder has only if that is asked for."""
    with chdir(folder), pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield


def fork_two(folder: str) -> tuple[int, list[int], list[dict[str, Any]], list[int]]:
    """In a process of its own, the parent of the ranks."""
    marks = [Path(folder, f"mark-{number}") for number in range(2)]
    with project_of(folder):
        warm = WarmProcess(["colorsys"], 2)
        ranks = [
            warm.fork(arguments, {**os.environ, "MARK": str(mark)})
            for mark, arguments in zip(marks, (SHOW, [*SHOW, "no.such=key"]), strict=True)
        ]
        assert warm.fork(SHOW, dict(os.environ)) is None  # it has ended
        codes = [rank.wait(60) for rank in ranks if rank]
        orphan = subprocess.run(
            ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
        )
        left = descendants(os.getpid())
        os.kill(int(orphan.stdout), signal.SIGKILL)
    return os.getpid(), codes, [json.loads(mark.read_text()) for mark in marks], left


def test_a_forked_rank_is_as_a_new_one(folder: Path) -> None:
    ((launcher, codes, ranks, left),) = run_ranks(fork_two, 1, str(folder))
    assert codes == [0, 2]
    assert left == []
    for rank in ranks:
        assert rank["parent"] == launcher
        assert rank["session"] == rank["process"]
        assert rank["open"] == [0, 1, 2, 3, 4]  # with those of the thread that hears signals, as in a new process
        assert rank["spawned"] == 3
        assert rank["main"] == "drawbar.__main__"
        assert rank["imported"]
        assert rank["heeds SIGTERM"]
    assert ranks[0]["arguments"] == SHOW[3:]


def refuse(folder: str, modules: list[str], arguments: list[str], changed: dict[str, str]) -> bool:
    with project_of(folder), WarmProcess(modules, 1) as warm:
        os.environ.update(changed)
        refused = warm.fork(arguments, dict(os.environ)) is None
    return refused and not descendants(os.getpid())


@pytest.mark.parametrize(
    ("modules", "arguments", "changed"),
    [
        (["thread"], SHOW, {}),
        (["opens"], SHOW, {}),
        (["asks_cuda"], SHOW, {}),
        (["no_such_module"], SHOW, {}),
        ([], ["own.py"], {}),
        ([], SHOW, {"HF_HOME": "/elsewhere"}),
    ],
    ids=[
        "a thread",
        "an open file",
        "CUDA asked for devices",
        "a module that is not there",
        "a script",
        "a variable that the user's code has set",
    ],
)
def test_what_is_not_forked(folder: Path, modules: list[str], arguments: list[str], changed: dict[str, str]) -> None:
    if modules == ["asks_cuda"] and not torch.backends.cuda.is_built():
        pytest.skip("torch is built without CUDA")
    assert run_ranks(refuse, 1, str(folder), modules, arguments, changed) == [True]


def see_torchao(folder: str) -> tuple[bool, str]:
    """Whether a rank that is forked with transformers imported has torchao, and what it says when it imports that."""
    Path(folder, "sees.py").write_text(SEES_TORCHAO)
    with project_of(folder), WarmProcess(RANK_MODULES, 1) as warm:
        rank = warm.fork(["-P", "-m", "drawbar", "config", "show", "sees.yaml"], {**os.environ, "MARK": "mark"})
        return rank is not None and rank.wait(60) == 0, Path("mark").read_text()


@pytest.mark.exhaustive
def test_transformers_imports_no_torchao_before_the_fork(folder: Path) -> None:
    """It asks CUDA for devices, and then nothing can be forked: ranks import it where they need it."""
    need_library("torchao", "fp8")
    (folder / "sees.yaml").write_text("task: {type: sees:Own}\n")
    assert run_ranks(see_torchao, 1, str(folder)) == [(True, "before: False, then: torchao")]


def kill_one(folder: str) -> tuple[int | None, int]:
    with project_of(folder), WarmProcess([], 1) as warm:
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # as torch's launcher does, before it starts ranks
        rank = warm.fork(SHOW, {**os.environ, "MARK": "mark", "SECONDS": "60"})
        assert isinstance(rank, ForkedRank)
        wait_until(Path("mark").exists, "the rank", seconds=20)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.1)
        running = rank.poll()
        os.killpg(rank.pid, signal.SIGKILL)
        return running, rank.wait(60)


def test_what_is_no_child_is_no_rank() -> None:
    with pytest.raises(ChildProcessError):
        ForkedRank(os.getppid())


def test_a_forked_rank_that_is_killed(folder: Path) -> None:
    assert run_ranks(kill_one, 1, str(folder)) == [(None, -signal.SIGKILL)]


def leave_early(folder: str) -> int:
    """A launcher that is killed while the process still imports."""
    with project_of(folder):
        launcher = os.fork()
        if launcher == 0:
            WarmProcess(["forever"], 1)
            time.sleep(60)
        warm = wait_until(lambda: descendants(launcher), "the process")[0]
        wait_until(Path("importing").exists, "its imports")
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
        wait_until(lambda: not Path(f"/proc/{warm}").exists(), "its end", seconds=10)
        return warm


def test_it_ends_with_its_launcher(folder: Path) -> None:
    (folder / "forever.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n")
    run_ranks(leave_early, 1, str(folder))


NOTE = """
import json, os, sys
from pathlib import Path
import drawbar

class Note(drawbar.Callback):
    def on_train_start(self, run):
        names = ("OMP_NUM_THREADS", "LOCAL_RANK", "WORLD_SIZE")
        facts = {name: os.environ[name] for name in names} | {"program": sys.orig_argv[1:5], "parent": os.getppid()}
        Path(f"note-{run.rank}").write_text(json.dumps(facts))
"""


@pytest.mark.exhaustive
def test_a_run_of_forked_ranks_is_that_of_new_ones(project: Path) -> None:
    (project / "note.py").write_text(NOTE)
    for name in ("click.py", "torch.py"):
        (project / name).write_text("raise SystemExit('the current folder is no place for libraries')\n")
    command = ["train", "config.yaml", "launch.nproc=2", "callbacks=[note:Note]", "train.steps=3"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "drawbar", *command],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, out + err
    for rank in range(2):
        note = json.loads((project / f"note-{rank}").read_text())
        assert note == {
            "OMP_NUM_THREADS": "1",
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "program": ["-u", "-P", "-m", "drawbar.launch.warm_ranks"],
            "parent": launcher.pid,
        }
    done = run_cli(*command, "run.name=new", cwd=project)
    assert done.code == 0, done.err
    assert losses(project / "runs" / "tiny") == losses(project / "runs" / "new")
