"""Acceptance: every strategy computes what one process computes; where one does not, the report names the module."""

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import drawbar
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines import local_model, torch_strategies, updaters
from drawbar.parallel import ddp
from drawbar.parity.cases import parallel_cases, parse_case
from drawbar.parity.comparison import KINDS
from drawbar.parity.result import Result
from drawbar.parity.run import ParityRequest, describe, make_reference, run_case
from drawbar.parity.workload import Workload
from drawbar.tasks.task_registry import task_class
from harness import run_cli, run_ranks, run_script
from tiny import CPU

TIED = "task.from_scratch.tie_word_embeddings=true"
UNTIED = "task.from_scratch.tie_word_embeddings=false"
TWO_BLOCKS = "task.from_scratch.num_hidden_layers=2"
FOUR_BLOCKS = "task.from_scratch.num_hidden_layers=4"
STEPS = 3
LAYOUTS = {ranks: [case.name for case in parallel_cases(RunConfig(device="cpu"), ranks)] for ranks in (2, 4)}
"""All that the table of rules allows."""
CASES = [
    pytest.param(2, LAYOUTS[2], id="2"),
    pytest.param(4, LAYOUTS[4], id="4", marks=pytest.mark.exhaustive),
]


def compare_all(
    folder: str, settings: list[str], names: list[str], steps: int, precision: str = "fp32"
) -> list[Result]:
    """On one rank: the results of all cases; on rank 0. The first setting may be a file."""
    with chdir(folder):
        file, *rest = settings if settings[0].endswith(".yaml") else ["config.yaml", *settings]
        place = RankInfo.from_environment()
        rows = 2 if place.world_size == 2 else 1  # a micro-batch for each stage, and as few as that
        config = drawbar.load_config(file, [*rest, f"train.micro_batch={rows}"]).config
        workload = Workload(config, task_class(config.task.type), steps).with_tokenizer_and_metadata()
        expected = make_reference(workload, CPU, precision) if place.is_rank0 else None
        results = []
        for name in names:
            case = parse_case(name, config)
            with Distributed(place, CPU, 60, ParallelDims.of(case.parallel, place.world_size)) as world:
                results.append(run_case(workload, case, world, expected, ParityRequest([case], precision)))
            gc.freeze()  # what it imported and keeps: collecting garbage was a seventh of the time
    return [result for result in results if result is not None]


def compare_tied_and_untied(folder: str, names: list[str]) -> list[Result]:
    rows = 8 if os.environ["WORLD_SIZE"] == "2" else 4  # as few as keep every stage and every rank at work
    results = []
    for ties in (TIED, UNTIED):
        for blocks in (TWO_BLOCKS, FOUR_BLOCKS):  # the interleaved schedule wants four blocks; two are quicker
            deep = blocks == FOUR_BLOCKS
            cases = [name for name in names if has_case(name, ties) and ("interleaved" in name) == deep]
            # with a larger learning rate, a few steps make rounding errors large
            settings = [ties, blocks, "optim.lr=5.0e-3", f"train.global_batch={rows}"]
            results += compare_all(folder, settings, cases, STEPS)
    return results


def has_case(name: str, ties: str) -> bool:
    """Every layout with tied weights, which are the harder; without them those that put the head elsewhere."""
    return ties == TIED or "pipeline" in name or name in ("ddp", "fsdp", "ddp tensor=2")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "names"), CASES)
def test_every_strategy_is_equal(ranks: int, names: list[str], project: Path) -> None:
    results = run_ranks(compare_tied_and_untied, ranks, str(project), names, timeout=500)[0]
    wanted = [name for ties in (TIED, UNTIED) for name in names if has_case(name, ties)]
    assert sorted(result.name for result in results) == sorted(wanted)
    for result in results:
        assert result.verdict == "equal", result
    assert any(result.comparison["gradients"]["value"] > 0 for result in results)  # something was computed anew


SPOILED = "model.layers.1.mlp.up_proj"
Spoil = Callable[[Any], None]


@contextmanager
def before_replicating(spoil: Spoil) -> Iterator[None]:
    """Do something to the model that DDP gets."""
    replicate = torch_strategies.replicate

    def spoiled(model: nn.Module, *how: Any) -> nn.Module:
        spoil(model)
        return replicate(model, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_strategies, "replicate", spoiled)
        yield


@contextmanager
def not_reduced() -> Iterator[None]:
    """One gradient does not travel."""

    class Ignoring(DistributedDataParallel):
        def __init__(self, module: nn.Module, **settings: Any) -> None:
            self._set_params_and_buffers_to_ignore_for_model(module, [f"model.{SPOILED}.weight"])
            super().__init__(module, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "DistributedDataParallel", Ignoring)
        yield


