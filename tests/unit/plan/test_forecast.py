"""`drawbar plan`: what is forecast on fake tensors is what real tensors take; no device and no weights are needed."""

import json
import os
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import numpy as np
import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from drawbar.cli import group
from drawbar.config.io.load_config import load_config
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.jobs.doctor.findings import look_at_machine
from drawbar.plan.command import _compare
from drawbar.plan.forecast_tables import KNOWN_ERROR_ON_GPUS, print_forecast
from drawbar.plan.machine import Machine, make_machine
from drawbar.plan.rank_forecast import RankForecast, forecast_rank, longest_sample
from drawbar.plan.run_forecast import COUNTED, ESTIMATED, Forecaster, RunForecast, in_own_process
from drawbar.plan.step_recorder import ACTIVATIONS, COMMUNICATION, GRADIENTS, LOGITS, PARAMETERS, Peak
from drawbar.plan.suggestions import suggest
from drawbar.tasks.task_registry import task_class
from drawbar.util.byte_sizes import parse_size
from drawbar.util.memory import usable_memory
from exhaustive import some
from harness import run_cli, run_ranks

LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 500,
}  # fmt: skip
PARAMETERS_OF_LLAMA = 500 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
CONFIG = f"""
run: {{name: tiny}}
device: cpu
precision: fp32
task:
  model: llama
  tokenizer: {{train: byte_bpe, vocab_size: 300}}
  from_scratch: {json.dumps(LLAMA)}
data: {{train: text.txt, sequence_length: 64}}
train: {{steps: 10, global_batch: 16, micro_batch: 2}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"a line of text, number {number}\n" for number in range(40)))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def configure(*overrides: str) -> RunConfig:
    return load_config("config.yaml", list(overrides)).config


def forecaster(config: RunConfig, ranks: int = 1, memory: int = 2**34, nodes: int = 1) -> Forecaster:
    machine = Machine(nodes, ranks, memory, "cpu", 1e12, 0.4)
    return Forecaster(config, task_class(config.task.type), machine, None)


def largest(ranks: int, *overrides: str) -> RankForecast:
    config = configure(*overrides)
    return forecaster(config, ranks).forecast(config, "a case").largest


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("ranks", "settings", "share_of_weights", "share_of_state"),
    some(
        [
            (1, ["parallel.strategy=single"], 1, 1),
            (4, ["parallel.strategy=ddp"], 1, 1),
            (4, ["parallel.strategy=fsdp"], 4, 4),
            (2, ["parallel.strategy=ddp", "parallel.pipeline=2"], 2, 2),
        ],
        2,
    ),
)
def test_weights_gradients_and_optimizer_state_are_exact(
    ranks: int, settings: list[str], share_of_weights: int, share_of_state: int
) -> None:
    found = largest(ranks, *settings)
    weights = 4 * PARAMETERS_OF_LLAMA
    assert found.parameters == pytest.approx(weights / share_of_weights, rel=0.01)
    assert found.gradients == found.parameters
    counts_of_steps = found.optimizer - 2 * found.parameters  # 4 bytes for each tensor
    assert 0 < counts_of_steps < 4 * 100
    assert found.peak.bytes == sum(found.peak.by_kind.values())
    if ranks == 1:
        assert found.parameters == weights


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_ranks_of_tensor_parallel_shards_follow_one_another_in_fresh_processes() -> None:
    config = configure("parallel.strategy=fsdp", "parallel.tensor=2", "task.cross_entropy=plain")
    one = forecaster(config, 4)
    first, second = (one.forecast(config, "fsdp tensor=2").largest for _ in range(2))
    assert first == second
    assert {"dp_shard", "tp"} <= set(first.sent)
    assert first.parameters < 4 * PARAMETERS_OF_LLAMA / 3


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "settings",
    some(
        [
            ["task.cross_entropy=plain", "data.padding_free=false"],
            ["precision=bf16", "parallel.activation_checkpointing=full"],
            ["data.batching=packed", "optim.state_dtype=bf16"],
        ],
        1,
    ),
)
def test_the_peak_is_that_of_the_cpus_allocator(settings: list[str]) -> None:
    [(planned, measured)] = run_ranks(peaks, 1, os.getcwd(), settings)
    assert planned == pytest.approx(measured, rel=0.1)


def peaks(folder: str, settings: list[str]) -> tuple[int, int]:
    """The peak that is planned, and that of a real rank: in a process where no other test has computed."""
    with chdir(folder):
        config = configure("parallel.strategy=single", *settings)
        one = forecaster(config)
        config = one.resolve(config)
        work = partial(forecast_rank, one.make_task, config, one.sample_for(config), ParallelDims(), 0, 1, True)
        return in_own_process(work, "it", 200).peak.bytes, measured_peak(one, config)


def measured_peak(one: Forecaster, config: RunConfig) -> int:
    """The most that a real rank's tensors take in two steps, as the allocator's events tell."""
    from dataclasses import replace

    from drawbar.distributed.process_group import Distributed
    from drawbar.distributed.rank_info import RankInfo
    from drawbar.engines.build import assemble_engine
    from drawbar.plan.rank_forecast import rows_and_count, worst_micro_batch
    from drawbar.tasks.user_methods import make_task

    world = Distributed(RankInfo(), torch.device("cpu"), 60)
    made = one.make_task(config)
    task = make_task(type(made), replace(made.task_context, weightless=False))
    rows, count = rows_and_count(config, world, one.sample_for(config))
    micro = worst_micro_batch(task, config, one.sample_for(config), rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine = assemble_engine(task, config, world, 10)
        with record_function("steps"):
            for _ in range(2):
                engine.train_step([micro] * count)
    events: list[Any] = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == "steps")
    now = peak = 0
    for event in events:
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now if event.start_ns() >= begin else 0)
    return peak


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_a_pretrained_model_is_planned_without_its_weights() -> None:
    LlamaConfig(**LLAMA).save_pretrained("llama")
    pretrained = ("task.from_scratch=null", "task.model=llama")
    found = largest(1, "parallel.strategy=single", *pretrained)
    assert found.parameters == 4 * PARAMETERS_OF_LLAMA
    adapted = largest(2, "parallel.strategy=fsdp", "precision=bf16", "lora={rank: 4}", *pretrained)
    linear = (PARAMETERS_OF_LLAMA - 500 * 64 - 5 * 64) * 2  # frozen, in bf16
    assert adapted.parameters * 2 == pytest.approx(linear + 4 * (500 * 64 + 5 * 64), rel=0.2)
    assert adapted.gradients < adapted.parameters / 5


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_shapes_that_dtensor_looks_for_are_no_memory() -> None:
    """torch's AdamW makes DTensor look for the shapes of whole parameters; moments in bf16 have an optimizer of
    drawbar's own, which does not. Nothing but the moments differs at the peak."""
    settings = ("parallel.strategy=fsdp", "train.micro_batch=1", "data.sequence_length=16")
    exact, low = (largest(4, *settings, f"optim.state_dtype={dtype}") for dtype in ("fp32", "bf16"))
    assert low.optimizer == pytest.approx(exact.optimizer / 2, rel=0.01)
    assert exact.peak.bytes - low.peak.bytes == exact.optimizer - low.optimizer


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_every_stage_of_a_pipeline_is_counted() -> None:
    settings = ["task.from_scratch.num_hidden_layers=8", "train.micro_batch=1", "precision=fp32"]
    one, four = (configure(*settings, *more) for more in (["parallel.strategy=single"], ["parallel.pipeline=4"]))
    alone, piped = forecaster(one).forecast(one, "one"), forecaster(four, 4).forecast(four, "four")
    assert len(piped.ranks) == 4
    assert sum(rank.parameters for rank in piped.ranks) == pytest.approx(alone.largest.parameters, rel=0.01)
    assert piped.flops == pytest.approx(alone.flops, rel=0.05)


