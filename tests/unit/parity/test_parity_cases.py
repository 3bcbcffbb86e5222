"""Which strategies `drawbar parity` compares, and how they are written."""

from typing import Any

import pytest

from drawbar.config.rules.parallel_rules import PARALLEL
from drawbar.config.rules.rule_table import check_degrees
from drawbar.config.schema.run_config import (
    DataSection,
    EveryKthBlock,
    LaunchSection,
    OptimSection,
    ParallelSection,
    RunConfig,
    TrainSection,
)
from drawbar.config.schema.task_sections import MaskedLMConfig
from drawbar.deepspeed.rules import RULES as DEEPSPEED
from drawbar.deepspeed.settings import DeepSpeedSection
from drawbar.errors import UserError
from drawbar.parity.cases import deepspeed_cases, default_cases, parallel_cases, parse_cases

CONFIG = RunConfig(device="cpu", train=TrainSection(global_batch=8, steps=10))


def names(config: RunConfig, ranks: int, precision: str = "fp32") -> list[str]:
    return [case.name for case in default_cases(config, ranks, precision)]


def test_a_case_is_a_strategy_and_settings() -> None:
    text = (
        "ddp,  fsdp   reshard=false, tensor=2 pipeline=2 cuts=[1, 1], single activation_checkpointing={every: 2}, ddp"
    )
    cases = {case.name: case.parallel for case in parse_cases(text, CONFIG)}
    assert cases == {
        "ddp": ParallelSection(strategy="ddp"),
        "fsdp reshard=false": ParallelSection(strategy="fsdp", reshard=False),
        "tensor=2 pipeline=2 cuts=[1, 1]": ParallelSection(strategy="ddp", tensor=2, pipeline=2, cuts=[1, 1]),
        "single activation_checkpointing={every: 2}": ParallelSection(
            strategy="single", activation_checkpointing=EveryKthBlock(every=2)
        ),
    }


def test_what_goes_with_any_strategy_is_kept_and_the_rest_is_not() -> None:
    parallel = ParallelSection(strategy="fsdp", replicate=2, activation_checkpointing="full", compile=True)
    (case,) = parse_cases("ddp", RunConfig(parallel=parallel))
    assert case.parallel == ParallelSection(strategy="ddp", activation_checkpointing="full", compile=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fspd", "did you mean fsdp?"),
        ("ddp tensr=2", "did you mean parallel.tensor?"),
        ("tensor=two", "parallel.tensor=two: expected"),
        (" , ", "no strategy is named"),
    ],
)
def test_errors_say_what_to_write(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        parse_cases(text, CONFIG)
    assert says in str(error.value)
    assert error.value.remedy


def test_defaults_are_what_fits() -> None:
    assert names(CONFIG, 1) == []
    two, four = names(CONFIG, 2), names(CONFIG, 4)
    assert two[0] == four[0] == "ddp"
    assert "fsdp replicate=2" in four
    assert "fsdp replicate=2" not in two
    assert "ddp tensor=2 pipeline=2" in four
    assert "ddp tensor=2 pipeline=2" not in two
    assert "ddp" in names(RunConfig(train=TrainSection(global_batch=9)), 2)  # the report will say why not
    assert "single" in names(CONFIG, 2, "bf16")


def test_the_configurations_own_way_is_one() -> None:
    own = ParallelSection(strategy="fsdp", reshard=False, activation_checkpointing="full")
    config = RunConfig(parallel=own, launch=LaunchSection(nproc=2))
    assert names(config, 2).count("fsdp reshard=false") == 1
    assert "as configured" not in names(config, 2)
    odd = RunConfig(parallel=ParallelSection(strategy="fsdp", tensor=2, reshard=False))
    assert names(odd, 4)[-1] == "as configured"
    again = RunConfig(parallel=ParallelSection(strategy="single", activation_checkpointing="full"))
    assert names(again, 1) == ["single"]


def cases(ranks: int, **sections: Any) -> list[str]:
    return [case.name for case in parallel_cases(RunConfig(device="cpu", **sections), ranks)]


def test_cases_of_the_acceptance() -> None:
    assert cases(1) == []
    assert cases(2) == [
        *("ddp", "fsdp", "ddp tensor=2", "ddp pipeline=2", "zero1", "fsdp reshard=false", "fsdp offload=true"),
        *("ddp tensor=2 sequence=true", "ddp pipeline=2 schedule=gpipe", "ddp pipeline=2 schedule=interleaved"),
    ]
    assert {f"{strategy} {degree}=2" for strategy in ("ddp", "fsdp") for degree in ("tensor", "pipeline")} <= {
        *cases(4)
    }
    assert {"ddp tensor=2 pipeline=2", "fsdp replicate=2"} <= {*cases(4)}
    assert "fsdp tensor=2 pipeline=2" in cases(8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_cases_fit_the_ranks(ranks: int) -> None:
    found = parallel_cases(RunConfig(device="cuda"), ranks)
    assert found
    assert len({case.name for case in found}) == len(found)
    for case in found:
        config = RunConfig(device="cuda", parallel=case.parallel)
        check_degrees(config, ranks)
        assert not any(rule.broken(config) for rule in PARALLEL)
    assert any(case.parallel.context > 1 for case in found) == (ranks % 2 == 0)


def test_cases_of_deepspeed() -> None:
    assert [case.name for case in deepspeed_cases(RunConfig(device="cpu"), 2)] == [
        *(f"deepspeed zero_stage={stage}" for stage in range(4)),
        *("deepspeed zero_stage=2 offload=true", "deepspeed zero_stage=3 offload=true"),
        *("deepspeed zero_stage=1 tensor=2", "deepspeed zero_stage=1 pipeline=2"),
    ]
    eight = deepspeed_cases(RunConfig(device="cuda"), 8)
    assert "deepspeed zero_stage=1 tensor=2 pipeline=2" in [case.name for case in eight]
    for case in eight:
        config = RunConfig(device="cuda", parallel=case.parallel)
        check_degrees(config, 8)
        assert not any(rule.broken(config) for rule in PARALLEL + DEEPSPEED)


def test_cases_leave_settings_of_deepspeed_out() -> None:
    with_section = RunConfig(device="cpu", deepspeed=DeepSpeedSection(preset="zero3"))
    assert [case.name for case in parallel_cases(with_section, 2)] == cases(2)
    assert deepspeed_cases(with_section, 2) == deepspeed_cases(RunConfig(device="cpu"), 2)


def test_cases_are_those_of_the_configuration() -> None:
    task = MaskedLMConfig(model="a-model")
    assert not any("pipeline" in case for case in cases(4, task=task))
    adafactor = cases(4, optim=OptimSection(name="adafactor"))
    assert not any(case.startswith("fsdp") or "tensor" in case for case in adafactor)
    packed = parallel_cases(RunConfig(device="cuda", data=DataSection(batching="packed")), 2)
    assert not any(case.parallel.context > 1 for case in packed)
