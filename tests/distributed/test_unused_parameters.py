"""Trained parameters that get no gradient, ever or in some batches: a run of several ranks is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import drawbar
from conftest import make_project
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from exhaustive import asked, params, some
from harness import run_ranks
from runs import fit_in, largest_difference, losses, weights
from tiny import CPU, Numbers, random_step, tiny_config, unchecked_engine

SETTINGS = ("train.micro_batch=1", "train.steps=6", "train.global_batch=4", "optim.warmup=1", "checkpoint.every=null")


class Spare(drawbar.CausalLM):
    """causal_lm whose model has a parameter for nothing, and one for an output that the loss does not need."""

    in_some_batches = False

    def build_model(self) -> nn.Module:
        return self.with_spares(super().build_model())

    def build_meta_model(self) -> nn.Module:
        return self.with_spares(super().build_meta_model())

    def stored_weights(self, structure: nn.Module) -> None:
        return None

    def with_spares(self, model: nn.Module) -> nn.Module:
        for name in ("never", "returned", "sometimes"):
            model.register_parameter(name, nn.Parameter(torch.ones(1)))
        kind, in_some_batches = type(model), self.in_some_batches

        def forward(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
            outputs = kind.forward(self, input_ids=input_ids, **inputs)
            outputs["returned"] = self.returned * 2
            even = input_ids[:, 1] % 2 == 0
            if in_some_batches and even.any():
                outputs["logits"] = outputs["logits"] * torch.where(even, self.sometimes, 1.0)[:, None, None]
            return outputs

        model.__class__ = type("Spared", (kind,), {"forward": forward})
        return model


class SpareInSomeBatches(Spare):
    """Another parameter is only for rows whose first word is an even token."""

    in_some_batches = True


CASES = {"ddp": SpareInSomeBatches, "zero1": SpareInSomeBatches, "fsdp": Spare}


def train(folder: str, strategies: list[str]) -> None:
    for strategy in strategies:
        torch.manual_seed(0)
        fit_in(Path(folder), *SETTINGS, f"parallel.strategy={strategy}", f"run.name={strategy}", task=CASES[strategy])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("spare"))
    for task in (Spare, SpareInSomeBatches):
        fit_in(project, *SETTINGS, f"run.name={task.__name__}", task=task)
    run_ranks(train, 2, str(project), asked(request, "case"))
    return project / "runs"


@pytest.mark.parametrize("case", params(CASES, often=["ddp"]))
def test_a_run_of_two_ranks_is_that_of_one_process(runs: Path, case: str) -> None:
    one = runs / CASES[case].__name__
    assert largest_difference(losses(one), losses(runs / case)) < 1e-5
    wanted, found = weights(one, 6), weights(runs / case, 6)
    assert wanted["never"].item() == wanted["returned"].item() == 1.0
    assert (wanted["sometimes"].item() != 1.0) == CASES[case].in_some_batches
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


class Experts(Spare):
    """One of two parameters of one size, by the first word of a row."""

    def with_spares(self, model: nn.Module) -> nn.Module:
        for name in ("for_even", "for_odd"):
            model.register_parameter(name, nn.Parameter(torch.ones(1)))
        kind = type(model)

        def forward(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
            outputs = kind.forward(self, input_ids=input_ids, **inputs)
            expert = self.for_even if input_ids[0, 1] % 2 == 0 else self.for_odd
            outputs["logits"] = outputs["logits"] * expert
            return outputs

        model.__class__ = type("Mixed", (kind,), {"forward": forward})
        return model


class ExpertBlocks(drawbar.CausalLM):
    """The last block is for rows whose first word is an even token, and the one before it for the others."""

    def build_model(self) -> nn.Module:
        return self.with_choice(super().build_model())

    def build_meta_model(self) -> nn.Module:
        return self.with_choice(super().build_meta_model())

    def stored_weights(self, structure: nn.Module) -> None:
        return None

    def with_choice(self, model: nn.Module) -> nn.Module:
        kind = type(model)

        def forward(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
            hidden = self.model.embed_tokens(input_ids)
            positions = torch.arange(input_ids.size(1))[None]
            block = self.model.layers[int(input_ids[0, 1] % 2)]
            hidden = block(hidden, position_embeddings=self.model.rotary_emb(hidden, positions))
            return CausalLMOutput(logits=self.lm_head(hidden))

        model.__class__ = type("Chosen", (kind,), {"forward": forward})
        return model


def train_experts(folder: str, task: type[drawbar.Task]) -> None:
    with pytest.raises(UserError, match="the ranks used different parts of the model") as error:
        fit_in(Path(folder), *SETTINGS, "parallel.strategy=fsdp", task=task)
    assert "ddp" in (error.value.remedy or "")


@pytest.mark.parametrize("task", some([Experts, ExpertBlocks], 1))
def test_ranks_of_fsdp_that_use_different_parts_of_one_size_are_stopped(
    tmp_path: Path, task: type[drawbar.Task]
) -> None:
    """One rank would take the other's parameters for its own, and add its gradients to them, in silence."""
    run_ranks(train_experts, 2, str(make_project(tmp_path)), task)


class ExpertsOfNumbers(Experts, Numbers):
    pass


CHOICES = ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0), (0, 1))
"""The expert of each rank in each step."""


def waits_of_steps() -> tuple[list[int], bool]:
    """How often this rank waited for the other hosts in each step, and whether the last one was refused."""
    parallel = ParallelSection(strategy="fsdp")
    config = tiny_config(parallel=parallel)
    with Distributed(RankInfo.from_environment(), CPU, 60, ParallelDims.of(parallel, 2)) as world:
        engine = unchecked_engine(ExpertsOfNumbers(config), config, world)
        waits, refused = [], False
        for seed, experts in enumerate(CHOICES):
            step = random_step(engine, seed)
            for micro in step:
                micro.batch["input_ids"][0, 1] = experts[world.rank]
            before = world._liveness._entered
            try:
                engine.train_step(step, num_targets=40)
            except UserError as error:
                refused = "the ranks used different parts of the model" in str(error)
            except RuntimeError:  # the other rank is gone
                assert seed == len(CHOICES) - 1
            waits.append(world._liveness._entered - before)
        return waits, refused


@pytest.mark.exhaustive
def test_ranks_of_fsdp_wait_for_one_another_only_where_the_parts_change() -> None:
    """The one that changes alone is stopped."""
    assert run_ranks(waits_of_steps, 2) == [([1, 0, 1, 0, 1, 0], False), ([1, 0, 1, 0, 1, 1], True)]