def test_labels_of_a_whole_sample_are_not_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve classes of a text of twelve tokens."""
    sample = {"input_ids": np.arange(12), "labels": np.zeros(12), "id": 0}
    monkeypatch.setattr("drawbar.plan.rank_forecast.first_samples", lambda *_: SimpleNamespace(samples=[sample]))
    config: Any = SimpleNamespace(task=None)
    kinds = ("sample", "token")
    tasks: dict[str, Any] = {name: SimpleNamespace(label_placement=name, row_length=64) for name in kinds}
    world: Any = None
    longest = {name: longest_sample(task, config, world, []) for name, task in tasks.items()}
    assert {name: len(found["labels"]) for name, found in longest.items()} == {"sample": 12, "token": 64}


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("stage", "share_of_gradients"), [(1, 1), (2, 4)])
def test_deepspeed_is_estimated(stage: int, share_of_gradients: int) -> None:
    config = configure("parallel.strategy=deepspeed", f"parallel.zero_stage={stage}")
    forecast = forecaster(config, 4).forecast(config, "deepspeed")
    assert forecast.method == ESTIMATED
    assert forecast.largest.optimizer == pytest.approx(2 * forecast.largest.parameters / 4, rel=0.01)
    assert forecast.largest.gradients == pytest.approx(forecast.largest.parameters / share_of_gradients, rel=0.01)


@pytest.mark.usefixtures("project")
def test_replicas_send_their_gradients_around_a_ring_twice() -> None:
    sent = sum(largest(4, "parallel.strategy=ddp").sent.values())
    assert sent == pytest.approx(2 * 3 / 4 * 4 * PARAMETERS_OF_LLAMA, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_a_run_that_finds_its_micro_batch_is_planned_with_one_that_fits() -> None:
    config = configure("device=auto", "train.micro_batch=auto", "parallel.strategy=single", "precision=fp32")

    def plan(memory: int) -> RunForecast:
        machine = Machine(1, 1, memory, "cuda", None, 0.4)
        return Forecaster(config, task_class(config.task.type), machine, None).forecast(config, "single")

    usual = plan(2**34)
    assert usual.largest.rows == 16
    smaller = plan(usual.largest.peak.bytes)  # of which 0.9 are usable
    assert smaller.fits
    assert smaller.largest.rows == 8


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_what_does_not_fit_fits_with_what_is_suggested() -> None:
    config = configure("parallel.strategy=ddp", "train.micro_batch=8", "task.cross_entropy=plain")
    as_it_is = forecaster(config, 2).forecast(config, "ddp")
    tight = forecaster(config, 2, memory=int(as_it_is.largest.peak.bytes))
    found = tight.forecast(config, "ddp")
    assert not found.fits
    suggestions = suggest(tight, config, found)
    assert suggestions
    for suggestion in suggestions:
        changed = configure(
            "parallel.strategy=ddp", "train.micro_batch=8", "task.cross_entropy=plain", *suggestion.text.split()
        )
        assert tight.forecast(changed, "changed").fits


def test_the_command(project: Path) -> None:
    done = run_cli(
        *("plan", "config.yaml", "--gpus", "2", "--gpu", "h100", "--strategies", "fsdp", "--json", "plan.json"),
        *("device=auto", "precision=auto"),
        cwd=project,
    )
    assert done.code == 0, done.err
    assert "parameters" in done.out
    written = json.loads((project / "plan.json").read_text())
    assert written["fits"]
    assert written["machine"]["device"] == "cuda"
    assert written["steps"] == 10
    assert written["tokens_per_step"] == 16 * 64
    assert 0 < written["hours"] < 1
    assert written["strategies"]["fsdp"]["ranks"][0]["parameters"] < written["ranks"][0]["parameters"]
    assert written["ranks"][0]["peak"]["by_kind"][PARAMETERS] == 4 * PARAMETERS_OF_LLAMA
    assert GRADIENTS in written["ranks"][0]["peak"]["by_kind"]
    assert not (project / "runs" / "tiny").exists()


OWN_MODEL = """
import drawbar
from torch import nn


