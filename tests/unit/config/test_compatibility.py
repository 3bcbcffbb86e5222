"""The table of what combines: the page says what the rules say, and the layouts to be tried are those allowed."""

from pathlib import Path
from typing import Any

import pytest

from drawbar.config.deepspeed.deepspeed_rules import DEEPSPEED
from drawbar.config.rules.compatibility import (
    CONFIG_OPTIONS,
    PARALLEL_OPTIONS,
    are_alternatives,
    broken_rules,
    deepspeed_cases,
    markdown,
    parallel_cases,
)
from drawbar.config.rules.parallel_rules import PARALLEL
from drawbar.config.rules.rule_table import check_degrees
from drawbar.config.schema.deepspeed_section import DeepSpeedSection
from drawbar.config.schema.run_config import DataSection, OptimSection, ParallelSection, RunConfig
from drawbar.config.schema.task_sections import MaskedLMConfig

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def cases(ranks: int, **sections: Any) -> list[dict[str, Any]]:
    return parallel_cases(RunConfig(device="cpu", **sections), ranks)


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_each_feature_works_alone() -> None:
    for feature in CONFIG_OPTIONS:
        assert broken_rules(feature.settings) == [], feature.label


def test_the_page_says_what_the_rules_say() -> None:
    lines = markdown().splitlines()
    columns = next(line for line in lines if line.startswith("| | single")).split(" | ")[1:]
    cells = next(line for line in lines if line.startswith("| zero1 |")).split(" | ")[1:]
    row = {column.strip(" |"): cell.strip(" |") for column, cell in zip(columns, cells, strict=True)}
    assert (row["ddp"], row["zero1"]) == ("–", "–")
    number = row["tensor"]
    assert any(line.startswith(f"| {number} | torch's ZeroRedundancyOptimizer") for line in lines)


def test_every_pair_of_layouts_has_one_answer() -> None:
    for one in PARALLEL_OPTIONS:
        for other in PARALLEL_OPTIONS:
            assert are_alternatives(one, other) == are_alternatives(other, one)
    named = {rule.name for rule in PARALLEL}
    assert {rule.name for rule in broken_rules({"parallel.strategy": "zero1", "parallel.tensor": 2})} <= named


def test_cases_of_the_acceptance() -> None:
    ddp = {"strategy": "ddp"}
    assert cases(1) == []
    assert cases(2) == [
        ddp,
        {"strategy": "fsdp"},
        {**ddp, "tensor": 2},
        {**ddp, "pipeline": 2},
        {"strategy": "zero1"},
        {"strategy": "fsdp", "reshard": False},
        {"strategy": "fsdp", "offload": True},
        {**ddp, "tensor": 2, "sequence": True},
        {**ddp, "pipeline": 2, "schedule": "gpipe"},
        {**ddp, "pipeline": 2, "schedule": "interleaved"},
    ]
    four = cases(4)
    for strategy in ("ddp", "fsdp"):
        assert {"strategy": strategy, "tensor": 2} in four
        assert {"strategy": strategy, "pipeline": 2} in four
    assert {**ddp, "pipeline": 2, "tensor": 2} in four
    assert {"strategy": "fsdp", "replicate": 2} in four
    assert {"strategy": "fsdp", "pipeline": 2, "tensor": 2} in cases(8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_cases_fit_the_ranks(ranks: int) -> None:
    found = parallel_cases(RunConfig(device="cuda"), ranks)
    assert found
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        config = RunConfig(device="cuda", parallel=ParallelSection(**case))
        check_degrees(config, ranks)
        assert not any(rule.broken(config) for rule in PARALLEL)
    assert any("context" in case for case in found) == (ranks % 2 == 0)


def test_cases_of_deepspeed() -> None:
    deepspeed = {"strategy": "deepspeed"}
    assert deepspeed_cases(RunConfig(device="cpu"), 2) == [
        *({**deepspeed, "zero_stage": stage} for stage in range(4)),
        {**deepspeed, "zero_stage": 2, "offload": True},
        {**deepspeed, "zero_stage": 3, "offload": True},
        {**deepspeed, "zero_stage": 1, "tensor": 2},
        {**deepspeed, "zero_stage": 1, "pipeline": 2},
    ]
    eight = deepspeed_cases(RunConfig(device="cuda"), 8)
    assert {**deepspeed, "zero_stage": 1, "tensor": 2, "pipeline": 2} in eight
    for case in eight:
        config = RunConfig(device="cuda", parallel=ParallelSection(**case))
        check_degrees(config, 8)
        assert not any(rule.broken(config) for rule in PARALLEL + DEEPSPEED)


def test_cases_leave_settings_of_deepspeed_out() -> None:
    with_section = RunConfig(device="cpu", deepspeed=DeepSpeedSection(preset="zero3"))
    assert parallel_cases(with_section, 2) == cases(2)
    assert deepspeed_cases(with_section, 2) == deepspeed_cases(RunConfig(device="cpu"), 2)


def test_cases_are_those_of_the_configuration() -> None:
    task = MaskedLMConfig(model="a-model")
    assert not any("pipeline" in case for case in cases(4, task=task))
    assert not any(
        case["strategy"] == "fsdp" or "tensor" in case for case in cases(4, optim=OptimSection(name="adafactor"))
    )
    packed = parallel_cases(RunConfig(device="cuda", data=DataSection(batching="packed")), 2)
    assert not any("context" in case for case in packed)
