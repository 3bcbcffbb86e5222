"""A model in stages trains, evaluates and writes as one process does, under every schedule."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForMaskedLM

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import (
    DataSection,
    LoraSection,
    OptimSection,
    ParallelSection,
    RunConfig,
    TrainSection,
)
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.engines.executors import PipelineExecutor
from drawbar.errors import UserError
from drawbar.parallel.pipeline.schedule import Action, Pipeline, _Step
from drawbar.tasks.batch import Batch
from exhaustive import asked, params
from harness import run_ranks
from tiny import CPU, LENGTH, VOCABULARY, Numbers, random_batch, tiny_config, tiny_task, unchecked_engine

PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])
BLOCKS = {"llama": {"num_hidden_layers": 5}, "gpt2": {"n_layer": 5}}
SGD = OptimSection(name="sgd", lr=0.1, momentum=0.9, schedule="constant")
"""For GPT-2: the gradients of its key biases are nothing but rounding, of which AdamW makes whole steps."""
PACKED = DataSection(sequence_length=LENGTH, batching="packed")


@dataclass(frozen=True)
class Case:
    family: str
    parallel: dict[str, Any]
    sections: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    rows: tuple[int, ...] = (2, 1, 3, 1, 2)
    """Of each micro-batch; the last but one is a padding micro-batch."""

    def config(self, parallel: dict[str, Any]) -> RunConfig:
        fields = {**BLOCKS[self.family], "tie_word_embeddings": self.tied}
        return tiny_config(self.family, fields, parallel=ParallelSection(**parallel), **self.sections)

    def build(self, world: Distributed | None) -> Engine:
        torch.manual_seed(0)
        if world is None:
            config = self.config({"strategy": "single"})
            return unchecked_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), 10)
        config = self.config({"strategy": "ddp", **self.parallel})
        return unchecked_engine(tiny_task(config), config, world, 10)

    def step(self, engine: Engine, number: int, rank: int = 0, ranks: int = 1) -> list[MicroBatch]:
        """The part of one of ``ranks``: every so many-th micro-batch."""
        make = packed_batch if self.sections.get("data") == PACKED else random_batch
        padding = len(self.rows) - 2
        micro_batches = [
            MicroBatch(make(engine.task, rows, seed=100 * number + i), is_padding=i == padding)
            for i, rows in enumerate(self.rows)
        ]
        return micro_batches[rank::ranks]


TWO = {
    "gpipe": Case("llama", {"schedule": "gpipe"}),
    "1f1b": Case("llama", {"schedule": "1f1b"}),
    "interleaved": Case("llama", {"schedule": "interleaved"}),
    "untied": Case("llama", {}, tied=False),
    "given cuts": Case("llama", {"cuts": [1, 4]}, {"train": TrainSection(gradient_clip=0.5)}),
    "gpt2": Case("gpt2", {}, {"optim": SGD}),
    "gpt2 interleaved": Case("gpt2", {"schedule": "interleaved"}, {"optim": SGD}, tied=False),
    "packed": Case("llama", {}, {"data": PACKED}),
    "lora": Case("llama", {}, {"lora": LoraSection()}),
    "recomputed": Case("llama", {"activation_checkpointing": "full"}),
    "fp16": Case("llama", {}, {"precision": "fp16"}),
    "few micro-batches": Case("llama", {}, rows=(3, 1)),
}
FOUR = {
    "four stages": Case("llama", {"pipeline": 4}),
    "four stages, two micro-batches": Case("llama", {"pipeline": 4}, rows=(3, 1)),
    "ddp": Case("llama", {"schedule": "interleaved"}, rows=(2, 1, 3, 1)),
    "fsdp": Case("llama", {"strategy": "fsdp"}, rows=(2, 1, 3, 1)),
    "fsdp, reshard": Case("llama", {"strategy": "fsdp", "reshard": True}, rows=(2, 1, 3, 1)),
}


OFTEN = {"1f1b", "interleaved", "untied", "packed", "fp16", "few micro-batches", "four stages", "fsdp"}


def packed_batch(task: Numbers, rows: int, seed: int) -> Batch:
    """Rows of three documents with padding behind them."""
    chance = np.random.default_rng(seed)
    length = 12 + seed % 5
    ids_RL = torch.from_numpy(chance.integers(VOCABULARY, size=(rows, length)))
    segments_RL = torch.tensor([0] * 5 + [1] * 4 + [2] * (length - 11) + [-1] * 2).repeat(rows, 1)
    begins_RL = segments_RL != segments_RL.roll(1, dims=1)
    labels_RL = ids_RL.masked_fill(begins_RL | (segments_RL < 0), -100)
    return Batch({"input_ids": ids_RL, "labels": labels_RL, "segment_ids": segments_RL}, ids=list(range(3 * rows)))


def train(case: Case, engine: Engine, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Three steps, an evaluation and some text: what the engine says of them, in plain numbers."""
    gradients: dict[str, torch.Tensor] = {}
    hook = engine.updater.optimizers[0].register_step_pre_hook(lambda *_: gradients.update(engine.gradients()))
    whole, received = count_whole_gradients(engine), count_received()
    results = []
    for number in range(3):
        results.append(engine.train_step(case.step(engine, number, rank, ranks)))
        hook.remove()
    evaluated = engine.eval_step(random_batch(engine.task, 3, seed=77))
    inputs = {"input_ids": PROMPTS, "attention_mask": torch.ones_like(PROMPTS)}
    length = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    with engine.inference() as model:
        greedy = model.generate(**inputs, do_sample=False, **length)
        beams = model.generate(**inputs, do_sample=False, num_beams=3, **length)
    torch.manual_seed(engine.world.dims.coordinates(engine.world.rank)["pp"])  # each stage has its own random numbers
    with engine.inference() as model:
        sampled = model.generate(**inputs, do_sample=True, **length)
    state = engine.state()
    return {
        "losses": [float(result.loss) for result in results],
        "norms": [float(result.grad_norm) for result in results],
        "skipped": [result.skipped for result in results],
        "whole gradients": max(whole, default=0),
        "received": max(received, default=0),
        "evaluated": (engine.world.dp_ranks.sum_of_leaders(float(evaluated.loss)) / ranks, evaluated.num_targets),
        "texts": [text.tolist() for text in (greedy, beams, sampled)],
        "gradients": {name: tensor.numpy() for name, tensor in gradients.items()},
        "model": {name: tensor.numpy() for name, tensor in state.model.items()},
        "optimizer": {name: tensor.numpy() for name, tensor in state.optimizer.items()},
    }


