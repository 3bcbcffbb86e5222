"""A signal to one process or to all of them, in any phase: one save that all ranks agree on, and the run goes on."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.distributed.rank_info import RankInfo
from exhaustive import evenly
from harness import run_cli, run_ranks, start_cli, wait_until
from runs import losses, metrics, scores, weights

CONFIG = """\
task:
  model: llama
  from_scratch: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
                 max_position_embeddings: 64, attention_dropout: 0.1}
  tokenizer: {train: byte_bpe, vocab_size: 290}
  prompt_column: text
  completion_column: text
  generation: {max_new_tokens: 4}
data: {train: data.jsonl, validation: data.jsonl, sequence_length: 32}
train: {global_batch: 8, micro_batch: 4, steps: 6}
device: cpu
eval: {every: 2}
checkpoint: {every: 3}
tracking: {log_every: 1, tensorboard: false}
"""
PHASES = ("step", "evaluation", "generation", "save")
WHO: dict[str, tuple[int, int]] = {"one": (0, 1), "all": (1, 1), "all, and again by their launcher": (2, 2)}
"""How often the first rank is told, and the others (who are told nothing where one is)."""
CASES = list(product(PHASES, WHO))
SOME_OR_ALL = [evenly(CASES, 6), pytest.param(CASES, marks=pytest.mark.exhaustive)]


class Told(drawbar.CausalLM):
    """causal_lm that is told to stop in a phase of its third or fourth step."""

    phase = ""
    signals = 0
    forwards = 0

    def forward(self, model: Any, batch: Any) -> Any:
        Told.forwards += model.training
        if Told.forwards == 3:
            tell("step" if model.training else "")
        if Told.forwards >= 3 and not model.training:
            tell("evaluation")
        return super().forward(model, batch)

    def predict(self, model: Any, batch: Any) -> Any:
        if Told.forwards >= 3:
            tell("generation")
        return super().predict(model, batch)


def tell(phase: str) -> None:
    """Once, and twice where the launcher passes it on."""
    if Told.phase == phase:
        for _ in range(Told.signals):
            os.kill(os.getpid(), signal.SIGTERM)
        Told.signals = 0


@contextmanager
def telling_writer() -> Iterator[None]:
    write = CheckpointDirectory.write

    def told(self: CheckpointDirectory, snapshot: Any) -> Any:
        tell("save")
        return write(self, snapshot)

    CheckpointDirectory.write = told  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointDirectory.write = write  # type: ignore[method-assign]


def train_all(folder: str, cases: list[tuple[str, str]]) -> dict[str, int]:
    """Every phase, told to one rank or to all: stopped, and gone on with; the exit code of each first part."""
    rank = RankInfo.from_environment().rank
    codes = {}

    def fit(name: str) -> int:
        Told.forwards = 0
        settings = [f"run.name={name}", "parallel.strategy=ddp"]
        loaded = drawbar.load_config("config.yaml", settings, Told.Config)
        return drawbar.Trainer(loaded.config, Told).fit().exit_code

    with chdir(folder), telling_writer():
        torch.set_num_threads(1)
        assert fit("whole") == 0
        for phase, who in cases:
            name = f"{phase}-{len(codes)}"
            first, others = WHO[who]
            Told.phase, Told.signals = phase, (first or 1) if rank == 0 else others * (who != "one")
            codes[name] = fit(name)
            Told.phase, Told.signals = "", 0  # a rank that writes nothing was not told in a save
            assert fit(name) == 0
    return codes


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", SOME_OR_ALL, ids=["some", "all"])
def test_in_any_phase_to_one_rank_or_to_all(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "{"pull " * (1 + n % 5)}{n}"}}\n' for n in range(24)))
    first, second = run_ranks(train_all, 2, str(tmp_path), cases, env={"TORCHELASTIC_RUN_ID": "1"})
    assert first == second
    assert set(first.values()) == {75}
    assert len(first) == len(cases)
    whole = tmp_path / "runs" / "whole"
    final = weights(whole, 6)
    for name in first:
        run = tmp_path / "runs" / name
        log = (run / "logs" / "rank-0000.log").read_text()
        assert log.count("saving at the end of this step") == 1, name
        assert log.count("resumed from") == 1, name
        assert log.count("is abandoned") == name.startswith(("evaluation", "generation")), name
        assert (losses(run), scores(run)) == (losses(whole), scores(whole)), name
        assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)], name
        assert last_state(run) == last_state(whole), name
        assert all(torch.equal(tensor, final[key]) for key, tensor in weights(run, 6).items()), name


def last_state(run: Path) -> tuple[dict[str, Any], str]:
    """The state of the last checkpoint but for the run's id, and which one is the best."""
    checkpoints = run / "checkpoints"
    state = json.loads((checkpoints / "step-00000006" / "state.json").read_text())
    return state | {"run": None}, (checkpoints / "best.json").read_text()


