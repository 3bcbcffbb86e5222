"""Training on two ssh hosts, which are this machine under two names: see ``sshd``."""

import json
import os
import re
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import drawbar
from conftest import make_project
from harness import run_cli, start_cli, wait_until
from messages import check_one_message
from runs import fit_in, largest_difference, losses
from sshd import Sshd, processes

SOURCE = Path(drawbar.__file__).parents[1]
CANARY = "canary-7f3a91"
HOSTS = ("--hosts", "gpu1:2,gpu2:2")


def cluster(sshd: Sshd, mark: str) -> tuple[str, ...]:
    """What the hosts need. ``mark`` is in the environment of all that runs on them."""
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MARK": mark}
    return (f"cluster.ssh_config={sshd.config}", f"cluster.environment={json.dumps(environment)}")


class Submitted:
    """``drawbar submit`` in the background."""

    def __init__(self, sshd: Sshd, project: Path, *arguments: str) -> None:
        self.mark = f"mark-{os.getpid()}-{threading.get_native_id()}-{project.name}"
        self.folder = project.parent / f"output-{len(list(project.parent.glob('output-*')))}"
        self.folder.mkdir()
        command = ("submit", "config.yaml", *cluster(sshd, self.mark), *arguments)
        self.process: BaseProcess = start_cli(*command, cwd=project, output=self.folder, env={"HF_TOKEN": CANARY})

    def output(self) -> str:
        return (self.folder / "0.out").read_text() + (self.folder / "0.err").read_text()

    def wait_for_step(self, project: Path, step: int) -> None:
        log = project / "runs" / "tiny" / "metrics.jsonl"

        def reached() -> bool:
            assert self.process.is_alive(), self.output()
            return log.exists() and f'"step": {step},' in log.read_text()

        wait_until(reached, self.output, 120)

    def on_hosts(self) -> dict[int, str]:
        return processes(self.mark)

    def code(self, seconds: float = 120) -> int | None:
        """The exit code. Nothing is left by then, here or on the hosts."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, self.output()
        wait_until(lambda: not self.on_hosts(), self.on_hosts)
        return self.process.exitcode

    def ranks(self) -> list[int]:
        """The processes that train. Those that are forked show the environment of the process that forked them, which
        has ended by then."""
        found = self.on_hosts().items()
        return [pid for pid, line in found if "warm_ranks" in line or b"\0LOCAL_RANK=" in environment_of(pid)]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.exhaustive
def test_two_hosts_train_as_one_process_and_go_on_after_a_signal(sshd: Sshd, tmp_path: Path) -> None:
    """In a folder, and with data, whose names a shell could mistake for something else; with a secret."""
    folder = tmp_path / "it's $(touch planted); `touch planted` #1"
    folder.mkdir()
    project = make_project(folder)
    (project / "train.txt").rename(project / "$(touch planted)'\" .txt")
    settings = (
        'data.train="$(touch planted)\'\\" .txt"',
        *("parallel.strategy=ddp", "train.steps=60", "eval.every=null", "checkpoint.every=1000", "train.micro_batch=2"),
    )
    first = Submitted(sshd, project, *HOSTS, *settings)
    seen: set[str] = set()

    def watch() -> None:
        while first.process.exitcode is None:
            seen.update(line for line in processes("").values() if CANARY in line)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    first.wait_for_step(project, 3)
    ranks = first.ranks()
    assert len(ranks) == 4, first.on_hosts()
    assert all(f"HF_TOKEN={CANARY}".encode() in environment_of(rank) for rank in ranks)
    os.kill(first.process.pid or 0, signal.SIGTERM)
    assert first.code() == 75, first.output()
    watcher.join(10)
    assert first.output().count("saved at step") == 1, first.output()

    again = Submitted(sshd, project, *HOSTS, *settings)
    assert again.code() == 0, again.output()
    assert again.output().count("resumed from") == 1, again.output()
    found = losses(project / "runs" / "tiny")
    fit_in(project, "run.name=alone", *settings, "parallel.strategy=auto")
    assert len(found) == 60
    assert largest_difference(losses(project / "runs" / "alone"), found) < 1e-4

    lines = [line for line in (first.folder / "0.out").read_text().splitlines() if line]
    assert all(re.match("(gpu1|gpu2): ", line) for line in lines), lines
    assert list(tmp_path.rglob("planted")) == []
    assert seen == set()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


@pytest.mark.exhaustive
def test_when_one_host_loses_a_process_the_other_ends(sshd: Sshd, project: Path) -> None:
    settings = ("parallel.strategy=ddp", "train.steps=100000", "eval.every=null", "launch.nproc=1")
    rank = Submitted(sshd, project, *HOSTS, *settings)
    rank.wait_for_step(project, 3)
    os.kill(rank.ranks()[0], signal.SIGKILL)
    assert rank.code() == 1, rank.output()
    assert "was killed by SIGKILL" in rank.output()


@pytest.mark.exhaustive
def test_hosts_that_cannot_start_are_all_named(sshd: Sshd, project: Path) -> None:
    hosts = ("--hosts", "gpu1:1,stranger:1,nobody:1,changed:1", "train.micro_batch=2")
    done = run_cli("submit", "config.yaml", *cluster(sshd, "mark-unreachable"), *hosts, cwd=project)
    assert done.code == 1, done.out
    check_one_message(
        done.err, "host stranger: ssh cannot reach it", "host nobody: ", "host changed: ", "`ssh stranger"
    )
    for reason in ("Permission denied (publickey)", "Connection refused", "Host key verification failed"):
        assert reason in done.err
    assert "gpu1" not in done.err
    assert processes("mark-unreachable") == {}

    for python, reason in {"/no such/python": "No such file or directory", "/bin/false": "exit code 1"}.items():
        command = ("submit", "config.yaml", *cluster(sshd, "mark-python"), "--hosts", "gpu1:1,gpu2:1")
        done = run_cli(*command, f"cluster.python={python}", "parallel.strategy=ddp", cwd=project)
        assert done.code == 2, done.out
        check_one_message(done.err, "host gpu1: drawbar does not start there", "host gpu2: ", "cluster.python", reason)
    assert processes("mark-python") == {}
    assert not (project / "runs").exists()


@pytest.mark.exhaustive
def test_what_a_host_lacks_is_told_with_its_name(sshd: Sshd, project: Path) -> None:
    command = ("submit", "config.yaml", *cluster(sshd, "mark-lacks"))
    elsewhere = project / "a" / "disk of its own"
    done = run_cli(*command, "--hosts", "gpu1:1", f"cluster.workdir={elsewhere}", cwd=project)
    assert done.code == 2, done.out
    check_one_message(done.err.replace("gpu1: ", ""), "train.txt")
    assert "gpu1: error: " in done.err
    assert elsewhere.is_dir()  # it came with the launch, and the configuration, too

    done = run_cli(*command, "--hosts", "gpu2:1", "cluster.workdir=/proc/none", cwd=project)
    assert done.code == 2
    check_one_message(done.err.replace("gpu2: ", ""), "cannot use the working directory of the job", "cluster.workdir")
