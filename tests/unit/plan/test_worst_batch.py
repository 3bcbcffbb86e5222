"""`drawbar plan` counts what is worst: the batches that take most, and all that a step keeps on the device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drawbar.config.io.load_config import load_config
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import MicroBatchSize
from drawbar.errors import UserError
from drawbar.plan import rank_forecast, run_forecast
from drawbar.plan.machine import Machine, make_machine
from drawbar.plan.rank_forecast import RankForecast, _counts, longest_sample, rows_and_count, worst_micro_batch
from drawbar.plan.run_forecast import Forecaster
from drawbar.plan.step_recorder import ACTIVATIONS, COMMUNICATION, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS, Peak
from drawbar.plan.suggestions import _changes
from drawbar.tasks.task_registry import task_class
from exhaustive import some

NOBODY: Any = None
SHAPE = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, vocab_size: 300}"


def configure(*overrides: str) -> RunConfig:
    usual = (
        "data.train=text.txt",
        "data.sequence_length=32",
        "train.steps=3",
        "train.global_batch=4",
        "precision=fp32",
    )
    return load_config(None, [*usual, *overrides]).config


def largest(device: str, ranks: int, *overrides: str) -> RankForecast:
    model = ("task.model=llama", f"task.from_scratch={SHAPE}", "task.tokenizer={train: byte_bpe, vocab_size: 300}")
    config = configure(*model, "train.micro_batch=1", *overrides)
    machine = Machine(1, ranks, 2**34, device, None, 0.4)
    return Forecaster(config, task_class(config.task.type), machine, None).forecast(config, "a case").largest


@pytest.fixture
def text(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a line of text\n" * 20)


def longest(monkeypatch: pytest.MonkeyPatch, placement: str | None, samples: list[dict[str, Any]]) -> dict[str, Any]:
    monkeypatch.setattr(rank_forecast, "first_samples", lambda *_: SimpleNamespace(samples=samples))
    task: Any = SimpleNamespace(label_placement=placement, row_length=8)
    config: Any = SimpleNamespace(task=None)
    return longest_sample(task, config, NOBODY, [])


def test_every_position_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_and_answer = {"input_ids": np.array([5, 6, 7]), "labels": np.array([-100, -100, 7]), "id": 0}
    found = longest(monkeypatch, "next_token", [prompt_and_answer])
    assert found["labels"].tolist() == found["input_ids"].tolist() == [5, 5, 5, 6, 6, 6, 7, 7]


def test_of_samples_without_tokens_each_field_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        {"codes": np.zeros(2), "image": np.zeros((3, 4, 4)), "id": 0},
        {"codes": np.zeros(9), "image": np.zeros((3, 2, 2)), "id": 1},
    ]
    found = longest(monkeypatch, None, samples)
    assert (found["codes"].shape, found["image"].shape, found["id"]) == ((9,), (3, 4, 4), 0)


def test_rows_are_counted_by_the_longer_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_forecast, "train_micro_batch", lambda *_: MicroBatchSize(tokens=64))
    config: Any = SimpleNamespace(train=SimpleNamespace(global_batch=16))
    world: Any = SimpleNamespace(dp_ranks=SimpleNamespace(size=1))
    source, target = np.zeros(8), np.zeros(32)
    assert rows_and_count(config, world, {"input_ids": source, "decoder_input_ids": target}) == (2, 8)
    assert rows_and_count(config, world, {"input_ids": source, "labels": target}) == (8, 2)
    assert rows_and_count(config, world, {"image": source}) == (16, 1)


def test_suggested_micro_batches_hold_the_longer_side() -> None:
    pair = ("task.type=seq2seq", "task.model=t5-small", "task.target_length=96", "train.micro_batch_tokens=400")
    found: Any = SimpleNamespace(largest=SimpleNamespace(rows=4), machine=Machine(1, 1, 1, "cuda", None, 0.4))
    changes = list(_changes(configure(*pair, "data.train=pairs.jsonl"), found))
    assert {"train.micro_batch_tokens": 96} in changes
    assert changes[-1] == {"parallel.strategy": "fsdp", "parallel.offload": True}


def test_a_collate_that_returns_no_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mistaken:
        label_placement = None

        def collate(self, samples: list[Any]) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(
        rank_forecast, "batch_maker", lambda task, _: SimpleNamespace(augment=lambda one, _: one, collate=task.collate)
    )
    task: Any = Mistaken()
    with pytest.raises(UserError, match=r"Mistaken\.collate returns dict"):
        worst_micro_batch(task, configure(), {"codes": np.zeros(2)}, 2)


def test_names_of_gpus() -> None:
    config = configure("device=auto")
    for name, memory, speed in (("NVIDIA GH200 480GB", 96, 989), ("h100 pcie", 80, 756), ("H100 PCIe", 80, 756)):
        machine = make_machine(config, 1, 1, None, name, 0.4)
        assert (machine.memory, machine.peak_flops) == (memory * 10**9, speed * 1e12)


def test_all_micro_batches_of_an_interleaved_pipeline_are_counted() -> None:
    config = configure("parallel.pipeline=2", "parallel.schedule=interleaved")
    dims = ParallelDims(pp=2)
    assert _counts(config, dims, 16) == (2, 16)
    assert _counts(configure("parallel.pipeline=2", "parallel.schedule=1f1b"), dims, 16) == (2, 4)


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("optimizer", some(["sgd", "muon", "adafactor"], 1))
def test_a_checkpoint_has_the_state_of_its_optimizer(optimizer: str) -> None:
    found = largest("cpu", 1, f"optim.name={optimizer}", "parallel.strategy=single")
    assert found.checkpoint == pytest.approx(found.parameters + found.optimizer, rel=0.01)
    assert found.checkpoint < 2.9 * found.parameters


@pytest.mark.exhaustive
@pytest.mark.usefixtures("text")
def test_what_fsdp_offloads_is_not_in_the_peak_of_a_gpu() -> None:
    config = ("parallel.strategy=fsdp", "parallel.activation_checkpointing=none")
    usual, offloaded = (largest("cuda", 2, *config, f"parallel.offload={on}") for on in ("false", "true"))
    assert offloaded.parameters == usual.parameters
    assert [offloaded.peak.by_kind[kind] for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)] == [0, 0, 0]
    assert 0 < offloaded.peak.bytes <= usual.peak.bytes - usual.parameters - usual.optimizer
    assert offloaded.peak.by_kind[ACTIVATIONS] + offloaded.peak.by_kind[COMMUNICATION] > 0
    on_cpu = largest("cpu", 2, *config, "parallel.offload=true")
    assert on_cpu.peak.by_kind[PARAMETERS] == on_cpu.parameters


@pytest.mark.parametrize(
    ("preset", "left"),
    [
        ("zero2", {PARAMETERS: 100, GRADIENTS: 25, OPTIMIZER: 50}),
        ("zero2_offload", {PARAMETERS: 100, GRADIENTS: 0, OPTIMIZER: 0}),
        ("zero3_offload", {PARAMETERS: 0, GRADIENTS: 0, OPTIMIZER: 0}),
    ],
)
def test_what_deepspeed_offloads_is_not_in_the_peak_of_a_gpu(preset: str, left: dict[str, int]) -> None:
    peak = Peak(400, dict.fromkeys(KINDS, 0) | {PARAMETERS: 100, GRADIENTS: 100, OPTIMIZER: 200})
    replica = RankForecast(0, 0, 100, 100, 200, peak, {}, 1.0, 1, 1, 300)
    config = configure(f"deepspeed={{preset: {preset}}}")
    found = run_forecast._with_zero_shares(replica, config, 4, on_gpu=True)
    assert {kind: found.peak.by_kind[kind] for kind in left} == left
    assert found.optimizer == 50
    on_cpu = run_forecast._with_zero_shares(replica, config, 4, on_gpu=False)
    assert on_cpu.peak.by_kind[OPTIMIZER] == 50
