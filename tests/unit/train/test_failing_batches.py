"""An error in making a step's batches costs no step: the run saves, and goes on once it is mended."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import WORDS
from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.train.stop import Stop
from harness import run_cli
from runs import Fit, fit_in, losses, weights

RARE = (
    *("checkpoint.every=null", "checkpoint.keep_best=false", "eval.every=null", "data.validation=null"),
    "task.from_scratch.attention_dropout=0.1",  # so that the generators' state matters
)
STREAM = (
    *RARE,
    *("data.train=train.jsonl", "data.streaming=true", "data.stream_lanes=2", "data.shuffle_buffer=16"),
    *("data.sequence_length=64", "train.steps=7", "task.tokenizer=tokenizer"),
)


class Counting(CausalLM):
    """causal_lm whose collate fails from a batch on, if told so."""

    good_batches: int | None = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.made = 0

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        self.made += 1
        torch.rand(3)  # what collate has drawn for the step that is not made is put back
        if self.good_batches is not None and self.made > self.good_batches:
            raise ValueError("planted")
        return super().collate(samples)


class Mended(Counting):
    pass


def write_records(project: Path, bad: int | None) -> None:
    """60 records, one of them no JSON; and a tokenizer, as to train one all records are read."""
    lines = [json.dumps({"text": " ".join(WORDS[index % 7 : index % 7 + 3])}) for index in range(60)]
    if bad is not None:
        lines[bad] = "{no json"
    (project / "train.jsonl").write_text("\n".join(lines) + "\n")
    fit_in(project, "run.name=first", "train.steps=3", *RARE)
    shutil.copytree(project / "runs" / "first" / "tokenizer", project / "tokenizer")


def test_steps_before_a_failing_collate_are_saved(fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(*RARE, task=Mended, fork=None)
    whole, final = losses(run), weights(run, 12)
    run.rename(run.parent / "whole")
    monkeypatch.setattr(Counting, "good_batches", 15)  # two a step, and those of the check at the start
    with pytest.raises(UserError, match=r"collate fails: ValueError: planted") as failed:
        fit(*RARE, task=Counting)
    assert failed.value.exit_code is ExitCode.FAILED
    (saved,) = (run / "checkpoints").glob("step-*")
    assert 5 <= int(saved.name.removeprefix("step-")) <= 7
    monkeypatch.setattr(Counting, "good_batches", None)
    assert fit(*RARE, task=Counting).progress.step == 12
    assert losses(run) == whole
    for name, tensor in weights(run, 12).items():
        assert torch.equal(tensor, final[name]), name


def test_the_cause_is_logged_though_the_ranks_cannot_agree(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree = Stop.agree_and_sum

    def agree_or_fail(stop: Stop, *values: float) -> list[float]:
        if stop.wanted:
            raise RuntimeError("another rank is gone")
        return agree(stop, *values)

    monkeypatch.setattr(Stop, "agree_and_sum", agree_or_fail)
    monkeypatch.setattr(Counting, "good_batches", 15)
    with pytest.raises(RuntimeError, match="another rank is gone"):
        fit(*RARE, task=Counting)
    assert "ValueError: planted" in (run / "logs" / "rank-0000.log").read_text()


def test_an_error_in_the_first_batches_is_a_wrong_request(fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailsInTraining(CausalLM):
        def augment(self, sample: dict[str, Any], train: bool, rng: Any) -> dict[str, Any]:
            if train and (run / "config.yaml").exists():
                raise ValueError("planted")
            return sample

    with pytest.raises(UserError, match=r"augment fails: ValueError: planted") as failed:
        fit(*RARE, task=FailsInTraining)
    assert failed.value.exit_code is ExitCode.WRONG_REQUEST
    assert not list((run / "checkpoints").glob("step-*"))


@pytest.mark.exhaustive
def test_a_bad_record_far_into_a_stream_may_be_left_out_afterwards(project: Path) -> None:
    """Losses as where bad records were left out from the beginning."""
    write_records(project, bad=38)
    fit_in(project, *STREAM, "data.on_bad_record=skip", "run.name=whole")
    with pytest.raises(UserError, match="not valid JSON") as failed:
        fit_in(project, *STREAM)
    assert "data.on_bad_record=skip" in str(failed.value.remedy)
    assert failed.value.exit_code is ExitCode.FAILED
    run = project / "runs" / "tiny"
    assert 0 < max(losses(run)) < 7
    assert fit_in(project, *STREAM, "data.on_bad_record=skip").progress.step == 7
    assert losses(run) == losses(run.parent / "whole")


@pytest.mark.exhaustive
def test_ranks_that_could_read_save_too(project: Path) -> None:
    """Record 39 belongs to one rank's lane."""
    write_records(project, bad=39)
    command = ("train", "config.yaml", "launch.nproc=2", "launch.timeout=60", *STREAM)
    failed = run_cli(*command, cwd=project)
    assert failed.code == ExitCode.FAILED, failed.err
    assert failed.err.count("not valid JSON") == 1, failed.err
    assert "Traceback" not in failed.err
    run = project / "runs" / "tiny"
    assert 0 < max(losses(run)) < 7
    assert list((run / "checkpoints").glob("step-*"))
    done = run_cli(*command, "data.on_bad_record=skip", cwd=project)
    assert done.code == 0, done.err
    assert list(losses(run)) == list(range(1, 8))
