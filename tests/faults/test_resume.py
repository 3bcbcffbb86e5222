"""Acceptance: a run that was killed comes back as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from conftest import make_project, write_text
from exhaustive import some
from harness import kill_when_logged, run_cli, start_cli
from runs import largest_difference, losses, metrics, scores, weights

LEDGER = '''
import json, os
import drawbar

class Ledger(drawbar.CausalLM):
    """causal_lm that writes down every sample it trains on, and in which start of the run: one line a micro-batch."""

    def forward(self, model, batch):
        if model.training:
            rank = int(os.environ.get("RANK", "0"))
            with open(f"runs/tiny/logs/rank-{rank:04d}.log") as log:
                start = log.read().count("strategy:") - 1
            with open(f"ledger-{rank}.jsonl", "a") as file:
                file.write(json.dumps({"start": start, "ids": batch.ids}) + chr(10))
        return super().forward(model, batch)
'''
SETTINGS = ("task.type=ledger:Ledger", "train.steps=60", "checkpoint.every=7", "train.micro_batch=4")
DROPOUT = "task.from_scratch.attention_dropout=0.1"  # so that the generators' state matters


@pytest.fixture(scope="module", params=some([1, 2], 1))
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    project = make_project(tmp_path_factory.mktemp(f"whole-{request.param}"))
    (project / "ledger.py").write_text(LEDGER)
    done = run_cli("train", "config.yaml", *SETTINGS, DROPOUT, f"launch.nproc={request.param}", cwd=project)
    assert done.code == 0, done.err
    return project, request.param


@pytest.mark.exhaustive
def test_killed_at_random_steps(uninterrupted: tuple[Path, int], tmp_path: Path) -> None:
    whole, processes = uninterrupted
    project = make_project(tmp_path)
    (project / "ledger.py").write_text(LEDGER)
    command = ("train", "config.yaml", *SETTINGS, DROPOUT, f"launch.nproc={processes}")
    chance = random.Random()  # a new place each time: every one must work
    for kill_at in sorted(chance.sample(range(2, 58), 2)):
        kill_when_logged(project, command, kill_at)
    done = run_cli(*command, cwd=project)
    assert done.code == 0, done.err

    ours, theirs = project / "runs" / "tiny", whole / "runs" / "tiny"
    assert losses(ours) == losses(theirs)
    assert scores(ours) == scores(theirs)
    assert [line["step"] for line in metrics(ours)] == [line["step"] for line in metrics(theirs)]
    for name, tensor in weights(theirs, 60).items():
        assert torch.equal(tensor, weights(ours, 60)[name]), name
    check_ledger(project, ours, processes)


def check_ledger(project: Path, run: Path, processes: int) -> None:
    """In the history that led to the final weights, each epoch holds each sample exactly once."""
    consumed: dict[int, list[int]] = {}
    found = re.search(r"train: (\d+) samples of 90 records", (run / "logs" / "rank-0000.log").read_text())
    assert found is not None
    samples = int(found.group(1))
    per_epoch = -(-samples // 8)
    for rank in range(processes):
        log = (run / "logs" / f"rank-{rank:04d}.log").read_text()
        starts: list[int] = []
        for line in log.splitlines():
            if "strategy:" in line:
                starts.append(0)
            elif "resumed from" in line:
                starts[-1] = int(line.rsplit(" ", 1)[1])
        lines = [json.loads(line) for line in (project / f"ledger-{rank}.jsonl").read_text().splitlines()]
        # a process that was killed before its first step leaves a start in the log and no line in the ledger
        trained = list(dict.fromkeys(line["start"] for line in lines))
        assert len(trained) <= len(starts)
        steps: dict[int, list[int]] = {}
        for number in trained:
            start = starts[number]
            own = [line["ids"] for line in lines if line["start"] == number]
            steps = {step: ids for step, ids in steps.items() if step <= start}
            step = start
            while own:
                step += 1
                rows = 8 if step % per_epoch else samples - 8 * (per_epoch - 1)
                wanted = (rank + 1) * rows // processes - rank * rows // processes
                ids: list[int] = []
                while own and len(ids) < wanted:
                    ids += own.pop(0)
                steps[step] = ids
        for step, ids in steps.items():
            consumed.setdefault(step, []).extend(ids)
    assert sorted(consumed) == list(range(1, 61))
    for first in range(1, 61 - per_epoch, per_epoch):
        seen = [number for step in range(first, first + per_epoch) for number in consumed[step]]
        assert sorted(seen) == list(range(samples))


@pytest.mark.exhaustive
def test_another_number_of_processes(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    command = ("train", "config.yaml", "train.steps=30", "checkpoint.every=5", "train.micro_batch=2")
    done = run_cli(*command, "run.name=whole", cwd=project)
    assert done.code == 0, done.err
    for processes, until in ((2, 8), (1, 17)):
        kill_when_logged(project, (*command, f"launch.nproc={processes}"), until)
    done = run_cli(*command, "launch.nproc=2", cwd=project)
    assert done.code == 0, done.err
    assert largest_difference(losses(project / "runs" / "whole"), losses(project / "runs" / "tiny")) <= 1e-5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_saves_and_says_so(tmp_path: Path, number: signal.Signals, code: int, processes: int) -> None:
    project = make_project(tmp_path)
    command = ("train", "config.yaml", "train.steps=3000", "checkpoint.every=null", f"launch.nproc={processes}")
    output = tmp_path / "output"
    output.mkdir()
    process = start_cli(*command, cwd=project, output=output)
    log = project / "runs" / "tiny" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (log.exists() and '"step": 3,' in log.read_text()):
        assert time.monotonic() < end, (output / "0.err").read_text()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code, (output / "0.err").read_text()
    saved = sorted(path.name for path in (project / "runs" / "tiny" / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    last = max(losses(project / "runs" / "tiny"))
    assert saved == [f"step-{last:08d}"]


@pytest.mark.exhaustive
def test_a_fork_takes_another_learning_rate(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    assert run_cli("train", "config.yaml", cwd=project).code == 0
    write_text(project / "train.txt", 80, seed=3)  # a tokenizer trained on this would be another one
    command = ("train", "config.yaml", "optim.lr=1e-4", "train.steps=16")
    refused = run_cli(*command, cwd=project)
    assert refused.code == 2
    assert "optim.lr" in refused.err
    assert "--fork" in refused.err
    for _ in range(2):  # the same command again goes on with the fork, which is complete
        done = run_cli(*command, "--fork", "slower", cwd=project)
        assert done.code == 0, done.err
    assert min(losses(project / "runs" / "slower")) == 13
    tokenizers = [project / "runs" / name / "tokenizer" / "tokenizer.json" for name in ("tiny", "slower")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    assert max(losses(project / "runs" / "tiny")) == 12


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    assert run_cli("train", "config.yaml", cwd=project).code == 0
    expected = losses(project / "runs" / "tiny")
    newest = project / "runs" / "tiny" / "checkpoints" / "step-00000012" / "model-00000.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    done = run_cli("train", "config.yaml", cwd=project)
    assert done.code == 0, done.err
    assert "step-00000012" in done.out + done.err
    assert losses(project / "runs" / "tiny") == expected


@pytest.mark.exhaustive
def test_changed_data_refuses_to_resume(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    assert run_cli("train", "config.yaml", cwd=project).code == 0
    shutil.copy(project / "valid.txt", project / "train.txt")
    done = run_cli("train", "config.yaml", cwd=project)
    assert done.code == 2
    assert "data changed" in done.err
    assert "--fork" in done.err
