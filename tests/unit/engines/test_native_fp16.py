"""fp16 with a loss scaler: an overflow leaves the update out, everywhere and completely, and the scale survives."""

import copy
from typing import Any

import pytest
import torch

from drawbar.config.schema.run_config import OptimSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.tasks.batch import Batch
from harness import run_ranks
from tiny import CPU, Numbers, random_step, tiny_config, tiny_engine, unchecked_engine, vector

OPTIMIZERS = ["adamw", "sgd", "adafactor", "muon"]


def fp16_engine(name: str = "adamw", **keywords: Any) -> Engine:
    momentum = 0.9 if name == "sgd" else None
    optim = OptimSection(name=name, lr=0.05, momentum=momentum, schedule="constant")
    return tiny_engine(tiny_config(optim=optim, precision="fp16"), **keywords)


def set_scale(engine: Engine, scale: float) -> None:
    """Give the scaler another scale, by the way that a checkpoint takes."""
    state = copy.deepcopy(engine.state())
    state.values["scaler"]["scale"] = scale
    engine.load(state)


def train(engine: Engine, steps: int) -> list[float]:
    return [float(engine.train_step(random_step(engine, seed=1)).loss) for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp16_trains_fp32_weights(name: str) -> None:
    engine = fp16_engine(name)
    losses = train(engine, 15)
    assert losses[-1] < losses[0] - 0.1
    assert all(parameter.dtype == torch.float32 for parameter in engine.module.parameters())


def test_the_gradient_norm_does_not_depend_on_the_scale() -> None:
    """Powers of two scale without rounding, as long as nothing falls out of fp16's range."""
    norms = []
    for scale in (1024.0, 4096.0):
        engine = fp16_engine()
        set_scale(engine, scale)
        norms.append(float(engine.train_step(random_step(engine, seed=1)).grad_norm))
    full = tiny_engine(tiny_config())
    norms.append(float(full.train_step(random_step(full, seed=1)).grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert norms[0] == pytest.approx(norms[2], rel=0.02)


@pytest.mark.parametrize("scale", [2.0**100, float("inf")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_changes_nothing_but_the_scale(name: str, scale: float) -> None:
    engine = fp16_engine(name)
    train(engine, 2)
    set_scale(engine, scale)
    weights, optimizer = vector(engine), copy.deepcopy(engine.state().optimizer)
    assert optimizer
    result = engine.train_step(random_step(engine, seed=1))
    assert result.skipped
    assert torch.isfinite(result.loss)
    assert torch.equal(vector(engine), weights)
    assert all(torch.equal(engine.state().optimizer[key], optimizer[key]) for key in optimizer)
    assert engine.state().values["scaler"]["scale"] == scale / 2
    assert engine.step == 3
    set_scale(engine, 1024.0)
    assert not engine.train_step(random_step(engine, seed=1)).skipped
    assert not torch.equal(vector(engine), weights)


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.0.mlp.up_proj"])
def test_an_overflow_in_one_of_two_optimizers_skips_both(module: str) -> None:
    """muon hands embeddings to AdamW; an update of one half of the model would be worse than none."""
    engine = fp16_engine("muon")
    train(engine, 2)
    weights = vector(engine)
    hook = engine.module.get_submodule(module).weight.register_hook(lambda grad: grad * float("inf"))
    assert engine.train_step(random_step(engine, seed=1)).skipped
    assert torch.equal(vector(engine), weights)
    hook.remove()
    assert not engine.train_step(random_step(engine, seed=1)).skipped


def test_the_scaler_goes_on_after_a_resume() -> None:
    straight = fp16_engine()
    set_scale(straight, 2.0**20)  # so large that it is halved until it fits
    train(straight, 6)
    state = copy.deepcopy(straight.state())
    assert state.values["scaler"]["scale"] < 2.0**20
    assert state.values["scaler"]["_growth_tracker"] > 0
    resumed = fp16_engine(seed=1)
    resumed.load(state)
    assert resumed.state().values == state.values
    assert train(resumed, 3) == train(straight, 3)
    assert resumed.state().values == straight.state().values
    assert torch.equal(vector(resumed), vector(straight))


def test_only_fp16_has_a_scaler() -> None:
    for precision in ("fp32", "bf16"):
        assert tiny_engine(tiny_config(precision=precision)).state().values["scaler"] == {}
    assert fp16_engine().state().values["scaler"]["scale"] > 1


class OverflowOnRankOne(Numbers):
    """The gradients of rank 1 overflow while ``on`` is set; those of rank 0 never do."""

    on = False

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss = super().loss(outputs, batch)
        return loss * 1e30 if self.on and RankInfo.from_environment().rank == 1 else loss


def overflow_on_one_rank() -> dict[str, Any]:
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        config = tiny_config(precision="fp16")
        task = OverflowOnRankOne(config)
        torch.manual_seed(world.rank)  # weights come from rank 0
        engine = unchecked_engine(task, config, world, total_steps=10)
        found: dict[str, Any] = {"skipped": [], "weights": [], "scales": []}
        for number, on in enumerate((False, True, False)):
            task.on = on
            result = engine.train_step(random_step(engine, seed=10 * world.rank + number))
            found["skipped"].append(result.skipped)
            found["weights"].append(vector(engine).numpy())
            found["scales"].append(engine.state().values["scaler"]["scale"])
        return found


def test_an_overflow_on_one_rank_skips_the_update_on_every_rank() -> None:
    first, second = run_ranks(overflow_on_one_rank, 2)
    assert first["skipped"] == second["skipped"] == [False, True, False]
    assert first["scales"] == second["scales"]
    assert first["scales"][1] == first["scales"][0] / 2
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert (one == other).all()
    before, skipped, after = first["weights"]
    assert (skipped == before).all()
    assert (after != skipped).any()
