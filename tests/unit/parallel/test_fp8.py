"""Layers that train in fp8: near bf16, the same under every strategy, and refused where nothing can multiply so."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.errors import ExitCode, UserError
from drawbar.optim.optimizers import undecayed_names
from drawbar.parallel.fp8 import check_fp8, compute_in_fp8
from drawbar.parallel.precision import autocast, parameters_cast_by_autocast
from drawbar.tasks.task_context import TaskContext
from drawbar.train.check import check_saved_state
from harness import run_ranks
from programs import need_library
from tiny import CPU, Numbers, random_step, tiny_config, tiny_engine, tiny_task


def has_row_scales() -> bool:
    """Whether this torch multiplies matrices with a scale for each row on CPUs: since 2.12."""
    one, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(one, one.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


RECIPES = ["tensorwise", "rowwise"][: 1 + has_row_scales()]
STRATEGIES = ["ddp", "zero1", "fsdp"]
SIZES = {"hidden_size": 32, "intermediate_size": 40, "attention_bias": True}
"""40 is no multiple of 16: the layers of the MLP stay as they are."""
STEPS = 3


def need_torchao() -> None:
    need_library("torchao", "fp8")


def configured(fp8: str | None, **parallel: Any) -> RunConfig:
    return tiny_config("llama", SIZES, precision="bf16", parallel=ParallelSection(fp8=fp8, **parallel))


def losses(engine: Engine, *micro_batches: int) -> list[float]:
    """Of steps of those of two micro-batches that have these numbers."""
    steps = ([random_step(engine, seed)[number] for number in micro_batches] for seed in range(STEPS))
    return [float(engine.train_step(step).loss) for step in steps]


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Fp8WhileTraining"}


def test_what_is_converted_keeps_its_parameters() -> None:
    need_torchao()
    model = tiny_engine(configured(None)).module
    before, cast = dict(model.named_parameters()), parameters_cast_by_autocast(model)
    saved, undecayed = list(model.state_dict()), undecayed_names(model)
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").requires_grad = False
    compute_in_fp8(model, "tensorwise")
    attention = {f"model.layers.{n}.self_attn.{name}_proj" for n in range(2) for name in "qkvo"}
    assert converted(model) == attention - {"model.layers.0.self_attn.q_proj"}  # not the MLP, not the head
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(type(parameter) is nn.Parameter for parameter in after.values())
    assert list(model.state_dict()) == saved
    assert parameters_cast_by_autocast(model) == cast  # so FSDP gathers them in bf16
    assert undecayed_names(model) == undecayed


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_near_bf16_and_evaluation_is_bf16(recipe: str) -> None:
    need_torchao()
    plain, fp8 = tiny_engine(configured(None)), tiny_engine(configured(recipe))
    batch = random_step(plain, seed=9)[0].batch
    with torch.no_grad(), autocast("bf16", CPU):
        evaluated = [engine.module.eval()(**batch.inputs).logits for engine in (plain, fp8)]
    assert torch.equal(*evaluated)
    expected, found = (losses(engine, 0, 1) for engine in (plain, fp8))
    assert found == pytest.approx(expected, rel=0.02)
    assert all(one != other for one, other in zip(found, expected, strict=True))


def test_what_is_recomputed_is_what_was_computed() -> None:
    need_torchao()
    expected = losses(tiny_engine(configured(RECIPES[-1])), 0, 1)
    assert losses(tiny_engine(configured(RECIPES[-1], activation_checkpointing="selective")), 0, 1) == expected


@pytest.mark.exhaustive
def test_a_run_goes_on_with_fp8_and_without() -> None:
    need_torchao()
    straight, resumed, without = (tiny_engine(configured(fp8)) for fp8 in (RECIPES[-1], RECIPES[-1], None))
    losses(straight, 0, 1)
    check_saved_state(straight.task, straight)
    state = straight.state()
    saved = EngineState(
        *({k: v.clone() for k, v in part.items()} for part in (state.model, state.optimizer)), state.values
    )
    for engine in (resumed, without):
        engine.load(saved)
    expected = losses(straight, 0, 1)
    assert losses(resumed, 0, 1) == expected
    assert losses(without, 0, 1)[0] == pytest.approx(expected[0], rel=0.02)


def train_under(strategies: list[str]) -> dict[str, list[float]]:
    """Losses of steps of two micro-batches, one on each rank where there are two."""
    info = RankInfo.from_environment()
    found = {}
    for strategy in strategies:
        config = configured("tensorwise", strategy=strategy)
        with Distributed(info, CPU, 60, ParallelDims.of(config.parallel, info.world_size)) as world:
            found[strategy] = losses(tiny_engine(config, world), *([world.rank] if world.size > 1 else [0, 1]))
    return found


@pytest.mark.exhaustive
def test_strategies_give_the_losses_of_one_process() -> None:
    need_torchao()
    expected = train_under(["single"])["single"]
    first, second = run_ranks(train_under, 2, STRATEGIES)
    assert first == second
    for strategy in STRATEGIES:
        assert first[strategy] == pytest.approx(expected, rel=1e-5), strategy


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], torch.device]:
    """A GPU of a compute capability, as far as ``check_fp8`` looks."""

    def of(capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        return torch.device("cuda")

    return of


@pytest.mark.parametrize(("recipe", "capability"), [("tensorwise", (8, 6)), ("rowwise", (8, 9))])
def test_a_gpu_without_fp8(recipe: str, capability: tuple[int, int], gpu: Callable[..., torch.device]) -> None:
    with pytest.raises(UserError) as error:
        check_fp8(recipe, gpu(capability))
    assert error.value.what.endswith(f"or higher, and a GPU has 8.{capability[1]}")
    assert error.value.remedy == "set parallel.fp8=null; tensorwise needs 8.9, and rowwise 9.0"
    assert error.value.exit_code == ExitCode.WRONG_REQUEST


def test_without_torchao(gpu: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"pip install 'drawbar\[fp8\]'"):
        check_fp8("rowwise", gpu((9, 0)))


def test_a_model_without_such_layers() -> None:
    need_torchao()
    with pytest.raises(UserError, match="no trained linear layer in its blocks whose sizes are multiples of 16"):
        tiny_engine(tiny_config("gpt2", parallel=ParallelSection(fp8="rowwise")))  # its layers are Conv1D


def test_a_cpu_uses_the_run_and_does_not_train_it() -> None:
    config = configured("rowwise", strategy="single")
    config = config.model_copy(update={"device": "auto"})
    with pytest.raises(UserError, match=r"device=cpu: fp8 needs NVIDIA GPUs") as error:
        build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, 60))
    assert error.value.exit_code == ExitCode.WRONG_REQUEST
    torch.manual_seed(0)
    used = build_engine(Numbers(TaskContext(config, trains=False)), config, Distributed(RankInfo(), CPU, 60))
    assert not converted(used.module)
