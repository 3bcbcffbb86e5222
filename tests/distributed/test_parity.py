"""Acceptance: every strategy computes what one process computes; and where one does not, the report names the module."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import drawbar
from drawbar.engines import build, native
from drawbar.runtime.dist import World
from drawbar.runtime.env import Place
from drawbar.runtime.mesh import Layout
from drawbar.tasks.registry import task_class
from drawbar.tools.cases import parse_case
from drawbar.tools.parity import Request, reference, run_case
from drawbar.tools.result import Result
from drawbar.tools.subject import Subject
from harness import run_cli, run_ranks, run_script
from messages import check_one_message
from tiny import CPU

TIED = "task.from_scratch.tie_word_embeddings=true"
UNTIED = "task.from_scratch.tie_word_embeddings=false"
FOUR_BLOCKS = "task.from_scratch.num_hidden_layers=4"
SMALL_BATCHES = "train.micro_batch=1"
CASES = {
    2: [
        *("ddp", "zero1", "fsdp", "fsdp reshard=false", "fsdp offload=true", "tensor=2"),
        *("pipeline=2 schedule=gpipe", "pipeline=2 schedule=1f1b", "pipeline=2 schedule=interleaved"),
    ],
    4: [
        *("ddp", "fsdp", "fsdp replicate=2", "tensor=2", "fsdp tensor=2"),
        *("ddp pipeline=2", "fsdp pipeline=2", "pipeline=2 tensor=2"),
    ],
}


def compare_all(folder: str, settings: list[str], names: list[str], steps: int) -> list[Result]:
    """On one rank: the results of all cases; on rank 0."""
    with chdir(folder):
        config = drawbar.load_config("config.yaml", [*settings, SMALL_BATCHES]).config
        subject = Subject(config, task_class(config.task.type), steps).with_task()
        place = Place.from_environment()
        expected = reference(subject, CPU) if place.first else None
        results = []
        for name in names:
            case = parse_case(name, config)
            with World(place, CPU, 60, Layout.of(case.parallel, place.world_size)) as world:
                results.append(run_case(subject, case, world, expected, Request([case])))
    return [result for result in results if result is not None]


def compare_tied_and_untied(folder: str, names: list[str]) -> list[Result]:
    return [result for ties in (TIED, UNTIED) for result in compare_all(folder, [ties, FOUR_BLOCKS], names, 10)]


@pytest.mark.parametrize("ranks", CASES)
def test_every_strategy_is_equal(ranks: int, project: Path) -> None:
    results = run_ranks(compare_tied_and_untied, ranks, str(project), CASES[ranks])[0]
    assert [result.name for result in results] == CASES[ranks] * 2
    for result in results:
        assert result.verdict == "equal", result
    assert any(result.comparison["gradients"]["value"] > 0 for result in results)  # something was computed anew


SPOILED = "model.layers.1.mlp.up_proj"


@contextmanager
def not_reduced() -> Iterator[None]:
    """One gradient does not travel."""
    replicate = native.replicate

    def forgetful(model: nn.Module, device: torch.device) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [f"{SPOILED}.weight"])
        return replicate(model, device)

    with patch.object(native, "replicate", forgetful):
        yield


@contextmanager
def other_on_rank_1() -> Iterator[None]:
    """One gradient is another on rank 1 alone, which rank 0 cannot see from its own."""
    spoiled: list[nn.Parameter] = []
    replicate = native.replicate

    def watched(model: nn.Module, device: torch.device) -> nn.Module:
        spoiled.append(model.get_parameter(f"{SPOILED}.weight"))
        return replicate(model, device)

    def spoil(*_: Any) -> None:
        for parameter in spoiled:
            if parameter.grad is not None and os.environ["RANK"] == "1":
                parameter.grad *= 1.001

    handle = register_optimizer_step_pre_hook(spoil)
    with patch.object(native, "replicate", watched):
        yield
    handle.remove()


@contextmanager
def untied() -> Iterator[None]:
    replicate = native.replicate

    def separate(model: Any, device: torch.device) -> nn.Module:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return replicate(model, device)

    with patch.object(native, "replicate", separate):
        yield


@contextmanager
def wrong_style(module: str, style: str) -> Iterator[None]:
    """A tensor plan with one style wrong."""
    plan_for = build.plan_for

    def spoiled(model: nn.Module) -> Any:
        plan = plan_for(model)
        return dataclasses.replace(plan, tensor={**(plan.tensor or {}), module: style})

    with patch.object(build, "plan_for", spoiled):
        yield


@contextmanager
def output_not_summed() -> Iterator[None]:
    """A row-wise layer whose parts of the sum stay with the ranks: rank 0 adds nothing of rank 1's."""
    parallelize = build.parallelize

    def spoiled(model: nn.Module, *rest: Any) -> None:
        parallelize(model, *rest)
        if any(parameter.__class__.__name__ == "DTensor" or hasattr(parameter, "placements") for parameter in model.parameters()):
            model.get_submodule("model.layers.1.self_attn.o_proj").register_forward_hook(lambda m, args, output: output * 0.5)

    with patch.object(build, "parallelize", spoiled):
        yield


FAULTS: dict[str, tuple[AbstractContextManager[None], str, str, str]] = {}