@contextmanager
def other_on_rank_1() -> Iterator[None]:
    """One gradient is another on rank 1 alone, which cannot be seen from those of rank 0."""
    watched: list[nn.Parameter] = []
    reduce_partial_grads = updaters.reduce_partial_grads

    def spoil(parameters: list[nn.Parameter]) -> None:
        reduce_partial_grads(parameters)
        for parameter in watched:
            if parameter.grad is not None and os.environ.get("RANK") == "1":
                parameter.grad *= 1.001

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updaters, "reduce_partial_grads", spoil)
        with before_replicating(lambda model: watched.append(model.get_parameter(f"{SPOILED}.weight"))):
            yield


@contextmanager
def slightly_too_large() -> Iterator[None]:
    """One gradient is a sixth too large, on every rank."""
    watched: list[nn.Parameter] = []
    reduce_partial_grads = updaters.reduce_partial_grads

    def spoil(parameters: list[nn.Parameter]) -> None:
        reduce_partial_grads(parameters)
        for parameter in watched:
            if parameter.grad is not None:
                parameter.grad *= 7 / 6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updaters, "reduce_partial_grads", spoil)
        with before_replicating(lambda model: watched.append(model.get_parameter(f"{SPOILED}.weight"))):
            yield


@contextmanager
def other_dropout() -> Iterator[None]:
    """Tensor-parallel ranks draw other random numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelDims, "seed_rank", lambda layout, rank: rank)
        yield


def untied() -> AbstractContextManager[None]:
    def separate(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    return before_replicating(separate)


def wrong_update() -> AbstractContextManager[None]:
    """One weight is trained, but never updated."""

    def drop_gradients(model: nn.Module) -> None:
        weight = model.get_parameter(f"{SPOILED}.weight")
        register = register_optimizer_step_pre_hook

        def skip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter is not weight]

        register(skip)

    return before_replicating(drop_gradients)


@contextmanager
def wrong_plan(tensor: dict[str, str], packed: dict[str, int] | None = None) -> Iterator[None]:
    """A tensor plan with one style wrong."""
    plan_for = local_model.plan_for

    def spoiled(model: nn.Module) -> Any:
        plan = plan_for(model)
        changed = dataclasses.replace(plan, tensor={**(plan.tensor or {}), **tensor})
        return changed if packed is None else dataclasses.replace(changed, fused=packed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_model, "plan_for", spoiled)
        yield


GPT2 = """\
task: {model: gpt2, from_scratch: {n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64}, tokenizer: {train: byte_bpe}}
"""
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str, str, str, str]] = {
    "not reduced": (not_reduced, "ddp", UNTIED, SPOILED, "not what the rows of all ranks add up to"),
    "other on rank 1": (other_on_rank_1, "ddp", UNTIED, SPOILED, "ranks 0 and 1 hold different gradients"),
    "untied": (untied, "ddp", TIED, "model.embed_tokens", "tied to lm_head.weight, and here it is not"),
    "wrong update": (wrong_update, "ddp", UNTIED, SPOILED, "is not, after the updates"),
    "wrong style in backward": (
        lambda: wrong_plan({"model.norm": "replicated"}),
        *("tensor=2", UNTIED, "model.norm", "is 2 times what it should be"),
    ),
    "wrong style in forward": (
        lambda: wrong_plan({"transformer.h.*.attn.c_attn": "colwise"}, {}),
        *("tensor=2", "gpt2.yaml", "transformer.h.0.attn.c_proj", "takes shards from transformer.h.0.attn.c_attn"),
    ),
    "other dropout": (
        other_dropout,
        *("tensor=2", "gpt2.yaml", "transformer.wpe", "ranks 0 and 1 hold different weights of transformer.wpe.weight"),
    ),
    "too large, in bf16": (slightly_too_large, "ddp", UNTIED, SPOILED, "is 1.17 times what it should be"),
}
"""A fault, the strategy that it is planted in, the model, the module to name, and what to say of it."""


def compare_with_faults(folder: str) -> dict[str, list[Result]]:
    found = {}
    for name, (plant, case, settings, *_) in FAULTS.items():
        with plant():
            found[name] = compare_all(folder, [settings], [case], 2, "bf16" if "bf16" in name else "fp32")
    return found


@pytest.mark.exhaustive
def test_planted_faults_are_caught_and_named(project: Path) -> None:
    text = (project / "config.yaml").read_text()
    begin, end = text.index("task:"), text.index("data:")
    (project / "gpt2.yaml").write_text(text[:begin] + GPT2 + text[end:])
    found = run_ranks(compare_with_faults, 2, str(project))[0]
    for name, (_, _, _, module, says) in FAULTS.items():
        (result,) = found[name]
        assert result.verdict == "diverges", name
        assert result.module == module, (name, result)
        assert says in result.reasons[0], (name, result)
        first = [row["name"] for row in result.values()["modules"] if row["standing"] == "first to differ"]
        assert first == [module], (name, first)


def fail_in_forward(folder: str) -> list[str]:
    """What is said of a case that ends in an exception, on each rank."""
    with wrong_plan({"model.layers.*.mlp.down_proj": "colwise"}), pytest.raises(RuntimeError) as error:
        compare_all(folder, [UNTIED], ["tensor=2"], 1)
    assert isinstance(error.value, Exception)
    return [describe(error.value)]


@pytest.mark.exhaustive
def test_an_exception_is_told_with_its_module(project: Path) -> None:
    for told in run_ranks(fail_in_forward, 2, str(project)):
        assert told[0].startswith("in model.layers.0.mlp.down_proj: RuntimeError: "), told


def test_the_command_prints_one_json_object(project: Path) -> None:
    done = run_cli(
        *("parity", "config.yaml", "--ranks", "2", "--strategies", "ddp, single activation_checkpointing=full"),
        *("--steps", "3", "--layers", "1", "--json"),
        cwd=project,
    )
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["equal"]
    assert (report["steps"], report["ranks"], report["layers"], report["precision"]) == (3, 2, 1, "fp32")
    assert [(case["name"], case["verdict"]) for case in report["cases"]] == [
        ("ddp", "equal"),
        ("single activation_checkpointing=full", "equal"),
    ]
    for case in report["cases"]:
        for kind in KINDS:
            assert 0 <= case["comparison"][kind]["value"] <= case["comparison"][kind]["limit"]
    assert [path.name for path in (project / "runs").iterdir()] == [".cache"]


BREAKS = """\
import torch.distributed as dist
import drawbar


