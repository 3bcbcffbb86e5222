"""``checkpoint.on_error: warn``: a save that fails for a fault of a disk, on whichever rank, is one warning, and the
run goes on; only the save at the end of the run must succeed."""

import resource
from dataclasses import dataclass
from pathlib import Path

import pytest

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import ExitCode, UserError
from drawbar.report.run_history import read_history
from exhaustive import some
from harness import run_ranks, wait_until
from runs import fit_in, metrics

SETTINGS = ("checkpoint.on_error=warn", "checkpoint.every=4", "eval.every=4", "eval.mode=max", "train.micro_batch=2")
LARGEST_FILE = 30_000
"""Bytes: less than any file of tensors has, and more than all others have."""
FAILED = "the save of step {} failed; the run continues"


@dataclass(frozen=True)
class Case:
    """Two ranks, and which of them cannot write large files."""

    settings: tuple[str, ...]
    rank: int


CASES = {
    "whole": Case(("parallel.strategy=ddp", "checkpoint.layout=whole"), 0),
    "parts": Case(("parallel.strategy=fsdp", "checkpoint.layout=parts"), 1),
    "deepspeed": Case(("parallel.strategy=deepspeed", "parallel.zero_stage=2", "checkpoint.layout=parts"), 1),
}


class LimitedDisk(drawbar.Callback):
    """Lets files be no larger than ``LARGEST_FILE``.

    Args:
        begin: the step after which it begins, once the checkpoint of that step is there, if it has one.
        failing: a save that must have failed before it ends; None: it does not end.
    """

    def __init__(self, begin: int, failing: int | None) -> None:
        self._begin = begin
        self._failing = failing

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == self._begin:
            if info.step % 4 == 0:
                checkpoint = run.run_dir / "checkpoints" / f"step-{info.step:08d}"
                wait_until(checkpoint.exists, "the checkpoint")
            limit(LARGEST_FILE)
        if self._failing is not None and info.step == self._failing + 1:
            log = run.run_dir / "logs" / f"rank-{run.rank:04d}.log"
            wait_until(lambda: FAILED.format(self._failing) in log.read_text(), "the save to fail")
            limit(resource.RLIM_INFINITY)


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fit_with_a_fault(folder: str, case: Case, begin: int, failing: int | None) -> tuple[ExitCode, str, int | None]:
    """How the run ends, and its best step."""
    is_limited = RankInfo.from_environment().rank == case.rank
    try:
        callbacks = [LimitedDisk(begin, failing)] if is_limited else []
        outcome = fit_in(Path(folder), *SETTINGS, *case.settings, callbacks=callbacks)
        return outcome.exit_code, "", outcome.progress.best_step
    except UserError as error:
        return error.exit_code, error.what, None


def fit(folder: str, case: Case) -> ExitCode:
    return fit_in(Path(folder), *SETTINGS, *case.settings).exit_code


def half_written(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.suffix in (".tmp", ".deleting")]


@pytest.mark.parametrize("name", some(CASES, 1))
def test_a_save_that_fails_is_left_out(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = make_project(tmp_path) / "runs" / "tiny"
    ended = run_ranks(fit_with_a_fault, 2, str(tmp_path), case, 3, 4)
    assert ended == [(ExitCode.DONE, "", 8)] * 2  # the largest loss is that of step 4, whose checkpoint is left out
    assert CheckpointDirectory(run / "checkpoints").steps() == [8, 12]
    assert not half_written(run)
    warnings = [event.text for event in read_history(run).events if event.kind == "warning"]
    [warning] = [text for text in warnings if FAILED.format(4) in text]
    assert "could not be written: File too large" in warning
    assert metrics(run)[-2]["train/failed_saves"] == 1  # the last line is of scores


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["whole", "parts"])
def test_the_last_save_must_succeed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = make_project(tmp_path) / "runs" / "tiny"
    ended = run_ranks(fit_with_a_fault, 2, str(tmp_path), case, 4, None)
    assert ended[0] == ended[1]
    code, message, _ = ended[0]
    assert code is ExitCode.FAILED
    assert "could not be written: File too large" in message
    assert "The newest complete checkpoint, step-00000004, is intact" in message
    assert not half_written(run)
    log = (run / "logs" / "rank-0000.log").read_text()
    assert log.count(FAILED.format(8)) == 1
    assert log.count(FAILED.format(12)) == 2  # it was tried again at the end
    assert run_ranks(fit, 2, str(tmp_path), case) == [ExitCode.DONE] * 2
    assert CheckpointDirectory(run / "checkpoints").steps() == [4, 8, 12]