class Plain(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


class Own(drawbar.CausalLM):
    def build_model(self):
        return Plain(super().build_model())
"""


@pytest.mark.exhaustive
def test_a_model_whose_sequences_cannot_be_cut_is_not_planned_with_context(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "own_model.py").write_text(OWN_MODEL)
    plan = ["plan", "config.yaml", "--gpus", "2", "--gpu", "h100", "device=auto", "precision=auto"]
    plan += ["parallel.context=2", "parallel.strategy=ddp", "--strategies", "none"]
    assert group.main(plan, standalone_mode=False) in (0, None)
    capsys.readouterr()
    with pytest.raises(UserError, match="a Plain model cannot be cut along the sequence"):
        group.main([*plan, "task.type=own_model:Own"], standalone_mode=False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_the_command_refuses_what_does_not_fit_and_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*arguments: str) -> Any:
        return group.main(["plan", "config.yaml", *arguments], standalone_mode=False)

    few_changes = ("optim.name=sgd", "train.micro_batch=1", "parallel.activation_checkpointing=full")
    assert plan("--gpus", "1", "--gpu-memory", "1MiB", "--strategies", "none", "device=auto", *few_changes) == 1
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(click.UsageError, match="80GiB"):
        plan("--gpu-memory", "much")
    with pytest.raises(UserError, match="abacus"):
        plan("--gpu", "abacus")


def forecast_of(name: str, method: str) -> RunForecast:
    peak = Peak(bytes=2**30, by_kind=dict.fromkeys((ACTIVATIONS, LOGITS, COMMUNICATION), 2**20))
    size = 1023 * 2**20
    rank = RankForecast(
        rank=0, stage=0, parameters=size, gradients=size, optimizer=size, peak=peak, sent={"dp": size},
        flops=1e12, rows=1, micro_batches=1, checkpoint=size,
    )  # fmt: skip
    return RunForecast(name, method, [rank], Machine(1, 2, 2**34, "cuda", 1e12, 0.4), 10, 64)


def test_the_strategies_are_readable_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    compared: list[tuple[str, RunForecast | UserError]] = [
        ("fsdp tensor=2 pipeline=2 context=2", forecast_of("fsdp", ESTIMATED)),
        ("ddp", forecast_of("ddp", COUNTED)),
        ("dp", UserError("x" * 100)),
    ]
    print_forecast(Console(width=80), forecast_of("ddp", COUNTED), compared, None)
    shown = capsys.readouterr().out
    table = shown.partition("strategies side by side")[2]
    assert "…" not in table
    assert all(head in table for head in ("parameters", "gradients", "optimizer", "peak", "fits"))
    assert table.count("1023.0 MiB") == 8
    assert "yes*" in table
    assert f"* {ESTIMATED}\ndp cannot run: {'x' * 100}\n" in table


def test_a_forecast_for_gpus_says_how_far_it_is_known_to_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    on_gpus = forecast_of("ddp", COUNTED)
    for machine, lines in ((on_gpus.machine, 1), (replace(on_gpus.machine, device="cpu"), 0)):
        print_forecast(Console(width=80), replace(on_gpus, machine=machine), [], None)
        assert capsys.readouterr().out.count(f"off on a GPU: {KNOWN_ERROR_ON_GPUS}\n") == lines


@pytest.mark.usefixtures("project")
def test_one_process_is_not_shown_beside_several_devices() -> None:
    config = configure("device=auto", "precision=bf16")
    machine = Machine(1, 2, 2**34, "cuda", 1e12, 0.4)
    one = Forecaster(config, task_class(config.task.type), machine, None)
    with mock.patch.object(Forecaster, "forecast", side_effect=UserError("not counted here")):
        assert [name for name, _ in _compare(one, config, None) if name in ("single", "ddp")] == ["ddp"]
        assert [name for name, _ in _compare(one, config, "single")] == ["single"]


@pytest.mark.usefixtures("project")
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_counted() -> None:
    refused = pytest.raises(UserError, match=r"cannot write text.txt/plan.json[\s\S]*--json")
    with mock.patch.object(Forecaster, "__init__", side_effect=AssertionError), refused:
        group.main(["plan", "config.yaml", "--gpus", "2", "--json", "text.txt/plan.json"], standalone_mode=False)


def test_sizes() -> None:
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("1.5 GB") == 1_500_000_000
    for wrong in ("80", "GiB", "0GiB", "-1GiB", "80 gigs"):
        with pytest.raises(ValueError, match="80GiB"):
            parse_size(wrong)


@pytest.mark.usefixtures("project")
def test_machines() -> None:
    config = configure("device=auto", "cluster={nodes: 2, gpus_per_node: 8, gpu_memory: 40GiB}")
    machine = make_machine(config, None, None, None, None, 0.4)
    assert (machine.ranks, machine.memory, machine.device) == (16, 40 * 2**30, "cuda")
    assert make_machine(config, None, None, None, "a100", 0.4).peak_flops == 312e12
    unknown = configure("device=auto")
    for name, memory in {"a100": 40, "A100-SXM4-80GB": 80, "v100": 16, "h100": 80}.items():
        assert make_machine(unknown, 1, 1, None, name, 0.4).memory == memory * 10**9
    with pytest.raises(UserError, match=r"cluster\.gpu_memory"):
        configure("cluster={gpu_memory: much}")


@pytest.mark.usefixtures("project")
def test_a_containers_limit_is_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1073741824\n")
    monkeypatch.setattr("drawbar.util.memory._CONTAINER_LIMITS", (str(limit),))
    assert make_machine(configure("device=cpu"), 1, 2, None, None, 0.4).memory == 2**29
    assert look_at_machine().memory == 2**30
    limit.write_text("max\n")
    assert usable_memory() > 2**30


ADAPTED = (
    "task.from_scratch=null",
    "task.model=llama",
    "lora={rank: 4, modules: linear}",
    "task.tokenizer.train=byte_bpe",
)


@pytest.mark.usefixtures("project")
def test_a_packed_base_is_counted_in_its_own_bytes() -> None:
    LlamaConfig(**LLAMA).save_pretrained("llama")
    found = {
        base: largest(1, "parallel.strategy=single", *ADAPTED, f"lora.base={base}").parameters
        for base in ("fp32", "bf16", "int8", "nf4")
    }
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    outputs, blocks = 2 * (5 * 64 + 2 * 128), weights // 64
    assert found["fp32"] - found["bf16"] == 2 * weights
    assert found["fp32"] - found["int8"] == 3 * weights - 4 * outputs
    # 64 or 128 blocks of a matrix share one factor; each has a mean, and 16 values
    assert found["fp32"] - found["nf4"] == 3.5 * weights - blocks - 2 * 7 * (4 + 4 + 64)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_the_peak_of_adapters_on_nf4_is_that_of_the_cpus_allocator() -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained("llama")
    [(planned, measured)] = run_ranks(peaks, 1, os.getcwd(), [*ADAPTED, "lora.base=nf4"])
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
def test_moments_in_8_bits_are_counted() -> None:
    settings = ("parallel.strategy=single", "task.from_scratch.vocab_size=512")
    exact, low = (largest(1, *settings, f"optim.state_dtype={dtype}") for dtype in ("fp32", "int8"))
    large = 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)  # all but norms consist of whole blocks
    assert exact.optimizer - low.optimizer == 2 * (3 * large - 4 * large // 256)
    assert exact.peak.bytes > low.peak.bytes
