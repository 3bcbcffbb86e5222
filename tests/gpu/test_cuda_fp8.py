"""Layers that train in fp8 on CUDA: near bf16, the products of the CPU, and compiled as they are not."""

from typing import Any

import pytest
import torch

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.parallel.fp8 import LEAST_CAPABILITY
from programs import need_library
from tiny import random_step, tiny_config, tiny_engine, tiny_task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "attention_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "fsdp": {"strategy": "fsdp"},
    "selective recomputation": {"strategy": "single", "activation_checkpointing": "selective"},
    "compile": {"strategy": "single", "compile": True},
    "compile and fsdp": {"strategy": "fsdp", "compile": True, "activation_checkpointing": "selective"},
}


def losses(fp8: str | None, device: str, **parallel: Any) -> list[float]:
    """Of steps whose micro-batches have any number of tokens."""
    section = ParallelSection(fp8=fp8, **parallel)
    config = tiny_config("llama", SIZES, precision="bf16", device=device, parallel=section)
    torch.manual_seed(0)
    with Distributed(RankInfo(), torch.device(device), 120, ParallelDims.of(section, 1)) as world:
        on_gpu = device == "cuda"  # the CPU is refused
        engine = build_engine(tiny_task(config), config, world) if on_gpu else tiny_engine(config, world)
        found = [float(engine.train_step(random_step(engine, seed=seed)).loss) for seed in range(3)]
        engine.close()
    return found


@pytest.fixture(params=["tensorwise", "rowwise"])
def recipe(request: pytest.FixtureRequest) -> str:
    need_library("torchao", "fp8")
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY[request.param]:
        pytest.skip(f"no {request.param} fp8 on this GPU")
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_losses_are_near_those_of_bf16(recipe: str, name: str) -> None:
    wanted = losses(None, "cuda", strategy="single")
    found = losses(recipe, "cuda", **CASES[name])
    assert found == pytest.approx(wanted, rel=0.03)
    assert found[0] != wanted[0]


def test_the_first_loss_is_that_of_the_cpu(recipe: str) -> None:
    on_cpu, on_gpu = (losses(recipe, device, strategy="single") for device in ("cpu", "cuda"))
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=0.01)
