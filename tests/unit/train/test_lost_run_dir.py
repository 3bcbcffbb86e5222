"""A run directory that is deleted, or taken over, while its run trains: nothing is written there any more, and the run
ends with its state saved as another run."""

import shutil
from pathlib import Path

import pytest

from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.errors import ExitCode, UserError
from drawbar.tracking.run_view import write_run_status
from harness import run_cli, run_ranks
from runs import AtStep, Fit, delete, fit_in, losses

SETTINGS = ("train.steps=8", "checkpoint.every=4", "eval.every=4", "optim.schedule=constant")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rescued(run: Path) -> Path:
    (folder,) = run.parent.glob(f"{run.name}-rescued-*")
    return folder


@pytest.mark.parametrize("step", [2, 5, 8])
def test_a_deleted_directory_ends_the_run_with_its_state_elsewhere(step: int, fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "run.name=whole")
    with pytest.raises(UserError, match=r"the run directory was deleted .* while this process trained the run") as lost:
        fit(*SETTINGS, callbacks=[AtStep(step, lambda: delete(run))])
    name = rescued(run).name
    assert lost.value.exit_code == ExitCode.FAILED
    assert f"run.name={name}" in str(lost.value.remedy)
    assert not run.exists()
    (saved,) = CheckpointDirectory(rescued(run) / "checkpoints").steps()
    assert step <= saved <= step + 1
    assert fit(*SETTINGS, f"run.name={name}").progress.step == 8
    if saved < 8:
        whole = losses(run.parent / "whole")
        assert losses(rescued(run)) == {number: loss for number, loss in whole.items() if number > saved}


def test_another_run_of_that_name_is_left_alone(fit: Fit, run: Path) -> None:
    def begin_another() -> None:
        delete(run)
        begun = run_cli("train", "config.yaml", *SETTINGS, "train.steps=3", "run.seed=5", cwd=run.parent.parent)
        assert begun.code == 0, begun.err
        assert (run / "checkpoints" / "step-00000003").exists()
        written.update(contents(run))

    written: dict[str, bytes] = {}
    with pytest.raises(UserError, match="while this process trained the run"):
        fit(*SETTINGS, callbacks=[AtStep(5, begin_another)])
    assert contents(run) == written
    assert fit(*SETTINGS, "run.seed=5").progress.step == 8
    assert fit(*SETTINGS, f"run.name={rescued(run).name}").progress.step == 8


def test_a_file_system_without_locks_lets_another_process_in(fit: Fit, run: Path) -> None:
    def take_over() -> None:
        """In one go: the thread that saves step 4 may read the lock meanwhile."""
        lock = run / "lock of process 7"
        lock.write_text("process 7 on gpu9\nwith a token of its own\n")
        lock.replace(run / ".lock")

    with pytest.raises(UserError, match="the run directory was taken over by process 7 on gpu9 while"):
        fit(*SETTINGS, callbacks=[AtStep(5, take_over)])
    assert CheckpointDirectory(run / "checkpoints").steps() in ([], [4])  # step 4 may still have been being written
    assert CheckpointDirectory(rescued(run) / "checkpoints").steps() in ([5], [6])


def lose(folder: str, layout: str) -> str:
    run = Path(folder) / "runs" / "tiny"
    settings = (*SETTINGS, "parallel.strategy=fsdp", f"checkpoint.layout={layout}", "train.micro_batch=2")
    with pytest.raises(UserError, match=r"was deleted .* while this process trained") as lost:
        fit_in(Path(folder), *settings, callbacks=[AtStep(4, lambda: delete(run))])
    return str(lost.value)


@pytest.mark.parametrize("layout", ["whole", "parts"])
def test_every_rank_saves_elsewhere(layout: str, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    assert len(set(run_ranks(lose, 2, str(project), layout))) == 1
    name = rescued(project / "runs" / "tiny").name
    assert fit_in(project, *SETTINGS, f"run.name={name}", "parallel.strategy=single").progress.step == 8


@pytest.mark.parametrize("step", [4, 5])
def test_a_checkpoint_of_another_run_is_set_aside(
    step: int, fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Newer than the run's own, or in the place of one."""
    fit(*SETTINGS, "run.name=whole")
    fit(*SETTINGS, f"train.steps={step}", "run.name=other", "run.seed=5")
    fit(*SETTINGS, "train.steps=4", "checkpoint.every=2")
    copy = run / "checkpoints" / f"step-{step:08d}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run.parent / "other" / "checkpoints" / copy.name, copy)
    assert fit(*SETTINGS).progress.step == 8
    assert "another run wrote it" in capfd.readouterr().err
    assert copy.with_name(f"{copy.name}.unusable").exists()
    assert losses(run) == losses(run.parent / "whole")


def test_the_status_of_a_run_makes_no_directory_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_run_status(tmp_path / "deleted", "complete", 3, 3, started=0.0)
    assert not (tmp_path / "deleted").exists()
