"""Acceptance: a stream over uneven shards, killed and resumed three times, gives each record exactly once an epoch."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

import drawbar
from conftest import WORDS, make_project
from drawbar.errors import UserError
from harness import kill_when_logged, run_cli
from runs import Fit, losses, metrics, weights

LEDGER = '''
import json, os, time
import drawbar
from drawbar.tasks.batch import Batch

class Ledger(drawbar.CausalLM):
    """causal_lm that writes down the records of every micro-batch that counts: one line a forward in training.

    A process begins with a line of its own. Steps take a while, so that a kill comes soon after the step it waits for.
    """

    counted = []

    def write(self, numbers):
        with open(f"ledger-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps({"process": os.getpid(), "numbers": numbers}) + chr(10))

    def build_model(self):
        self.write("start")
        return super().build_model()

    def encode(self, record, train):
        return [{**sample, "number": record["number"]} for sample in super().encode(record, train)]

    def num_targets(self, batch):  # in training it is asked once for every micro-batch that counts, before its forward
        self.counted = batch["number"].tolist()
        return super().num_targets(batch)

    def forward(self, model, batch):
        if model.training:
            self.write(self.counted)
            time.sleep(0.03)
        self.counted = []
        return super().forward(model, Batch({k: v for k, v in batch.items() if k != "number"}, batch.ids))
'''
SHARDS = (23, 9, 41)
PER_EPOCH = -(-sum(SHARDS) // 8)
STEPS = 4 * PER_EPOCH + 2
COMMAND = (
    "train",
    "config.yaml",
    "launch.nproc=2",
    "task.type=ledger:Ledger",
    "task.from_scratch.attention_dropout=0.1",  # so that the generators' state matters
    "data.train=shard-*.jsonl",
    "data.validation=null",
    "data.sequence_length=64",  # a record is one sample
    "data.streaming=true",
    "data.stream_lanes=4",
    "data.shuffle_buffer=12",
    "train.micro_batch=auto",
    "train.micro_batch_tokens=1024",  # a step is one forward on each rank
    f"train.steps={STEPS}",
    "checkpoint.every=3",
    "eval.every=null",
)


def make_shards(folder: Path) -> Path:
    project = make_project(folder)
    (project / "ledger.py").write_text(LEDGER)
    chance = random.Random(1)
    numbers = iter(range(sum(SHARDS)))
    for shard, size in enumerate(SHARDS):
        records = [
            {"number": next(numbers), "text": " ".join(chance.choices(WORDS, k=chance.randint(1, 9)))}
            for _ in range(size)
        ]
        lines = [json.dumps(record) + "\n" for record in records]
        (project / f"shard-{shard}.jsonl").write_text("".join(lines))
    return project


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run was never interrupted."""
    project = make_shards(tmp_path_factory.mktemp("whole"))
    done = run_cli(*COMMAND, cwd=project)
    assert done.code == 0, done.err
    check_ledger(project)
    return project


@pytest.mark.exhaustive
def test_each_record_once_an_epoch_though_killed_three_times(whole: Path, tmp_path: Path) -> None:
    project = make_shards(tmp_path)
    chance = random.Random()  # a new place each time: every one must work
    for first, last in ((2, 6), (14, 17), (25, 28)):
        kill_when_logged(project, COMMAND, chance.randint(first, last))
    done = run_cli(*COMMAND, cwd=project)
    assert done.code == 0, done.err
    check_ledger(project)

    ours, theirs = project / "runs" / "tiny", whole / "runs" / "tiny"
    assert losses(ours) == losses(theirs)
    assert [line["step"] for line in metrics(ours)] == [line["step"] for line in metrics(theirs)]
    assert max(losses(ours)) == STEPS
    for name, tensor in weights(theirs, STEPS).items():
        assert torch.equal(tensor, weights(ours, STEPS)[name]), name


def check_ledger(project: Path) -> None:
    """In the history that led to the final weights, each epoch holds each record exactly once."""
    consumed: dict[int, list[int]] = {step: [] for step in range(1, STEPS + 1)}
    for rank in (0, 1):
        steps = steps_of(project, rank)
        assert sorted(steps) == sorted(consumed)
        for step, numbers in steps.items():
            consumed[step] += numbers
    for first in range(1, STEPS, PER_EPOCH):
        seen = Counter(number for step in range(first, first + PER_EPOCH) for number in consumed.get(step, []))
        assert set(seen.values()) == {1}
        assert first + PER_EPOCH > STEPS or len(seen) == sum(SHARDS)


def steps_of(project: Path, rank: int) -> dict[int, list[int]]:
    """The records of each step of one rank; of a step that was run several times, those of the last process."""
    starts: list[int] = []
    for line in (project / "runs" / "tiny" / "logs" / f"rank-{rank:04d}.log").read_text().splitlines():
        if "strategy:" in line:
            starts.append(0)
        elif "resumed from" in line:
            starts[-1] = int(line.rsplit(" ", 1)[1])
    lines = [json.loads(line) for line in (project / f"ledger-{rank}.jsonl").read_text().splitlines()]
    processes = list(dict.fromkeys(line["process"] for line in lines))
    steps: dict[int, list[int]] = {}
    for start, process in zip(starts, processes, strict=True):
        steps = {step: numbers for step, numbers in steps.items() if step <= start}
        own = [line["numbers"] for line in lines if line["process"] == process]
        assert own.pop(0) == "start"
        steps |= dict(enumerate(own, start + 1))
    return steps


class Cuts(drawbar.Callback):
    """Leaves half of the training data, while the first epoch is trained."""

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == 3:
            lines = Path("train.txt").read_text().splitlines(keepends=True)
            Path("train.txt").write_text("".join(lines[: len(lines) // 2]))


def test_data_that_are_cut_end_the_run_which_resumes_once_they_are_restored(fit: Fit, project: Path, run: Path) -> None:
    settings = ("data.streaming=true", "data.validation=null", "eval.every=null", "train.steps=40")
    fit(*settings, "run.name=whole")
    content = (project / "train.txt").read_text()
    with pytest.raises(UserError, match=r"train.txt has changed since it was first read"):
        fit(*settings, callbacks=[Cuts()])
    (project / "train.txt").write_text(content)
    assert fit(*settings).progress.step == 40
    assert losses(run) == losses(run.parent / "whole")