class Breaks(drawbar.CausalLM):
    def forward(self, model, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise RuntimeError("a bolt is loose")
        return super().forward(model, batch)


if __name__ == "__main__":
    drawbar.main(Breaks)
"""


@pytest.mark.exhaustive
def test_a_crash_and_a_refusal_leave_the_other_cases_alone(project: Path) -> None:
    (project / "breaks.py").write_text(BREAKS)
    strategies = "ddp, fsdp replicate=3, single activation_checkpointing=full"
    done = run_script(
        *(project / "breaks.py", "parity", "config.yaml", "--ranks", "2", "--steps", "2", "--strategies", strategies),
        cwd=project,
    )
    assert done.code == 2, done.err  # a strategy that was asked for cannot run
    lines = [line.split() for line in done.out.splitlines()]
    verdicts = {" ".join(line[:2]): line[-1] for line in lines if line}
    assert verdicts["ddp crashed"] == "crashed"
    assert verdicts["fsdp replicate=3"] == "refused"
    assert ["single", "activation_checkpointing=full", "equal"] in [line[:3] for line in lines]
    assert "a bolt is loose" in done.out
    assert "parallel.replicate=3 does not divide" in done.out


def test_where_nothing_can_run_no_process_is_started(project: Path) -> None:
    done = run_cli("parity", "config.yaml", "--ranks", "64", "--json", cwd=project)
    assert done.code == 2, done.err
    assert {case["verdict"] for case in json.loads(done.out)["cases"]} == {"refused"}
    assert "one process, fp32" not in done.err
    assert list((project / "runs").glob("*")) == []


LOOKS_AT_RANKS = """
import os
import drawbar


class ByWorldSize(drawbar.CausalLM):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / int(os.environ.get("WORLD_SIZE", "1"))


class Uneven(drawbar.CausalLM):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1.01 if os.environ.get("RANK") == "1" else 1.0)


class FailsInLoss(drawbar.CausalLM):
    def loss(self, outputs, batch):
        if os.environ.get("RANK") == "1":
            raise KeyError("length")
        return super().loss(outputs, batch)


class FailsInCollate(drawbar.CausalLM):
    def collate(self, samples):
        if os.environ.get("RANK") == "1":
            raise KeyError("length")
        return super().collate(samples)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("ByWorldSize", "it is 0.5 times what it should be"),
        ("Uneven", "rank 1 scales its loss, and so its gradients, by 1.01 times what rank 0 does"),
        ("FailsInLoss", "FailsInLoss.loss fails: KeyError: 'length'"),
        ("FailsInCollate", "FailsInCollate.collate fails: KeyError: 'length'"),
    ],
)
def test_a_task_that_looks_at_its_rank_is_found_out(task: str, said: str, project: Path) -> None:
    """The one process that it is compared with has no rank in its environment, as a run of one process has none."""
    (project / "odd.py").write_text(LOOKS_AT_RANKS)
    settings = ("train.micro_batch=2", "launch.nproc=2", f"task.type=odd:{task}")
    done = run_cli("parity", "config.yaml", *settings, "--strategies", "ddp", "--steps", "2", cwd=project)
    assert done.code == 1, done.err
    assert said in done.out, done.out
    assert "Traceback" not in done.out
    assert "0.0e+00/1e-04" not in done.out
