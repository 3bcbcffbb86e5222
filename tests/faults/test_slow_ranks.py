"""One rank does something that takes longer than ``launch.timeout``: the others wait for it, and nothing is lost."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from exhaustive import some
from harness import run_ranks, wait_until
from runs import metrics
from tiny import CPU

TIMEOUT, SLOW = 3, 4.5
"""Seconds; a configuration file could ask for no less than 10."""


class Slow(drawbar.CausalLM):
    """causal_lm that takes long for what rank 0 does for all."""

    scored = 0

    def find_dataset_metadata(self) -> dict[str, Any]:
        time.sleep(SLOW)
        return {}

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        Slow.scored += 1
        if Slow.scored == 2:  # the first one is the trial on a few samples, which every rank makes
            time.sleep(SLOW)
        return {}


class Told(drawbar.CausalLM):
    """causal_lm whose first rank is told to stop in its second step."""

    forwards = 0

    def forward(self, model: Any, batch: Any) -> Any:
        Told.forwards += model.training
        if Told.forwards == 2 and RankInfo.from_environment().is_rank0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(model, batch)


@contextmanager
def slow_disk() -> Iterator[None]:
    write = CheckpointDirectory.write

    def written_slowly(self: CheckpointDirectory, snapshot: Any) -> None:
        time.sleep(SLOW)
        write(self, snapshot)

    CheckpointDirectory.write = written_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointDirectory.write = write  # type: ignore[method-assign]


def come_together(folder: Path, rank: int) -> None:
    """Both processes run, so that joining takes no time."""
    (folder / f"here-{rank}").touch()
    wait_until(lambda: (folder / f"here-{1 - rank}").exists(), "the other rank")


def fit(task: type[drawbar.CausalLM], *settings: str, callbacks: Sequence[drawbar.Callback] = ()) -> int:
    torch.set_num_threads(1)
    loaded = drawbar.load_config("config.yaml", ["parallel.strategy=ddp", *settings], task.Config)
    launch = loaded.config.launch.model_copy(update={"timeout": TIMEOUT})
    return (
        drawbar.Trainer(loaded.config.model_copy(update={"launch": launch}), task, callbacks=callbacks).fit().exit_code
    )


def train_slowly(folder: str) -> int:
    """Facts, scores, a save that the next one has to wait for, and the last save."""
    come_together(Path(folder), RankInfo.from_environment().rank)
    with chdir(folder), slow_disk():
        return fit(Slow, "train.steps=3", "eval.every=2", "checkpoint.every=2")


@pytest.mark.exhaustive
def test_what_rank_0_does_for_all_takes_as_long_as_it_takes(tmp_path: Path) -> None:
    run = make_project(tmp_path) / "runs" / "tiny"
    assert run_ranks(train_slowly, 2, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "1"}) == [0, 0]
    assert CheckpointDirectory(run / "checkpoints").steps() == [2, 3]
    assert any("eval/validation/loss" in line for line in metrics(run))


class SlowThenFails(drawbar.Callback):
    """Takes long on rank 0 alone, fails on rank 1 alone, and needs all ranks to end."""

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == 1 and run.rank == 0:
            time.sleep(SLOW)
        if info.step == 2 and run.rank == 1:
            raise RuntimeError("for the test")

    def on_train_end(self, run: drawbar.RunHandle) -> None:
        torch.distributed.all_reduce(torch.ones(()))


def call_back_slowly(folder: str) -> str:
    """The error of the run."""
    come_together(Path(folder), RankInfo.from_environment().rank)
    try:
        with chdir(folder):
            fit(drawbar.CausalLM, "checkpoint.every=null", callbacks=[SlowThenFails()])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_a_callback_may_be_slow_on_one_rank_and_is_called_on_none_once_it_failed(tmp_path: Path) -> None:
    run = make_project(tmp_path) / "runs" / "tiny"
    for error in run_ranks(call_back_slowly, 2, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "1"}):
        assert "the callback SlowThenFails.on_step on rank 1 failed: RuntimeError: for the test" in error
    assert CheckpointDirectory(run / "checkpoints").steps() == [2]


class Spoiled(drawbar.CausalLM):
    """causal_lm whose data go bad on rank 1 after the second step, in which rank 0 asks for a stop."""

    is_bad = False

    def collate(self, samples: list[dict[str, Any]]) -> drawbar.Batch:
        if Spoiled.is_bad:
            raise ValueError("bad data")
        return super().collate(samples)


class StopOnce(drawbar.Callback):
    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        Spoiled.is_bad = info.step == 2 and run.rank == 1
        if info.step == 2 and run.rank == 0:
            run.request_stop()


def stop_with_bad_data(folder: str) -> int:
    come_together(Path(folder), RankInfo.from_environment().rank)
    with chdir(folder):
        return fit(Spoiled, "checkpoint.every=null", "eval.every=null", callbacks=[StopOnce()])


def test_a_stop_of_one_rank_comes_before_an_error_of_another(tmp_path: Path) -> None:
    run = make_project(tmp_path) / "runs" / "tiny"
    assert run_ranks(stop_with_bad_data, 2, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "1"}) == [0, 0]
    assert CheckpointDirectory(run / "checkpoints").steps() == [2]


def stop_with_a_slow_disk(folder: str) -> int:
    come_together(Path(folder), RankInfo.from_environment().rank)
    with chdir(folder), slow_disk():
        return fit(Told)


@pytest.mark.exhaustive
def test_the_save_of_a_signal_takes_as_long_as_the_disk(tmp_path: Path) -> None:
    run = make_project(tmp_path) / "runs" / "tiny"
    assert run_ranks(stop_with_a_slow_disk, 2, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "1"}) == [75, 75]
    assert CheckpointDirectory(run / "checkpoints").steps() == [2]


def be_stopped_at_work(folder: str, which: int) -> str:
    """What a rank says of the other one, which the system stops while it writes."""
    rank = RankInfo.from_environment().rank
    stopped = Path(folder) / "stopped"
    come_together(Path(folder), rank)
    world = Distributed(RankInfo.from_environment(), CPU, TIMEOUT).__enter__()
    if rank == which:
        with world.working("writing the checkpoint of step 3"):
            time.sleep(1)  # the others know what it does
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        world.barrier("the end of the run")
    except UserError as error:
        return str(error)
    finally:
        os.kill(int(stopped.read_text()), signal.SIGCONT)
    return ""


@pytest.mark.parametrize("which", some([0, 1], 1))  # rank 0 holds the store, too
def test_a_rank_that_is_stopped_is_named(which: int, tmp_path: Path) -> None:
    message = run_ranks(be_stopped_at_work, 2, str(tmp_path), which)[1 - which]
    assert f"rank {1 - which} waited 3s for the others at the end of the run: " in message
    assert f"rank {which} (writing the checkpoint of step 3); no heartbeat since then" in message
