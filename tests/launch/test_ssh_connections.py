"""What is left of a launch over ssh, however it ends: with a program whose processes end only when they are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import drawbar
from drawbar.errors import ExitCode
from harness import wait_until
from messages import check_one_message
from sshd import Sshd, children, processes

SOURCE = Path(drawbar.__file__).parents[1]
LAUNCHER = """\
import os, sys
from dataclasses import replace
from pathlib import Path
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.hosts_file import parse_hosts
from drawbar.errors import UserError
from drawbar.jobs.ssh.supervisor import supervise
from drawbar.jobs.job import Job
from drawbar.jobs.ssh.ssh_command import remote_starts

_, config, mark, patience, *words = sys.argv
cluster = ClusterSection(ssh_config=config, environment={"MARK": mark, "PYTHONPATH": os.environ["PYTHONPATH"]})
job = Job("job", (sys.executable, *words), Path.cwd(), Path.cwd(), cluster=cluster)
starts = remote_starts(job, parse_hosts("gpu1,gpu2"))
try:
    sys.exit(supervise([replace(s, host_job=replace(s.host_job, patience=float(patience))) for s in starts], 60))
except UserError as error:
    sys.exit(print(f"error: {error}", file=sys.stderr) or error.exit_code)
"""
PROGRAM = """\
import json, os, signal, subprocess, sys, time
from pathlib import Path

node = json.loads(os.environ["DRAWBAR_RENDEZVOUS"])["node"]
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
forever = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(forever, start_new_session=True)
if os.fork() == 0:  # a daemon, as it is in the books: another session, and no parent
    os.setsid()
    if os.fork() == 0:
        os.execv(forever[0], forever)
    os._exit(0)
print("ready", flush=True)
Path(f"ready-{node}").touch()
while not (node == 1 and Path("go").exists()):
    time.sleep(0.1)
sys.exit(3)
"""


class Launch:
    """A launch on ``gpu1`` and ``gpu2``, which is running."""

    def __init__(self, sshd: Sshd, folder: Path, patience: float, *words: str) -> None:
        self.folder, self.mark = folder, f"mark-{os.getpid()}-{time.monotonic_ns()}"
        (folder / "program.py").write_text(PROGRAM)
        arguments = (str(sshd.config), self.mark, str(patience), "program.py", *words)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "MARK": self.mark},
            stdout=(folder / "out").open("wb"),
            stderr=(folder / "err").open("wb"),
        )
        wait_until(self.ready, self.output)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        return all((self.folder / f"ready-{node}").exists() for node in (0, 1))

    def output(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    def left(self) -> dict[int, str]:
        """What runs: the launcher, and all that has the variable that the launcher and its job have."""
        return processes(self.mark)

    def complete(self) -> bool:
        """On each host drawbar's own two, the command, and the two that hide; here the launcher, and two ssh."""
        return len(self.left()) >= 2 * 5 + 3

    def code(self) -> int:
        return self.process.wait(60)


@contextmanager
def launch(sshd: Sshd, folder: Path, patience: float = 60, words: tuple[str, ...] = ()) -> Iterator[Launch]:
    launched = Launch(sshd, folder, patience, *words)
    try:
        wait_until(launched.complete, launched.left)  # one that is becoming another program has no environment
        yield launched
        wait_until(lambda: not launched.left(), launched.left)
    finally:
        launched.process.kill()
        launched.process.wait()
        for pid in launched.left():
            os.kill(pid, signal.SIGKILL)


def test_a_launcher_that_is_killed_leaves_nothing(sshd: Sshd, tmp_path: Path) -> None:
    with launch(sshd, tmp_path) as launched:
        launched.process.kill()


@pytest.mark.exhaustive
def test_a_host_that_fails_ends_all_with_its_code(sshd: Sshd, tmp_path: Path) -> None:
    with launch(sshd, tmp_path) as launched:
        (tmp_path / "go").touch()
        assert launched.code() == 3, launched.output()
    assert "drawbar: gpu2 ended with exit code 3" in launched.output()
    assert sorted(line for line in launched.output().splitlines() if "ready" in line) == ["gpu1: ready", "gpu2: ready"]


@pytest.mark.exhaustive
def test_a_lost_connection_ends_all(sshd: Sshd, tmp_path: Path) -> None:
    with launch(sshd, tmp_path) as launched:
        os.kill(sshd.sessions()[0], signal.SIGKILL)
        assert launched.code() == 1
    assert "error: lost the host" in launched.output()
    assert "fix:" in launched.output()


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["parent", "worker"])
def test_what_drawbar_runs_on_a_host_is_killed(sshd: Sshd, tmp_path: Path, which: str) -> None:
    with launch(sshd, tmp_path) as launched:
        own = {pid for pid, line in launched.left().items() if "drawbar.jobs.node.ssh_host" in line}
        assert len(own) == 4
        parent = next(pid for pid in own if own & set(children(pid)))
        worker = next(pid for pid in children(parent) if pid in own)
        os.kill(parent if which == "parent" else worker, signal.SIGKILL)
        assert launched.code() == 1, launched.output()
    assert "error: lost the host gpu" in launched.output()


@pytest.mark.exhaustive
def test_a_launcher_that_says_nothing_counts_as_gone(sshd: Sshd, tmp_path: Path) -> None:
    with launch(sshd, tmp_path, patience=2) as launched:
        launched.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not children_of_sessions(sshd), lambda: children_of_sessions(sshd))
        launched.process.kill()


def children_of_sessions(sshd: Sshd) -> list[int]:
    """What sshd runs for its clients, without its own helpers."""
    below = [child for session in sshd.sessions() for child in children(session)]
    return [child for pid in below for child in [pid, *children(pid)] if "sshd" not in name(child)]


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_signals(sshd: Sshd, tmp_path: Path) -> None:
    """The first is for the command, which does not heed it here; the second ends everything."""
    with launch(sshd, tmp_path, words=("stubborn",)) as launched:
        launched.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert launched.complete(), launched.output()
        launched.process.send_signal(signal.SIGTERM)
        assert launched.code() == 128 + signal.SIGTERM, launched.output()


def test_a_signal_before_the_command_could_listen_loses_nothing(sshd: Sshd, tmp_path: Path) -> None:
    with launch(sshd, tmp_path) as launched:
        launched.process.send_signal(signal.SIGUSR1)
        assert launched.code() == 75, launched.output()


def test_another_version_on_a_host_is_told() -> None:
    """A job with a part that this version does not know."""
    program = "import os; from drawbar.jobs.node.ssh_host import work; raise SystemExit(work(os.getppid()))"
    job = {"launch_id": "x", "node": 0, "names": ["gpu1"], "argv": ["python"], "config": "", "of_tomorrow": 1}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({"job": job}) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.WRONG_REQUEST, done.stderr
    check_one_message(
        done.stderr, "different versions of drawbar", "of_tomorrow", "install the same version on every host"
    )
