"""One step of the native engine: clipping, learning rate, dtypes, and what evaluation leaves behind."""

import copy

import pytest
import torch
from torch import nn

from drawbar.config.schema.run_config import OptimSection, TrainSection
from drawbar.data.loader import MicroBatch
from drawbar.engines.engine import Engine
from drawbar.optim import optimizers
from drawbar.optim.schedules import learning_rate_scale
from drawbar.parallel.precision import choose_precision
from drawbar.runtime.seed import rng_state
from drawbar.train.checkpoint_layouts import checkpoint_bytes
from tiny import CPU, random_batch, random_step, tiny_config, tiny_engine, vector

PLAIN_SGD = OptimSection(name="sgd", lr=1.0, weight_decay=0.0, schedule="constant")
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def change(engine: Engine, step: list[MicroBatch]) -> tuple[float, float]:
    """The norm of the change of all weights, and the gradient norm that the engine reports."""
    before = vector(engine)
    result = engine.train_step(step)
    return float((vector(engine) - before).norm()), float(result.grad_norm)


def test_the_update_of_four_micro_batches_is_clipped_once() -> None:
    engine = tiny_engine(tiny_config(optim=PLAIN_SGD, train=TrainSection(gradient_clip=0.125)))
    moved, norm = change(engine, random_step(engine, seed=1, micro_batches=4))
    assert norm > 0.25  # reported before clipping
    # 1e-5: weights of size 20 are stored with an error of 1e-6, beside a change of 0.125
    assert moved == pytest.approx(0.125, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 1e6])
def test_a_small_gradient_is_not_clipped(limit: float | None) -> None:
    engine = tiny_engine(tiny_config(optim=PLAIN_SGD, train=TrainSection(gradient_clip=limit)))
    moved, norm = change(engine, random_step(engine, seed=1, micro_batches=4))
    assert moved == pytest.approx(norm, rel=1e-5)


def test_a_loss_may_be_a_list_of_one_number() -> None:
    whole, listed = (tiny_engine(tiny_config()) for _ in range(2))
    loss = listed.task.loss
    listed.task.loss = lambda outputs, batch: loss(outputs, batch)[None]  # type: ignore[method-assign]
    step = random_step(whole, seed=1)
    assert listed.train_step(step).loss.tolist() == whole.train_step(step).loss.tolist()
    assert listed.eval_step(step[0].batch) == whole.eval_step(step[0].batch)


def test_gradients_do_not_outlive_their_step() -> None:
    engine = tiny_engine(tiny_config())
    engine.train_step(random_step(engine, seed=1))
    assert all(parameter.grad is None for parameter in engine.module.parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    optim = OptimSection(name=name, lr=0.05, schedule="constant")
    engine = tiny_engine(tiny_config(optim=optim))
    step = random_step(engine, seed=1)
    losses = [float(engine.train_step(step).loss) for _ in range(15)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_the_learning_rate_follows_the_schedule(name: str) -> None:
    optim = OptimSection(name=name, lr=0.5, weight_decay=0.0, schedule="linear", warmup=2)
    engine = tiny_engine(tiny_config(optim=optim), total_steps=6)
    rates = []
    for number in range(6):
        result = engine.train_step(random_step(engine, seed=number))
        rates.append(result.lr)
        assert {group["lr"] for o in engine.updater.optimizers for group in o.param_groups} == {result.lr}
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.375, 0.25, 0.125])
    assert rates == [0.5 * learning_rate_scale(number, 6, optim) for number in range(6)]


def test_the_first_step_of_a_warm_up_changes_nothing_and_the_second_does() -> None:
    optim = OptimSection(name="sgd", lr=1.0, weight_decay=0.0, schedule="constant", warmup=2)
    engine = tiny_engine(tiny_config(optim=optim))
    assert change(engine, random_step(engine, seed=1))[0] == 0
    moved, norm = change(engine, random_step(engine, seed=2))
    assert moved == pytest.approx(0.5 * norm, rel=1e-5)


