"""Acceptance: a disk that gives an error in the middle of a save costs no older checkpoint; one message names it."""

import errno
import os
import random
from pathlib import Path

import pytest

from drawbar.checkpoint.directory import CheckpointDirectory
from exhaustive import some
from faulty_disk import FaultyDisk
from interrupted import InterruptedRun, checkpoints

COMMAND = ("train", "config.yaml", "checkpoint.every=2", "checkpoint.keep=1", "eval.every=null", "train.steps=8")
FAULTS = [
    (("write",), errno.ENOSPC),
    (("write",), errno.EIO),
    (("fsync",), errno.EIO),
    (("open",), errno.EDQUOT),
    (("rename",), errno.ESTALE),
    (("mkdir",), errno.EROFS),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> InterruptedRun:
    return InterruptedRun(tmp_path_factory.mktemp("interrupted"), COMMAND)


def one_call(disk: FaultyDisk, dry: Path, calls: tuple[str, ...]) -> int:
    """The number of one of the calls that the rest of the run makes in its folder of checkpoints."""
    count = len(disk.run(COMMAND, dry, checkpoints(dry), calls=calls).calls)
    assert count > 0
    return random.randint(1, count)


@pytest.mark.parametrize(("calls", "error"), some(FAULTS, 1), ids=lambda found: str(found))
def test_an_error_while_saving(
    calls: tuple[str, ...], error: int, interrupted: InterruptedRun, disk: FaultyDisk, tmp_path: Path
) -> None:
    project, dry = (interrupted.copy(tmp_path / name) for name in ("project", "dry"))
    at = one_call(disk, dry, calls)
    failed = disk.run(COMMAND, project, checkpoints(project), at=at, error=error, calls=calls)
    assert "Traceback" not in failed.output
    assert CheckpointDirectory(checkpoints(project)).find_newest_usable().newest is not None, failed.output
    if failed.code != 0:
        assert failed.code == 1, failed.output
        assert os.strerror(error) in failed.output
        assert failed.output.count("error:") == 1, failed.output
    interrupted.check_goes_on(project)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("calls", "error"), FAULTS[::2], ids=lambda found: str(found))
def test_a_run_that_is_to_warn_goes_on(
    calls: tuple[str, ...], error: int, interrupted: InterruptedRun, disk: FaultyDisk, tmp_path: Path
) -> None:
    """Whichever save the error comes in: the last is tried again at the end."""
    project, dry = (interrupted.copy(tmp_path / name) for name in ("project", "dry"))
    at = one_call(disk, dry, calls)
    command = (*COMMAND, "checkpoint.on_error=warn")
    ended = disk.run(command, project, checkpoints(project), at=at, error=error, calls=calls)
    assert ended.code == 0, ended.output
    interrupted.check_equal(project)
