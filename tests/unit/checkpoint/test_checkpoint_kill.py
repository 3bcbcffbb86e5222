"""SIGKILL at every file operation, and at random moments: what was complete stays complete."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_snapshot

# Imports torch once, then forks one real process for each line on its standard input.
WRITER = """
import json, os, signal, sys
from pathlib import Path
import torch
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot

torch.set_num_threads(1)

def snapshot(step, generation):
    values = torch.full((20_000,), float(step * 100 + generation))
    tied = {"embed": values, "head": values, "step": torch.tensor(step)}
    return Snapshot(step, tied, {"m": values + 1}, {"rank-0000/cpu": values[:3] + 0}, {"generation": generation})

def save(directory, step, generation):
    directory.write(snapshot(step, generation))
    with open(directory.path.parent / "done", "a") as done:
        done.write(json.dumps([step, generation]) + "\\n")

def kill_at(number):
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
    count = 0
    def hook(event, _):
        nonlocal count
        if event in operations:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def scenario(directory):
    save(directory, 2, 0)
    save(directory, 2, 1)
    directory.set_best(2, "loss", 0.5)
    save(directory, 3, 0)
    directory.rotate(1, set())

def forever(directory):
    directory.remove_leftovers()
    step = max(directory.steps(), default=0)
    while True:
        step += 1
        save(directory, step, 0)
        save(directory, step, 1)
        directory.rotate(2, {1})

for line in sys.stdin:
    path, mode, number = json.loads(line)
    pid = os.fork()
    if pid == 0:
        directory = CheckpointDirectory(Path(path))
        if mode == "prepare":
            save(directory, 1, 0)
        elif mode == "scenario":
            kill_at(number)
            scenario(directory)
        else:
            forever(directory)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Writer:
    """Starts writing processes, one at a time."""

    def __init__(self):
        self.parent = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, directory, mode, number=0):
        """The process id of a new writer."""
        self.parent.stdin.write(json.dumps([str(directory.path), mode, number]) + "\n")
        self.parent.stdin.flush()
        return int(self.parent.stdout.readline())

    def exit_code(self):
        return int(self.parent.stdout.readline())

    def run(self, *arguments):
        self.start(*arguments)
        return self.exit_code()

    def close(self):
        self.parent.stdin.close()
        self.parent.stdout.close()
        self.parent.wait()


@pytest.fixture(scope="module")
def writer():
    writer = Writer()
    yield writer
    writer.close()


def check(directory):
    """The newest complete checkpoint reads back right, and is no older than the last that was reported written."""
    done = [json.loads(line) for line in (directory.path.parent / "done").read_text().splitlines()]
    latest = directory.latest()
    assert latest is not None
    found = read_snapshot(latest)
    generation = found.state["generation"]
    assert [found.step, generation] >= done[-1]
    value = found.step * 100 + generation
    assert found.model["step"] == found.step
    assert found.model["embed"].eq(value).all()
    assert found.model["head"].equal(found.model["embed"])
    assert found.optimizer["m"].eq(value + 1).all()
    assert found.rng["rank-0000/cpu"].eq(value).all()
    return [found.step, generation]


def leftovers(directory):
    return [name for name in os.listdir(directory.path) if not re.fullmatch(r"step-\d{8}|best\.json", name)]


@pytest.fixture
def memory_path():
    """A folder in memory where there is one: two thousand fsyncs are slow on a busy disk, and SIGKILL needs none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.mark.exhaustive
def test_killed_at_every_file_operation(writer, memory_path):
    prepared = CheckpointDirectory(memory_path / "prepared" / "checkpoints")
    assert writer.run(prepared, "prepare") == 0
    number, seen = 1, set()
    while True:
        directory = CheckpointDirectory(memory_path / "run" / "checkpoints")
        shutil.copytree(prepared.path.parent, directory.path.parent)
        code = writer.run(directory, "scenario", number)
        newest = check(directory)
        seen.update(re.sub(r"\d+", "", name) for name in leftovers(directory))
        directory.remove_leftovers()
        assert leftovers(directory) == []
        assert check(directory) == newest
        shutil.rmtree(directory.path.parent)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        number += 1
    assert number > 50
    assert {"step-.tmp", "step-.replaced", "step-.replaced.deleting", "step-.deleting", "best.json.tmp"} <= seen


@pytest.mark.exhaustive
def test_killed_at_random_moments_and_started_again(writer, tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    assert writer.run(directory, "prepare") == 0
    random_moment = random.Random(0)
    cut_short = 0
    for tries in range(400):  # on a busy machine, most are over before a save has begun
        if tries >= 20 and cut_short and directory.steps()[-1] > 3:
            return
        pid = writer.start(directory, "forever")
        time.sleep(random_moment.uniform(0.005, 0.08))
        os.kill(pid, signal.SIGKILL)
        assert writer.exit_code() == -signal.SIGKILL
        check(directory)
        assert 1 in directory.steps()
        cut_short += bool(leftovers(directory))
    pytest.fail(f"{cut_short} saves were cut short, and the newest step is {directory.steps()[-1]}")