def count_whole_gradients(engine: Engine) -> list[int]:
    """FSDP: of how many parameters a rank has the whole gradient, after each backward from here on."""
    found: list[int] = []
    if isinstance(engine.executor, PipelineExecutor) and engine.config.parallel.features.shards_parameters:
        units = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
        states = [unit._get_fsdp_state() for unit in units]
        several = "_fsdp_param_groups"  # torch 2.11 has one for each unit
        groups = [group for s in states for group in getattr(s, several, None) or [s._fsdp_param_group] if group]
        backward = Pipeline._backward

        def counted(self: Pipeline, *args: Any) -> None:
            backward(self, *args)
            found.append(sum(p._unsharded_param.grad is not None for g in groups for p in g.fsdp_params))

        Pipeline._backward = counted
    return found


def count_received() -> list[int]:
    """How many received tensors a stage holds whenever it has received another, from here on."""
    found: list[int] = []
    receive = Pipeline._receive

    def counted(self: Pipeline, step: _Step, action: Action) -> torch.Tensor:
        waiting = [received for received, _ in step.graphs.values() if received is not None]
        found.append(len(waiting) + len(step.messages) + 1)
        return receive(self, step, action)

    Pipeline._receive = counted
    return found


def layout_of(case: Case) -> ParallelDims:
    return ParallelDims.of(ParallelSection(**{"pipeline": 2, **case.parallel}), RankInfo.from_environment().world_size)


