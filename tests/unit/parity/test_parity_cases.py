"""Which strategies `drawbar parity` compares, and how they are written."""

import pytest

from drawbar.config.schema.run_config import EveryKthBlock, LaunchSection, ParallelSection, RunConfig, TrainSection
from drawbar.errors import UserError
from drawbar.parity.cases import default_cases, parse_cases

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
