"""A checkpoint in parts when a rank fails, or is killed, while the ranks write it; and when a part proves damaged as it
is read. No older checkpoint is lost, and the run goes on exactly."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.tensor_index import PartRecord
from drawbar.checkpoint.write import write_part
from drawbar.errors import UserError
from drawbar.train import checkpoint_layouts
from exhaustive import some
from faulty_disk import Ended, FaultyDisk
from harness import run_cli, run_ranks
from interrupted import InterruptedRun, checkpoints
from runs import fit_in

SETTINGS = (
    *("train.micro_batch=2", "checkpoint.layout=parts", "checkpoint.every=2", "checkpoint.keep=2", "eval.every=null"),
    *("train.steps=8", "optim.schedule=constant"),  # the same learning rates, whatever number of steps is to be made
)
COMMAND = ("train", "config.yaml", "parallel.strategy=fsdp", "launch.nproc=2", "launch.timeout=60", *SETTINGS)
FAILING = [(("write",), errno.ENOSPC), (("fsync",), errno.EIO), (("open",), errno.EDQUOT)]
ERRORS = [(calls, error, rank) for calls, error in FAILING for rank in (0, 1)]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> InterruptedRun:
    """It has checkpoints of steps 2 and 4."""
    return InterruptedRun(tmp_path_factory.mktemp("interrupted"), COMMAND)


@pytest.fixture
def project(interrupted: InterruptedRun, tmp_path: Path) -> Path:
    """A copy of the run."""
    return interrupted.copy(tmp_path / "project")


def count_calls(disk: FaultyDisk, project: Path, rank: int, calls: tuple[str, ...] = ()) -> int:
    """Of a rank, in the folder of checkpoints; the run is made in a copy."""
    dry = project.with_name("dry")
    shutil.copytree(project, dry)
    ended = disk.run(COMMAND, dry, checkpoints(dry), calls=calls, rank=str(rank))
    assert ended.code == 0, ended.output
    assert ended.calls
    return len(ended.calls)


def check_has_checkpoint(project: Path, ended: Ended) -> None:
    newest = CheckpointDirectory(checkpoints(project)).find_newest_usable().newest
    assert newest is not None, ended.output
    assert int(newest.name.removeprefix("step-")) >= 4, ended.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("calls", "error", "rank"), ERRORS, ids=lambda found: str(found))
def test_an_error_on_one_rank(
    calls: tuple[str, ...], error: int, rank: int, project: Path, interrupted: InterruptedRun, disk: FaultyDisk
) -> None:
    at = random.randint(1, count_calls(disk, project, rank, calls))
    ended = disk.run(COMMAND, project, checkpoints(project), at=at, error=error, calls=calls, rank=str(rank))
    assert "Traceback" not in ended.output
    check_has_checkpoint(project, ended)
    if ended.code != 0:
        assert ended.code == 1, ended.output
        assert os.strerror(error) in ended.output
        assert ended.output.count("error:") == 1, ended.output
    interrupted.check_goes_on(project)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_writes(
    rank: int, project: Path, interrupted: InterruptedRun, disk: FaultyDisk
) -> None:
    at = random.randint(1, count_calls(disk, project, rank))
    ended = disk.run(COMMAND, project, checkpoints(project), at=at, rank=str(rank))
    assert ended.code != 0
    check_has_checkpoint(project, ended)
    interrupted.check_goes_on(project)


def fail_to_write(project: str, failing: int) -> str:
    """What this rank says where one can write no part after step 2."""

    def write_or_fail(folder: Path, rank: int, *shards: Any) -> PartRecord:
        if rank == failing and "step-00000002" not in folder.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_part(folder, rank, *shards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_layouts, "write_part", write_or_fail)
        with pytest.raises(UserError) as error:
            fit_in(Path(project), *SETTINGS, "parallel.strategy=fsdp")
    return error.value.what


@pytest.mark.parametrize("failing", some([0, 1], 1))
def test_a_part_that_one_rank_cannot_write_is_no_checkpoint_for_any(failing: int, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    told = run_ranks(fail_to_write, 2, str(project), failing)
    assert told[0] == told[1]
    assert f"the part of rank {failing} of step-00000004" in told[0]
    assert [path.name for path in checkpoints(project).glob("step-*")] == ["step-00000002"]


def damage(project: Path, step: int, name: str) -> None:
    path = checkpoints(project) / f"step-{step:08d}" / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", some(["model-00000.safetensors", "optimizer-00001.safetensors", "tensors.json"], 1))
def test_all_ranks_go_back_to_the_checkpoint_before_a_damaged_one(
    name: str, project: Path, interrupted: InterruptedRun
) -> None:
    damage(project, 4, name)
    done = interrupted.check_goes_on(project)
    assert f"set aside as step-00000004.unusable: {name}" in done.err + done.out
    assert (checkpoints(project) / "step-00000004.unusable").is_dir()


def test_without_an_older_checkpoint_nothing_is_changed(project: Path) -> None:
    for step in (2, 4):
        damage(project, step, "model-00001.safetensors")
    before = sorted(path.name for path in checkpoints(project).iterdir())
    done = run_cli(*COMMAND, cwd=project)
    assert done.code == 2, done.err
    assert "model-00001.safetensors" in done.err
    assert "fix:" in done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in checkpoints(project).iterdir()) == before


def test_a_damaged_checkpoint_that_is_named_is_refused(project: Path) -> None:
    damage(project, 4, "model-00001.safetensors")
    done = run_cli(*COMMAND, "--resume", "4", "--fork", "branch", cwd=project)
    assert done.code == 2, done.err
    assert "model-00001.safetensors" in done.err
    assert not (project / "runs" / "branch").exists()
