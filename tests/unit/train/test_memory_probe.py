"""``train.micro_batch: auto``, where a device has a memory: what fits is found, kept, and changes no result."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawbar.config.schema.run_config import OptimSection
from drawbar.data.dataset import encode_records
from drawbar.data.loader import SampleRows
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.trial_step import future_optimizer_bytes, trial_step
from drawbar.runtime.seed import seed_everything
from drawbar.train import prepare
from drawbar.train.memory_probe import MICRO_BATCH_FILE, Trial, largest_that_fits, longest_rows
from exhaustive import some
from harness import run_ranks
from runs import Fit, fit_in, largest_difference, losses, weights
from tiny import random_step, tiny_config, tiny_engine, vector
from token_memory import TokenMemory

AUTO = ("train.micro_batch=auto", "eval.every=null", "train.steps=4", "checkpoint.every=2")
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


# the search

MOMENTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=4)
"""(bytes at any size, bytes of each row) at some moments of a step."""


def search(moments: list[tuple[int, int]], limit: int, most: int) -> tuple[Trial, list[int]]:
    tried = []

    def measure(rows: int) -> Trial:
        tried.append(rows)
        return Trial(rows, min(constant for constant, _ in moments), peak(moments, rows))

    return largest_that_fits(measure, lambda needed: needed <= limit, most), tried


def peak(moments: list[tuple[int, int]], rows: int) -> int:
    return max(constant + slope * rows for constant, slope in moments)


@given(MOMENTS, st.integers(1, 5000), st.integers(1, 100))
def test_nothing_is_tried_that_is_far_from_fitting(moments: list[tuple[int, int]], limit: int, most: int) -> None:
    found, tried = search(moments, limit, most)
    assert tried == sorted(set(tried))
    assert tried[0] == 1
    assert found.rows == 1 or peak(moments, found.rows) <= limit
    constants = [constant for constant, _ in moments]
    assert all(peak(moments, rows) <= limit + max(constants) - min(constants) for rows in tried[1:])


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 5000), st.integers(1, 100))
def test_of_what_grows_evenly_the_largest_that_fits_is_found(constant: int, slope: int, limit: int, most: int) -> None:
    found, _ = search([(constant, slope)], limit, most)
    sizes = sorted({min(2**power, most) for power in range(8)})
    assert found.rows == max((rows for rows in sizes if constant + slope * rows <= limit), default=1)


# the rows that are tried


def test_the_rows_that_are_tried_are_the_longest_of_either_side() -> None:
    lengths = [(3, 2), (9, 1), (2, 7), (4, 4)]
    records = [{"input_ids": [1] * source, "decoder_input_ids": [1] * target} for source, target in lengths]
    rows = SampleRows(encode_records(records, lambda record: record, describe=str))
    tried = [row.join(row.samples) for row in longest_rows(rows, 2).rows]
    assert [(len(row["input_ids"]), len(row["decoder_input_ids"])) for row in tried] == [(9, 1), (9, 1), (2, 7), (2, 7)]


def test_of_packed_rows_the_longest_are_tried_and_of_others_any() -> None:
    packed = encode_records([{"input_ids": [1] * n} for n in (2, 8, 5, 3)], lambda record: record, describe=str)
    rows = PackedRows(packed, plan_rows(packed.lengths, 8, seed=0), "token")
    tried = [len(row.join(row.samples)["input_ids"]) for row in longest_rows(rows, 4).rows]
    longest_first = sorted(rows.lengths.tolist(), reverse=True)
    assert tried == [*longest_first, *longest_first][:4]
    images = SampleRows(encode_records([{"x": 1.0}, {"x": 2.0}], lambda record: record, describe=str))
    assert len(longest_rows(images, 3).rows) == 3


# a step that leaves no trace


def count_forward(module: nn.Module, _: Any) -> None:
    module.seen += 1


@pytest.mark.parametrize("optim", [OptimSection(lr=0.01), OptimSection(name="muon", lr=0.01)], ids=["adamw", "muon"])
def test_a_trial_step_leaves_no_trace(optim: OptimSection) -> None:
    config = tiny_config("gpt2", DROPOUT, optim=optim)
    tried, plain = tiny_engine(config), tiny_engine(config)
    for engine in (tried, plain):
        engine.module.register_buffer("seen", torch.zeros(1))
        engine.module.register_forward_pre_hook(count_forward)
        seed_everything(3)
        results = []
        for step in range(1, 4):
            if engine is tried:
                with trial_step(engine, engine.updater, random_step(engine, seed=9)):
                    assert any(parameter.grad is not None for parameter in engine.module.parameters())
                assert all(parameter.grad is None for parameter in engine.module.parameters())
            results.append(float(engine.train_step(random_step(engine, seed=step)).loss))
    assert torch.equal(vector(tried), vector(plain))
    assert torch.equal(tried.module.seen, plain.module.seen)
    assert tried.state().values == plain.state().values


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_the_state_of_an_optimizer_is_foreseen(name: str) -> None:
    engine = tiny_engine(tiny_config(optim=OptimSection(name=name)))
    of_weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    assert future_optimizer_bytes(engine.updater) == 2 * of_weights  # the most that any of them keeps
    engine.train_step(random_step(engine, seed=1))
    if name != "sgd":  # which keeps nothing without momentum
        assert future_optimizer_bytes(engine.updater) == 0
    assert sum(tensor.nbytes for tensor in engine.state().optimizer.values() if tensor.ndim) <= 2 * of_weights


# whole runs


def found_in(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / MICRO_BATCH_FILE).read_text())
    return found


def use(memory: TokenMemory, monkeypatch: pytest.MonkeyPatch) -> TokenMemory:
    monkeypatch.setattr(prepare, "memory_of", lambda device: memory)
    return memory


@pytest.mark.parametrize(
    ("settings", "tokens", "trials", "found"),
    some(
        [
            ((), 100, [32, 64], 64),
            ((), 1000, [32, 64, 128, 256], 256),  # the whole global batch of 8 rows
            ((), 10, [32], 32),
            (("data.batching=packed",), 100, [32, 64], 64),
            (("data.padding_free=false", "data.sequence_length=64"), 1000, [64, 128, 256, 512], 512),
        ],
        2,
    ),
)
def test_a_run_finds_its_micro_batch(
    settings: tuple[str, ...],
    tokens: int,
    trials: list[int],
    found: int,
    fit: Fit,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = use(TokenMemory(tokens), monkeypatch)
    with memory.counting():
        fit(*AUTO, *settings)
    assert memory.trials == trials
    assert (found_in(run)["rows"], found_in(run)["tokens"]) == (None, found)
    monkeypatch.undo()
    fit(*AUTO, *settings, f"train.micro_batch_tokens={found}", "run.name=set")
    assert losses(run) == losses(run.with_name("set"))
    assert all(torch.equal(tensor, weights(run, 4)[name]) for name, tensor in weights(run.with_name("set"), 4).items())
    fit(*AUTO, *settings, "run.name=usual")
    assert largest_difference(losses(run), losses(run.with_name("usual"))) < 1e-5


def test_rows_that_are_padded_are_no_more_than_the_usual_micro_batch(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = use(TokenMemory(10**6), monkeypatch)
    monkeypatch.setattr("drawbar.train.memory_probe.MICRO_BATCH_TOKENS", 100)
    with memory.counting():
        fit(*AUTO, "data.padding_free=false")
    assert memory.trials == [32, 64, 96]


def test_a_run_that_goes_on_keeps_what_it_found(fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = use(TokenMemory(100), monkeypatch)
    with memory.counting():
        fit(*AUTO)
        whole = losses(run)
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        use(TokenMemory(1000), monkeypatch)  # more is free today
        fit(*AUTO)
        assert losses(run) == whole
        assert found_in(run)["tokens"] == 64
        other = use(TokenMemory(1000, "another device"), monkeypatch)
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        with other.counting():
            fit(*AUTO)
        assert found_in(run)["tokens"] == 256
        assert found_in(run)["found_with"]["devices"] == ["another device"]
    assert largest_difference(losses(run), whole) < 1e-5


def test_a_run_of_an_older_drawbar_keeps_the_usual_micro_batch(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(*AUTO)
    whole = losses(run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    memory = use(TokenMemory(100), monkeypatch)
    fit(*AUTO)
    assert losses(run) == whole
    assert memory.trials == []
    assert not (run / MICRO_BATCH_FILE).exists()


@pytest.mark.parametrize("setting", ["train.micro_batch=2", "train.micro_batch_tokens=50", "data.streaming=true"])
def test_nothing_is_tried_where_it_is_set_or_rows_are_not_known(
    setting: str, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = use(TokenMemory(100), monkeypatch)
    fit(*AUTO, setting)
    assert memory.trials == []
    assert not (run / MICRO_BATCH_FILE).exists()


def fit_on_ranks(folder: str, tokens: tuple[int, int]) -> None:
    for strategy in ("zero1", "fsdp"):
        settings = (*AUTO, f"parallel.strategy={strategy}", "train.global_batch=16")
        fit_in(Path(folder), *settings, "train.micro_batch_tokens=64", f"run.name={strategy}-set")
        with pytest.MonkeyPatch.context() as patch:
            memory = use(TokenMemory(tokens[RankInfo.from_environment().rank]), patch)
            with memory.counting():
                fit_in(Path(folder), *settings, f"run.name={strategy}")


@pytest.mark.exhaustive
def test_ranks_take_what_fits_on_all_of_them(project: Path) -> None:
    run_ranks(fit_on_ranks, 2, str(project), (100, 1000))
    for strategy in ("zero1", "fsdp"):
        found, expected = (project / "runs" / name for name in (strategy, f"{strategy}-set"))
        assert (found_in(found)["tokens"], found_in(found)["found_with"]["ranks"]) == (64, 2)
        assert losses(found) == losses(expected)
        assert all(np.array_equal(one, weights(expected, 4)[name]) for name, one in weights(found, 4).items())
