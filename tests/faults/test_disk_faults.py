"""Acceptance: an error of the disk while a run restores, saves or deletes checkpoints costs no older checkpoint. Either
the run goes on, or it ends with one message that names the error; and the same command goes on exactly."""

import errno
import os
import random
from dataclasses import dataclass

import pytest

from checkpointing_run import KINDS, OLD, CheckpointingRun, phase
from drawbar.checkpoint.directory import CheckpointDirectory
from exhaustive import evenly, params
from faulty_disk import ALWAYS, Ended, FaultyDisk

pytestmark = pytest.mark.exhaustive


@dataclass(frozen=True)
class Fault:
    error: int
    kinds: tuple[str, ...]
    """Of calls that fail."""
    times: int = 1


FAULTS = {
    "full": Fault(errno.ENOSPC, ("create", "write"), ALWAYS),
    "quota": Fault(errno.EDQUOT, ("create",), ALWAYS),
    "io error": Fault(errno.EIO, ("write",)),
    "stale handle": Fault(errno.ESTALE, ("create", "write", "rename", "delete")),
    "read-only": Fault(errno.EROFS, ("create", "write", "rename", "delete"), ALWAYS),
    "fsync error": Fault(errno.EIO, ("fsync",)),
}


CASES = [
    *(("restore", name) for name in FAULTS if name != "io error"),
    *(("save", name) for name in FAULTS),
    *(("rotation", name) for name in ("stale handle", "read-only")),
]
"""When, and which: a restore writes into no file, and a rotation only renames and deletes."""
OFTEN = {
    "whole-1": evenly(CASES, 4),
    "parts-1": evenly(CASES, 8),
    "parts-2": [("restore", "read-only"), ("save", "full"), ("rotation", "stale handle")],
}
"""By layout and number of ranks."""
OF_ONE_RANK = [(run, *case) for run in ("whole-1", "parts-1") for case in CASES]
OF_TWO = [("parts-2", *case) for case in OFTEN["parts-2"]]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, disk: FaultyDisk, tmp_path_factory: pytest.TempPathFactory) -> CheckpointingRun:
    layout, ranks = request.param.split("-")
    return CheckpointingRun(disk, tmp_path_factory.mktemp("run"), layout, int(ranks))


@pytest.fixture(scope="module")
def calls(run: CheckpointingRun) -> list[str]:
    """What rank 0 does."""
    with run.copy() as project:
        return run.train(project, rank="0" if run.ranks > 1 else "").calls


def check_said(ended: Ended, error: int) -> None:
    assert "Traceback" not in ended.output, ended.output
    assert ended.code in (0, 1), ended.output
    if ended.code != 0:
        assert os.strerror(error) in ended.output
        assert "fix:" in ended.output


@pytest.mark.parametrize(
    ("run", "during", "name"),
    params(OF_ONE_RANK + OF_TWO, [(run, *case) for run, cases in OFTEN.items() for case in cases]),
    indirect=["run"],
)
def test_an_error(during: str, name: str, run: CheckpointingRun, calls: list[str]) -> None:
    fault = FAULTS[name]
    names = [call for kind in fault.kinds for call in KINDS[kind]]
    counted = [number for number, call in enumerate(calls, start=1) if call.split()[0] in names]
    places = [at for at, number in enumerate(counted, start=1) if phase(calls[:number]) == during]
    at = random.Random(f"{during} {name}").choice(places)
    with run.copy() as project:
        faults = {"at": at, "times": fault.times, "error": fault.error, "calls": names}
        ended = run.train(project, rank="0" if run.ranks > 1 else "", **faults)
        check_said(ended, fault.error)
        run.check_goes_on(project, ended)


@pytest.mark.parametrize(
    ("run", "name"),
    [("whole-1", "manifest.json"), ("parts-1", "model"), ("parts-2", "manifest.json")],
    indirect=["run"],
)
def test_a_stale_handle_while_reading(name: str, run: CheckpointingRun) -> None:
    """One that stays is an error, and no reason to set a checkpoint aside or to go on from an older one."""
    with run.copy() as project:
        checkpoints = run.checkpoints(project)
        before = sorted(path.name for path in checkpoints.iterdir())
        folder = checkpoints / f"step-{OLD:08d}"
        (file,) = [path for path in sorted(folder.iterdir()) if path.name.startswith(name)][:1]
        faults = {"at": 1, "times": ALWAYS, "error": errno.ESTALE, "calls": ("look", "read")}
        ended = run.train(project, folder=file, rank="*" if run.ranks > 1 else "", **faults)
        check_said(ended, errno.ESTALE)
        assert ended.code == 1
        assert sorted(path.name for path in checkpoints.iterdir()) == before
        assert run.check_goes_on(project, ended) == OLD


@pytest.mark.parametrize("run", ["parts-2"], indirect=True)
def test_a_stale_handle_that_passes(run: CheckpointingRun) -> None:
    with run.copy() as project:
        folder = run.checkpoints(project) / f"step-{OLD:08d}"
        faults = {"at": 2, "times": 1, "error": errno.ESTALE, "calls": ("read",)}
        done = run.train(project, folder=folder, rank="0" if run.ranks > 1 else "", **faults)
        assert done.code == 0, done.output
        assert CheckpointDirectory(run.checkpoints(project)).steps()[-1] > OLD
