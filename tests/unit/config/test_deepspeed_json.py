"""The JSON that DeepSpeed gets: what it says for each setting, and that DeepSpeed itself accepts it."""

from typing import Any

import pytest
import torch

from drawbar.config.io.load_config import load_config
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.deepspeed.config_json import check_start, deepspeed_json
from drawbar.deepspeed.settings import (
    is_deepspeed,
    offload_optimizer,
    offload_parameters,
    zero_stage,
)
from drawbar.deepspeed.state import import_deepspeed
from drawbar.errors import UserError
from drawbar.parallel.precision import LossScaler


def config_of(*settings: str) -> RunConfig:
    return load_config(None, ["device=cpu", *settings]).config


def values_of(*settings: str, ranks: int = 1, precision: str = "fp32") -> dict[str, Any]:
    return deepspeed_json(config_of(*settings), ranks, precision).values


@pytest.mark.parametrize(
    ("settings", "stage", "optimizer", "parameters"),
    [
        (["parallel.strategy=deepspeed"], 2, "none", "none"),
        (["deepspeed={}"], 2, "none", "none"),
        (["deepspeed={}", "parallel.pipeline=2"], 1, "none", "none"),
        (["deepspeed={}", "parallel.pipeline=2", "parallel.zero_stage=0"], 0, "none", "none"),
        (["deepspeed={}", "parallel.offload=true"], 2, "cpu", "none"),
        (["deepspeed={}", "parallel.offload=true", "parallel.zero_stage=3"], 3, "cpu", "cpu"),
        (["deepspeed.preset=zero2"], 2, "none", "none"),
        (["deepspeed.preset=zero2_offload"], 2, "cpu", "none"),
        (["deepspeed.preset=zero3"], 3, "none", "none"),
        (["deepspeed.preset=zero3_offload"], 3, "cpu", "cpu"),
        (["deepspeed={preset: zero3_offload, offload_parameters: none}"], 3, "cpu", "none"),
        (["deepspeed={preset: zero3, offload_optimizer: /disk}"], 3, "/disk", "none"),
    ],
)
def test_stage_and_places(settings: list[str], stage: int, optimizer: str, parameters: str) -> None:
    config = config_of(*settings)
    assert is_deepspeed(config)
    assert (zero_stage(config), offload_optimizer(config), offload_parameters(config)) == (stage, optimizer, parameters)
    zero = deepspeed_json(config, 2, "fp32").values["zero_optimization"]
    assert zero["stage"] == stage
    for name, place in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        expected = {"none": None, "cpu": {"device": "cpu"}, "/disk": {"device": "nvme", "nvme_path": "/disk"}}[place]
        assert zero.get(name) == expected


@pytest.mark.parametrize("settings", [[], ["parallel.strategy=ddp"], ["parallel.strategy=ddp", "deepspeed={}"]])
def test_other_runs(settings: list[str]) -> None:
    assert not is_deepspeed(config_of(*settings))
    check_start(load_config(None, [*settings, "train.global_batch=3"]), 2)


def test_another_layout_keeps_the_section_only_where_it_fits() -> None:
    config = config_of("deepspeed.preset=zero3")
    for parallel in (config.parallel, ParallelSection(strategy="deepspeed", compile=True)):
        assert config.with_parallel(parallel).deepspeed == config.deepspeed
    others = [
        {"strategy": "single"},
        {"strategy": "ddp"},
        {"strategy": "deepspeed", "zero_stage": 1},
        {"offload": True},
    ]
    for settings in others:
        changed = config.with_parallel(ParallelSection(**settings))
        assert changed.deepspeed is None
        assert changed.model_copy(update={"parallel": config.parallel, "deepspeed": config.deepspeed}) == config


def test_batches() -> None:
    batch = ["deepspeed={}", "train.global_batch=32", "train.micro_batch=4"]
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

    def batches(*settings: str, ranks: int) -> tuple[Any, ...]:
        values = values_of(*batch, *settings, ranks=ranks)
        return tuple(values.get(name) for name in names)

    assert batches(ranks=1) == (32, 4, 8)
    assert batches(ranks=4) == (32, 4, 2)
    assert batches("train.micro_batch=auto", ranks=2) == (32, 16, 1)
    assert batches("train.micro_batch=auto", "train.micro_batch_tokens=999", ranks=2) == (32, 1, 16)
    assert batches("parallel.pipeline=2", "parallel.tensor=2", ranks=4) == (32, 4, 8)
    # DeepSpeed works it out from all ranks, and would refuse any other number
    assert batches("parallel.tensor=2", ranks=4) == (None, 4, 4)


def test_clipping() -> None:
    assert values_of("deepspeed={}")["gradient_clipping"] == 1.0
    assert values_of("deepspeed={}", "train.gradient_clip=null")["gradient_clipping"] == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.zero_stage=0"],
        ["parallel.zero_stage=1"],
        ["deepspeed.preset=zero2"],
        ["deepspeed.preset=zero2_offload"],
        ["deepspeed.preset=zero3"],
        ["deepspeed={preset: zero3_offload, offload_parameters: /disk}"],
        ["parallel.tensor=2"],
    ],
)
def test_deepspeed_accepts_it(settings: list[str], precision: str) -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.config import DeepSpeedConfig

    values = values_of("parallel.strategy=deepspeed", *settings, ranks=2, precision=precision)
    values.pop("train_batch_size", None)  # without a process group DeepSpeed counts one rank
    found = DeepSpeedConfig(values)
    assert found.zero_config.stage == values["zero_optimization"]["stage"]
    assert found.optimizer_name is None
    assert found.scheduler_name is None
    assert found.gradient_clipping == 1.0
    by_autocast = precision == "bf16" and settings == ["parallel.zero_stage=0"]
    assert found.bfloat16_config.enabled == (precision == "bf16" and not by_autocast)
    assert found.float16_config.enabled == (precision == "fp16")
    assert (found.torch_autocast_enabled, found.torch_autocast_dtype) == (
        (True, torch.bfloat16) if by_autocast else (False, None)
    )
    if precision != "fp32" and not by_autocast:
        assert found.communication_data_type == torch.float32
        # DeepSpeed refuses it for stage 0, which adds up in the gradients' own format
        assert found.grad_accum_dtype == (None if settings == ["parallel.zero_stage=0"] else "fp32")


def test_fp16_scales_as_every_strategy_does() -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.precision_config import get_float16_config

    found = get_float16_config(values_of("deepspeed={}", precision="fp16"))
    assert found.loss_scale == 0  # dynamic
    assert found.initial_dynamic_scale() == LossScaler("fp16").scale
    assert found.loss_scale_window == LossScaler.GROWTH_INTERVAL
    assert found.hysteresis == 1  # halved at each overflow


def test_processes_that_do_not_fit() -> None:
    loaded = load_config(None, ["deepspeed={}", "parallel.tensor=2", "device=cpu"])
    with pytest.raises(UserError, match="3 processes cannot hold models of 2 ranks each"):
        check_start(loaded, 3)
    with pytest.raises(UserError, match=r"train\.global_batch=32 cannot be split evenly over 3"):
        check_start(load_config(None, ["deepspeed={}"]), 3)
