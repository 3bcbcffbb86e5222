"""The engine's state: whatever is saved goes on exactly, and what does not belong is refused."""

import copy
import logging

import pytest
import torch

from drawbar.config.schema.run_config import OptimSection, TrainSection
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.errors import UserError
from tiny import random_step, tiny_config, tiny_engine, vector

OPTIMIZERS = {
    "adamw": OptimSection(name="adamw", lr=0.01, warmup=3),
    "sgd": OptimSection(name="sgd", lr=0.1, momentum=0.9, warmup=3),
    "sgd without momentum": OptimSection(name="sgd", lr=0.1, warmup=3),
    "adafactor": OptimSection(name="adafactor", lr=0.01, warmup=3),
    "muon": OptimSection(name="muon", lr=0.01, warmup=3),
}


def train(engine: Engine, first: int, last: int) -> list[tuple[float, float, float]]:
    """Steps ``first`` to ``last``, each with its own data; loss, gradient norm and learning rate of each."""
    results = [engine.train_step(random_step(engine, seed=number)) for number in range(first, last + 1)]
    return [(float(result.loss), float(result.grad_norm), result.lr) for result in results]


def saved(engine: Engine) -> EngineState:
    return copy.deepcopy(engine.state())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_goes_on_bit_by_bit(name: str, tied: bool) -> None:
    train_section = TrainSection(gradient_clip=0.5)
    config = tiny_config(fields={"tie_word_embeddings": tied}, optim=OPTIMIZERS[name], train=train_section)
    straight = tiny_engine(config)
    train(straight, 1, 3)
    state = saved(straight)
    expected = train(straight, 4, 6)

    resumed = tiny_engine(config, seed=1)
    train(resumed, 7, 7)  # whatever it did before is forgotten
    resumed.load(state)
    again = resumed.state()
    assert again.values == state.values
    for loaded, original in ((again.model, state.model), (again.optimizer, state.optimizer)):
        assert loaded.keys() == original.keys()
        assert all(torch.equal(loaded[key], original[key]) for key in original)
    assert train(resumed, 4, 6) == expected
    assert torch.equal(vector(resumed), vector(straight))
    if tied:
        assert resumed.module.lm_head.weight is resumed.module.model.embed_tokens.weight


def test_a_state_from_before_the_first_step_loads() -> None:
    config = tiny_config()
    fresh, other = tiny_engine(config), tiny_engine(config, seed=1)
    other.load(saved(fresh))
    assert train(other, 1, 2) == train(fresh, 1, 2)


def test_weights_alone_leave_the_optimizer_as_it_was() -> None:
    config = tiny_config()
    source, target = tiny_engine(config), tiny_engine(config, seed=1)
    train(source, 1, 2)
    target.load_model(saved(source).model)
    assert torch.equal(vector(target), vector(source))
    assert target.step == 0
    assert not target.state().optimizer


def test_the_state_of_another_optimizer_is_refused() -> None:
    engine = tiny_engine(tiny_config(optim=OPTIMIZERS["adamw"]))
    before = vector(engine)
    with pytest.raises(UserError, match=r"that of sgd, not of adamw[\s\S]*optim.name[\s\S]*--fork"):
        engine.load(tiny_engine(tiny_config(optim=OPTIMIZERS["sgd"])).state())
    assert torch.equal(vector(engine), before)


@pytest.mark.parametrize("fields", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_the_state_of_another_model_is_refused(fields: dict[str, int]) -> None:
    engine = tiny_engine(tiny_config())
    state = tiny_engine(tiny_config(fields=fields)).state()
    for refuse in (lambda: engine.load(state), lambda: engine.load_model(state.model)):
        with pytest.raises(UserError, match=r"does not fit this model[\s\S]*fix:"):
            refuse()


def test_the_state_of_other_trained_parameters_is_refused() -> None:
    engine, other = (tiny_engine(tiny_config()) for _ in range(2))
    train(other, 1, 1)
    state = saved(other)
    momentum = next(iter(state.optimizer.values()))
    state.optimizer["another.weight/momentum_buffer"] = momentum
    with pytest.raises(UserError, match=r"another.weight[\s\S]*fix:"):
        engine.load(state)


def test_a_parameter_without_a_gradient_has_no_state_and_needs_none() -> None:
    engine, other = (tiny_engine(tiny_config()) for _ in range(2))
    for one in (engine, other):
        one.module.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
        one.updater.optimizers[0].add_param_group({"params": [one.module.spare], "param_names": ["spare"]})
    train(other, 1, 1)
    engine.load(saved(other))
    assert not any(name.startswith("spare/") for name in engine.state().optimizer)
    assert engine.state().optimizer.keys() == other.state().optimizer.keys()


def test_another_precision_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(tiny_config(precision="bf16"))
    with caplog.at_level(logging.WARNING, logger="drawbar"):
        engine.load(tiny_engine(tiny_config(precision="fp32")).state())
    assert "precision fp32" in caplog.text
    assert "bf16" in caplog.text


def test_close_frees_the_optimizer() -> None:
    engine = tiny_engine(tiny_config())
    engine.close()
    assert not engine.updater.optimizers
