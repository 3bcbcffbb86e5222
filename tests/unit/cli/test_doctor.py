"""``drawbar doctor`` as a person and a program see it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from drawbar.jobs.commands.doctor import lines
from drawbar.launch.findings import Finding, Level, problem
from harness import run_cli
from messages import check_one_message

SECTIONS = ["Machine", "Libraries", "Device", "Storage", "Run"]


def read(text: str) -> dict[str, dict]:
    return {finding["where"]: finding for finding in json.loads(text)["findings"]}


@pytest.mark.exhaustive
def test_a_machine_and_a_configuration(project: Path) -> None:
    before = sorted(project.iterdir())
    done = run_cli("doctor", "config.yaml", "launch.nproc=2", "parallel.tensor=2", "--json", cwd=project)
    found = read(done.out)
    assert list(dict.fromkeys(finding["section"] for finding in found.values())) == SECTIONS
    problems = [finding for finding in found.values() if finding["level"] == "problem"]
    assert (done.code, problems) == (0, []), done.out
    assert found["device"]["what"] == "cpu (device=cpu); products in fp32, weights and sums in fp32"
    assert found["processes"]["what"] == "2 on this machine (launch.nproc=2)"
    assert found["strategy"]["what"].startswith("ddp × tensor 2")
    assert found["backend"]["what"] == "gloo"
    assert str(project / "runs") in found["run.dir"]["what"]
    assert json.loads(done.out)["healthy"] is True
    assert sorted(project.iterdir()) == before


@pytest.mark.exhaustive
def test_everything_that_is_wrong_is_told_at_once(project: Path) -> None:
    (project / "file").touch()
    env = {
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(project / "hub"), "HF_TOKEN": "canary", "OMP_NUM_THREADS": "1",
        "RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    wrong = ["run.dir=file", "task.model=no-such-model", "task.from_scratch=null", "task.tokenizer=null"]
    done = run_cli("doctor", "config.yaml", *wrong, "train.global_batch=7", "lora={rank: 2}", cwd=project, env=env)
    assert done.code == 1
    assert "Traceback" not in done.err
    lines = done.out.splitlines()
    for says in (
        "problem  run.dir: ",
        "problem  no-such-model: not in the cache, and HF_HUB_OFFLINE is set",
        "problem  the environment: RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers",
        "problem  settings: train.micro_batch",
    ):
        (at,) = [number for number, line in enumerate(lines) if line.strip().startswith(says)]
        assert lines[at + 1].strip().startswith("fix: "), lines[at + 1]
    assert "a run would fail here" in lines[-1]
    assert "canary" not in done.out + done.err


@pytest.mark.exhaustive
def test_a_hub_that_cannot_be_reached(project: Path) -> None:
    wrong = ["task.model=no-such-model", "task.from_scratch=null", "task.tokenizer=null"]
    command = [sys.executable, "-m", "drawbar", "doctor", "config.yaml", *wrong, "--json"]
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(project / "hub"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "the Hugging Face Hub does not answer" in read(done.stdout)["no-such-model"]["what"]


def test_a_wrong_request(project: Path) -> None:
    done = run_cli("doctor", "config.yaml", "optim.lrr=1", cwd=project)
    assert (done.code, done.out) == (2, "")
    check_one_message(done.err, "optim.lrr")


def test_only_one_process_of_a_machine_speaks(project: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    done = run_cli("doctor", cwd=project, env=env)
    assert (done.code, done.out) == (0, "")


@pytest.mark.exhaustive
def test_on_a_terminal(project: Path) -> None:
    """Through a real one: sections, colours, and nothing left of the line that was shown meanwhile."""
    main, child = pty.openpty()
    command = [sys.executable, "-m", "drawbar", "doctor"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=project, env=env, stdout=child, stderr=child) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    text = shown.decode()
    assert "looking around …\r\x1b[K\x1b[1mMachine\x1b[0m" in text
    assert "\x1b[32mok" in text
    assert process.returncode == 0


def test_a_fix_is_one_line_and_all_trouble_is_counted() -> None:
    command = "sudo mount -o remount,size=8G /dev/shm " + "-v " * 30
    host = Finding("host", Level.OK, "in two\nlines")
    memory = Finding("memory", Level.WARNING, "little", "buy some")
    told = list(map(click.unstyle, lines({"Machine": [host, memory, problem("/dev/shm", "small", command)]})))
    assert told[1] == "  ok       host: in two; lines"
    assert f"           fix: {command.strip()}" in told
    assert told[-1] == "1 problem (/dev/shm), 1 warning (memory): a run would fail here."


def test_torch_stays_out_of_the_doctors_own_process() -> None:
    """A torch that cannot be imported must not end it."""
    code = "import sys, drawbar.jobs.commands.doctor, drawbar.jobs.doctor.examine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