SLOW_START = """
import os, time
import drawbar


class Slow(drawbar.CausalLM):
    def encode(self, record, train):
        if os.path.exists("slow"):
            open(f"started-{os.environ.get('RANK', 'alone')}", "w").close()
            time.sleep(60)
        return super().encode(record, train)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    project = make_project(tmp_path)
    (project / "slow_start.py").write_text(SLOW_START)
    (project / "slow").touch()
    return project


def start_slowly(project: Path, *settings: str, rank: str) -> BaseProcess:
    """A run that is encoding its data."""
    output = project / "output"
    output.mkdir()
    process = start_cli("train", "config.yaml", "task.type=slow_start:Slow", *settings, cwd=project, output=output)
    end = time.monotonic() + 60
    while not (project / f"started-{rank}").exists():
        assert time.monotonic() < end
        assert process.is_alive(), (output / "0.err").read_text()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGHUP, 130)]
)
def test_before_the_first_step_a_process_leaves_at_once(slow: Path, number: signal.Signals, code: int) -> None:
    process = start_slowly(slow, rank="alone")
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    err = (slow / "output" / "0.err").read_text()
    assert process.exitcode == code, err
    assert f"{number.name} came when there was nothing to save" in err
    assert not (slow / "runs" / "tiny").exists()


@pytest.mark.parametrize("everybody", [True, False])
def test_before_the_first_step_a_run_leaves_at_once(slow: Path, everybody: bool) -> None:
    process = start_slowly(slow, "launch.nproc=2", rank="0")
    assert process.pid is not None
    family = [process.pid, *descendants(process.pid)]
    for pid in family if everybody else family[:1]:
        with suppress(ProcessLookupError):  # the launcher tells its ranks, and one may have left before its turn here
            os.kill(pid, signal.SIGTERM)
    process.join(60)
    err = (slow / "output" / "0.err").read_text()
    assert process.exitcode == 75, err
    assert "Traceback" not in err
    end = time.monotonic() + 3
    while any(Path(f"/proc/{pid}").exists() for pid in family[1:]):
        assert time.monotonic() < end
        time.sleep(0.02)
    if everybody:
        return
    (slow / "slow").unlink()
    done = run_cli("train", "config.yaml", "task.type=slow_start:Slow", cwd=slow)
    assert done.code == 0, done.err


def test_a_comparison_that_is_ended_speaks_of_no_checkpoint(slow: Path) -> None:
    output = slow / "output"
    output.mkdir()
    arguments = ("config.yaml", "task.type=slow_start:Slow", "--strategies", "ddp", "--ranks", "2")
    process = start_cli("parity", *arguments, cwd=slow, output=output)
    wait_until((slow / "started-alone").exists, lambda: (output / "0.err").read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    err = (output / "0.err").read_text()
    assert "SIGTERM came before the command was done, and no results are kept; run it again" in err
    assert "checkpoint" not in err
    assert "Traceback" not in err
    assert not (slow / "runs").exists() or not list((slow / "runs").glob("*/config.yaml"))


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    children = [int(word) for word in done.stdout.split() if Path(f"/proc/{word}").exists()]
    return [found for child in children for found in (child, *descendants(child))]