def test_bf16_trains_fp32_weights() -> None:
    """Autocast rounds to 8 bits (0.4%) a few times in a row: the losses are near those of fp32, and not equal."""
    engines = [tiny_engine(tiny_config(precision=name)) for name in ("fp32", "bf16")]
    step = random_step(engines[0], seed=1)
    traces = [torch.tensor([float(engine.train_step(step).loss) for _ in range(15)]) for engine in engines]
    assert not torch.equal(*traces)
    torch.testing.assert_close(traces[1], traces[0], rtol=0.02, atol=0)
    assert traces[1][-1] < traces[1][0] - 0.5
    assert all(parameter.dtype == torch.float32 for parameter in engines[1].module.parameters())


def test_auto_precision_is_what_the_hardware_says() -> None:
    engine = tiny_engine(tiny_config(precision="auto"))
    assert engine.config.precision == choose_precision("auto", CPU)
    assert engine.state().values["precision"] == engine.config.precision


def test_a_padding_micro_batch_adds_nothing() -> None:
    alone, with_padding = (tiny_engine(tiny_config(optim=PLAIN_SGD)) for _ in range(2))
    step = random_step(alone, seed=1, micro_batches=1)
    padding = MicroBatch(random_batch(alone.task, rows=3, seed=99), is_padding=True)
    expected, found = alone.train_step(step), with_padding.train_step([*step, padding])
    assert (found.loss, found.grad_norm, found.num_targets) == (expected.loss, expected.grad_norm, expected.num_targets)
    assert torch.equal(vector(with_padding), vector(alone))


def test_eval_step_is_the_plain_sum_without_dropout() -> None:
    engine = tiny_engine(tiny_config("gpt2", DROPOUT))
    batch = random_batch(engine.task, rows=3, seed=1)
    before = vector(engine)
    found = engine.eval_step(batch)
    assert found == engine.eval_step(batch)
    assert found.num_targets == engine.task.num_targets(batch)
    assert found.predictions is None
    plain = copy.deepcopy(engine.module).eval()
    logits = plain(batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(vector(engine), before)


def test_evaluation_and_generation_do_not_show_in_training() -> None:
    """Neither the generators nor the mode (dropout) nor the gradients of training notice them."""
    traces = []
    for looks in (False, True):
        engine = tiny_engine(tiny_config("gpt2", DROPOUT))
        torch.manual_seed(5)
        results = []
        for number in range(3):
            if looks:
                look(engine)
            results.append(float(engine.train_step(random_step(engine, seed=number)).loss))
        traces.append((results, vector(engine)))
    (losses, weights), (other_losses, other_weights) = traces
    assert losses == other_losses
    assert torch.equal(weights, other_weights)


def look(engine: Engine) -> None:
    """Evaluate and generate, and check that no generator moved."""
    before = rng_state(CPU)
    engine.eval_step(random_batch(engine.task, rows=2, seed=7))
    with engine.inference() as model:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    after = rng_state(CPU)
    assert all(torch.equal(after[name], before[name]) or name == "python_gauss" for name in before)


def test_greedy_generation_is_the_most_likely_token_each_time() -> None:
    engine = tiny_engine(tiny_config("gpt2", DROPOUT))
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with engine.inference() as model:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model = copy.deepcopy(engine.module).eval()
    for _ in range(4):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_the_size_of_a_checkpoint_is_about_right(state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "MIN_LOW_ELEMENTS", 1)
    engine = tiny_engine(tiny_config(optim=OptimSection(state_dtype=state_dtype)))
    engine.train_step(random_step(engine, seed=1))
    state = engine.state()
    size = sum(tensor.nbytes for tensor in [*state.model.values(), *state.optimizer.values()])
    assert checkpoint_bytes(engine) == pytest.approx(size, rel=0.05)
