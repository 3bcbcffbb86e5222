"""Training on one CUDA device: the numbers of the CPU, the dtypes, and an exact resume."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conftest import make_project
from drawbar.config.schema.run_config import OptimSection, TrainSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.parallel.ddp import gradient_sync, replicate
from drawbar.parallel.precision import choose_precision
from drawbar.runtime.seed import rng_state, seed_everything, set_rng_state, use_deterministic_kernels
from harness import run_cli, run_ranks
from runs import losses, weights
from tiny import CPU, random_batch, random_step, tiny_config, tiny_engine, vector

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def engine_on(device: torch.device, family: str = "llama", **sections: Any) -> Engine:
    return tiny_engine(tiny_config(family, **sections), Distributed(RankInfo(), device, timeout=60))


def trace(engine: Engine, steps: int = 15) -> torch.Tensor:
    """The losses of steps on one batch, so that they fall."""
    return torch.tensor([float(engine.train_step(random_step(engine, seed=1)).loss) for _ in range(steps)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_fp32_gives_the_losses_of_the_cpu(family: str, name: str) -> None:
    """Sums in another order differ by 1e-6 in a step; 15 steps of training let that grow, to less than 1e-4.

    AdamW's eps is large, because with a small one its first update is the sign of the gradient: rounding decides it
    where the gradient is zero. Muon orthogonalizes in bf16, so its updates differ by more: 1e-2.
    """
    eps = {} if name == "sgd" else {"eps": 0.01}
    optim = OptimSection(name=name, lr=0.02, schedule="constant", **eps)
    found, expected = (trace(engine_on(device, family, optim=optim)) for device in (CUDA, CPU))
    assert found[-1] < found[0] - 0.1
    torch.testing.assert_close(found, expected, rtol=1e-2 if name == "muon" else 1e-4, atol=0)


def test_the_gradient_norm_and_the_clipped_update_are_those_of_the_cpu() -> None:
    optim = OptimSection(name="sgd", lr=1.0, weight_decay=0.0, schedule="constant")
    results = []
    for device in (CUDA, CPU):
        engine = engine_on(device, optim=optim, train=TrainSection(gradient_clip=0.125))
        before = vector(engine)
        result = engine.train_step(random_step(engine, seed=1, micro_batches=4))
        results.append((float(result.grad_norm), vector(engine) - before))
    (norm, moved), (expected_norm, expected_moved) = results
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert (moved - expected_moved).norm() <= 1e-4 * expected_moved.norm()


def test_bf16_is_close_to_fp32() -> None:
    """bf16 has 8 bits: 0.4% in each product, 2% in the loss."""
    found, expected = trace(engine_on(CUDA, precision="bf16")), trace(engine_on(CPU))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_auto_precision_is_bf16_where_there_is_bf16() -> None:
    expected = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    assert choose_precision("auto", CUDA) == expected
    assert engine_on(CUDA, precision="auto").config.precision == expected


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_fp16_trains_and_leaves_out_an_overflow(name: str) -> None:
    engine = engine_on(CUDA, precision="fp16", optim=OptimSection(name=name, lr=0.02, schedule="constant"))
    found = trace(engine)
    assert found[-1] < found[0] - 0.1
    state = copy.deepcopy(engine.state())
    state.values["scaler"]["scale"] = 2.0**100
    engine.load(state)
    before = vector(engine)
    assert engine.train_step(random_step(engine, seed=1)).skipped
    assert torch.equal(vector(engine), before)
    assert engine.state().values["scaler"]["scale"] == 2.0**99


def test_adamw_is_fused_and_everything_is_on_the_device() -> None:
    engine = engine_on(CUDA)
    (optimizer,) = engine.updater.optimizers  # type: ignore[attr-defined]
    assert optimizer.defaults["fused"] is True
    result = engine.train_step(random_step(engine, seed=1))
    assert result.loss.device == result.grad_norm.device == CUDA
    assert {parameter.device for parameter in engine.module.parameters()} == {CUDA}
    moments = [value for name, value in engine.state().optimizer.items() if name.endswith("exp_avg")]
    assert moments
    assert {moment.device for moment in moments} == {CUDA}


def test_evaluation_gives_the_loss_of_the_cpu() -> None:
    found, expected = (engine.eval_step(random_batch(engine.task, 4, 1)) for engine in map(engine_on, (CUDA, CPU)))
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert found.num_targets == expected.num_targets


def written(engine: Engine, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    with engine.inference() as model:
        return model.generate(**{name: tensor.to(engine.world.device) for name, tensor in inputs.items()}, **options)


def test_greedy_generation_gives_the_tokens_of_the_cpu() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found, expected = (written(engine_on(device), inputs, **options) for device in (CUDA, CPU))
    assert found.device == CUDA
    assert torch.equal(found.cpu(), expected)


def test_the_state_of_the_devices_generator_comes_back() -> None:
    seed_everything(7)
    torch.randn(3, device=CUDA)
    state = rng_state(CUDA)
    expected = torch.randn(5, device=CUDA)
    set_rng_state(state, CUDA)
    assert torch.equal(torch.randn(5, device=CUDA), expected)


def resume_with_dropout() -> list[bool]:
    """In a process of its own: deterministic kernels must be chosen before the first of them runs."""
    use_deterministic_kernels()
    same = []
    for precision in ("fp32", "bf16", "fp16"):
        config = tiny_config("gpt2", DROPOUT, precision=precision)
        world = Distributed(RankInfo(), CUDA, timeout=60)
        straight, resumed = tiny_engine(config, world), tiny_engine(config, world, seed=1)
        seed_everything(3)
        train(straight, 1, 3)
        generators, state = rng_state(CUDA), on_host(straight.state())
        expected = train(straight, 4, 6)
        resumed.load(state)
        set_rng_state(generators, CUDA)
        same.append(train(resumed, 4, 6) == expected and torch.equal(vector(resumed), vector(straight)))
    return same


def train(engine: Engine, first: int, last: int) -> list[float]:
    return [float(engine.train_step(random_step(engine, seed=number)).loss) for number in range(first, last + 1)]


def on_host(state: EngineState) -> EngineState:
    """As a checkpoint holds it."""
    model, optimizer = (
        {name: t.detach().cpu().clone() for name, t in d.items()} for d in (state.model, state.optimizer)
    )
    return EngineState(model, optimizer, copy.deepcopy(state.values))


def test_a_loaded_state_goes_on_bit_by_bit() -> None:
    (same,) = run_ranks(resume_with_dropout, 1)
    assert same == [True, True, True]


def test_a_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    command = ("train", "config.yaml", "device=cuda", "precision=bf16", "run.deterministic=true", "checkpoint.every=6")
    whole = run_cli(*command, "run.name=whole", cwd=project)
    assert whole.code == 0, whole.err
    checkpoint = "runs/whole/checkpoints/step-00000006"
    resumed = run_cli(*command, "run.name=resumed", "--resume", checkpoint, cwd=project)
    assert resumed.code == 0, resumed.err
    expected = losses(project / "runs" / "whole")
    assert losses(project / "runs" / "resumed") == {step: expected[step] for step in range(7, 13)}
    theirs, ours = (weights(project / "runs" / name, 12) for name in ("whole", "resumed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_process_of_torchrun_has_the_first_device() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    place = RankInfo.from_environment(environ)
    device = choose_device("auto", place)
    assert device == CUDA
    with Distributed(place, device, timeout=60):
        assert not dist.is_initialized()


def sum_of_squares(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def replicated_and_plain_gradients() -> list[list[float]]:
    """DDP over NCCL, with the one rank that one device has room for."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)
    gradients = []
    for wrap in (True, False):
        torch.manual_seed(0)
        plain = torch.nn.Linear(3, 2).to(CUDA)
        model = replicate(plain, sum_of_squares) if wrap else partial(sum_of_squares, plain)
        for number in range(3):
            with gradient_sync(model, last=number == 2):
                model(torch.full((4, 3), number + 1.0, device=CUDA)).backward()
        assert plain.weight.grad is not None
        gradients.append(plain.weight.grad.flatten().tolist())
    dist.destroy_process_group()
    return gradients


def test_replication_over_nccl() -> None:
    ((replicated, plain),) = run_ranks(replicated_and_plain_gradients, 1)
    assert replicated == pytest.approx(plain, rel=1e-6)