def train_all(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    results = {}
    for name, case in cases.items():
        case = Case(case.family, {"pipeline": 2, **case.parallel}, case.sections, case.tied, case.rows)
        with Distributed(RankInfo.from_environment(), CPU, timeout=60, dims=layout_of(case)) as world:
            results[name] = train(case, case.build(world), world.dp_ranks.rank, world.dp_ranks.size)
    return results


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What every rank found, by case."""
    names = asked(request, "name")
    merged: dict[str, list[dict[str, Any]]] = {}
    for ranks, known in ((2, TWO), (4, FOUR)):
        cases = {name: case for name, case in known.items() if name in names}
        results = run_ranks(train_all, ranks, cases)
        merged |= {name: [result[name] for result in results] for name in cases}
    return merged


def check_alike(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert np.linalg.norm(found[name] - array) <= 1e-4 * np.linalg.norm(array), name


@pytest.mark.parametrize("name", params([*TWO, *FOUR], OFTEN))
def test_a_pipeline_is_one_process(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = {**TWO, **FOUR}[name]
    wanted = train(case, case.build(None))
    assert min(wanted["norms"]) > 0.1
    for rank, result in enumerate(found[name]):
        assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        assert result["skipped"] == wanted["skipped"]
        assert result["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
        assert result["texts"] == wanted["texts"], rank
    if case.parallel.get("schedule", "1f1b") == "1f1b":
        assert all(result["received"] <= len(found[name]) for result in found[name])
    first, *others = found[name]
    assert (first["whole gradients"] > 0) == (name == "fsdp")
    assert set(first["gradients"]) == set(wanted["gradients"])
    check_alike({key: first["gradients"][key] for key in wanted["gradients"]}, wanted["gradients"])
    check_alike(first["model"], wanted["model"])
    assert set(first["optimizer"]) == set(wanted["optimizer"])
    assert not any(other[key] for other in others for key in ("gradients", "model", "optimizer"))


def resume_all() -> list[Any]:
    """From a checkpoint of one process to a pipeline; then an fp16 step that overflows, and weights that do not fit."""
    case = Case("llama", {"pipeline": 2, "schedule": "interleaved"}, {"precision": "fp16"})
    with Distributed(RankInfo.from_environment(), CPU, timeout=60, dims=ParallelDims(pp=2)) as world:
        one, other = case.build(None), case.build(world)
        one.train_step(case.step(one, 0))
        other.load(one.state())
        norms = [float(engine.train_step(case.step(engine, 1)).grad_norm) for engine in (one, other)]
        own = other.state()
        state = world.from_rank0(lambda: own, "a test")
        state.values["scaler"] = {"scale": 2.0**100, "_growth_tracker": 0}
        other.load(state)
        skipped = other.train_step(case.step(other, 2)).skipped
        after = other.state()
        same = all(torch.equal(tensor, state.model[name]) for name, tensor in after.model.items())
        refused = ""
        try:
            other.load_model({name: tensor for name, tensor in state.model.items() if "layers.4" not in name})
        except UserError as error:
            refused = str(error)
        return [norms, skipped, same, after.values["scaler"]["scale"], refused]


@pytest.mark.exhaustive
def test_a_pipeline_goes_on_from_any_checkpoint_and_skips_an_overflow_on_every_rank() -> None:
    for norms, skipped, same, scale, refused in run_ranks(resume_all, 2):
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
        assert skipped
        assert same
        assert scale == 2.0**99
        assert "model.layers.4.self_attn.q_proj.weight is missing" in refused


class OwnLoss(Numbers):
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(**batch)


class Silent(Numbers):
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return None


class Masked(Numbers):
    def build_model(self) -> nn.Module:
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", hidden_size=16, num_attention_heads=4))

    build_meta_model = build_model


def refuse_all() -> list[str]:
    refusals = []
    frozen = {"lora": LoraSection(modules=["layers.4.self_attn.q_proj"])}
    with Distributed(RankInfo.from_environment(), CPU, timeout=60, dims=ParallelDims(pp=2)) as world:
        for task_type, sections in ((Masked, {}), (Numbers, frozen), (OwnLoss, {}), (Silent, {})):
            config = Case("llama", {}, sections).config({"strategy": "ddp", "pipeline": 2})
            task = task_type(config)
            try:
                engine = unchecked_engine(task, config, world, 10)
                engine.train_step([MicroBatch(random_batch(task, 2, seed=1))])
            except UserError as error:
                refusals.append(str(error))
        with pytest.raises(UserError) as refusal:
            engine.executor.pipeline_inference.replay_outputs(
                lambda model: (model(PROMPTS), model(PROMPTS)), torch.zeros(2, 3, VOCABULARY)
            )
        refusals.append(str(refusal.value))
    return refusals


def test_what_a_pipeline_cannot_do_is_refused_with_the_reason() -> None:
    for refusals in run_ranks(refuse_all, 2):
        assert "bert cannot be cut into stages" in refusals[0]
        assert "one has no trained parameters" in refusals[1]
        assert "passes labels to the model" in refusals[2]
        assert "does not call the model" in refusals[3]
        assert "calls the model more than once" in refusals[4]
