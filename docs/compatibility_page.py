"""The page docs/compatibility.md: which settings combine, as the rules have it that training obeys."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from drawbar.config.io.load_config import load_config
from drawbar.config.rules.rule import Rule
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES


@dataclass(frozen=True)
class ConfigOption:
    """What a user may switch on, and the settings that do it, by dotted key."""

    label: str
    settings: Mapping[str, Any]


def _fsdp(**settings: Any) -> dict[str, Any]:
    return {"parallel.strategy": "fsdp", **{f"parallel.{name}": value for name, value in settings.items()}}


def _deepspeed(stage: int, **settings: Any) -> dict[str, Any]:
    chosen = {"strategy": "deepspeed", "zero_stage": stage, **settings}
    return {f"parallel.{name}": value for name, value in chosen.items()}


PARALLEL_OPTIONS = (
    ConfigOption("single", {"parallel.strategy": "single"}),
    ConfigOption("dp", {"parallel.strategy": "dp"}),
    ConfigOption("ddp", {"parallel.strategy": "ddp"}),
    ConfigOption("zero1", {"parallel.strategy": "zero1"}),
    ConfigOption("fsdp", _fsdp()),
    ConfigOption("fsdp, reshard=false", _fsdp(reshard=False)),
    ConfigOption("fsdp, replicate=2", _fsdp(replicate=2)),
    ConfigOption("fsdp, offload", _fsdp(offload=True)),
    *(ConfigOption(f"deepspeed, zero {stage}", _deepspeed(stage)) for stage in range(4)),
    ConfigOption("deepspeed, zero 2, offload", _deepspeed(2, offload=True)),
    ConfigOption("deepspeed, zero 3, offload", _deepspeed(3, offload=True)),
    ConfigOption("tensor", {"parallel.tensor": 2}),
    ConfigOption("tensor, sequence", {"parallel.tensor": 2, "parallel.sequence": True}),
    ConfigOption("pipeline, 1f1b", {"parallel.pipeline": 2}),
    ConfigOption("pipeline, gpipe", {"parallel.pipeline": 2, "parallel.schedule": "gpipe"}),
    ConfigOption("pipeline, interleaved", {"parallel.pipeline": 2, "parallel.schedule": "interleaved"}),
    ConfigOption("context", {"parallel.context": 2}),
)
OTHERS = (
    ConfigOption("activation_checkpointing: full", {"parallel.activation_checkpointing": "full"}),
    ConfigOption("activation_checkpointing: selective", {"parallel.activation_checkpointing": "selective"}),
    ConfigOption("activation_checkpointing: attention", {"parallel.activation_checkpointing": "attention"}),
    ConfigOption("activation_checkpointing: every: 2", {"parallel.activation_checkpointing": {"every": 2}}),
    ConfigOption("reduce_dtype: bf16", {"parallel.reduce_dtype": "bf16"}),
    ConfigOption("compile", {"parallel.compile": True}),
    ConfigOption("fp8", {"parallel.fp8": "tensorwise"}),
    ConfigOption("lora", {"lora": {}}),
    ConfigOption("lora, base: nf4", {"lora": {"base": "nf4"}}),
    ConfigOption("lora, dora", {"lora": {"dora": True}}),
    ConfigOption("precision: fp32", {"precision": "fp32"}),
    ConfigOption("precision: bf16", {"precision": "bf16"}),
    ConfigOption("precision: fp16", {"precision": "fp16"}),
    ConfigOption("batching: grouped", {"data.batching": "grouped"}),
    ConfigOption("batching: packed", {"data.batching": "packed"}),
    ConfigOption("padding_free", {"data.padding_free": True}),
    ConfigOption("streaming", {"data.streaming": True}),
    ConfigOption("adamw", {"optim.name": "adamw"}),
    ConfigOption("state_dtype: int8", {"optim.state_dtype": "int8"}),
    ConfigOption("sgd", {"optim.name": "sgd"}),
    ConfigOption("adafactor", {"optim.name": "adafactor"}),
    ConfigOption("muon", {"optim.name": "muon"}),
    ConfigOption("attention: eager", {"task.attention": "eager"}),
    ConfigOption("attention: flash", {"task.attention": "flash_attention_2"}),
    ConfigOption("attention: flex", {"task.attention": "flex_attention"}),
    ConfigOption("causal_lm", {"task.type": "causal_lm"}),
    ConfigOption("seq2seq", {"task.type": "seq2seq", "task.model": "a-model"}),
    ConfigOption("masked_lm", {"task.type": "masked_lm", "task.model": "a-model"}),
    ConfigOption("sequence_classification", {"task.type": "sequence_classification", "task.model": "a-model"}),
    ConfigOption("token_classification", {"task.type": "token_classification", "task.model": "a-model"}),
    ConfigOption("device: cpu", {"device": "cpu"}),
    ConfigOption("device: cuda", {"device": "cuda"}),
    ConfigOption("device: mps", {"device": "mps"}),
)
TRAINABLE = {"data.train": "train.txt", "train.steps": 1}
"""The least that training needs."""


def broken_rules(settings: Mapping[str, Any]) -> list[Rule]:
    """The rules that refuse to train with these settings, by dotted key."""
    written = [f"{key}={json.dumps(value)}" for key, value in {**TRAINABLE, **settings}.items()]
    config = load_config(None, written).config
    return [rule for rule in RULES + TRAIN_RULES if rule.broken(config)]


def are_alternatives(one: ConfigOption, other: ConfigOption) -> bool:
    """Whether they are different values of one setting, or the same option."""
    return one is other or any(other.settings.get(key, value) != value for key, value in one.settings.items())


def render() -> str:
    """The whole page, in Markdown."""
    notes: dict[str, Rule] = {}
    tables = [
        ("Strategies and degrees with one another", [*_table(PARALLEL_OPTIONS, PARALLEL_OPTIONS, notes)]),
        ("Everything else with strategies and degrees", [*_table(OTHERS, PARALLEL_OPTIONS, notes)]),
        ("Everything else with one another", [*_refused(OTHERS, notes)]),
    ]
    lines = [
        "# What combines with what",
        "",
        "Generated by `make docs` from the rules that training obeys. ✓ works together; – is another value of",
        "the same setting; a number is refused, for the reason below. Each pair is added to a configuration with",
        "defaults, which trains a language model on whatever device there is.",
    ]
    for title, table in tables:
        lines += ["", f"## {title}", "", *table]
    lines += ["", "## Why", "", "| | Reason | What to do |", "| --- | --- | --- |"]
    lines += [f"| {_number(rule, notes)} | {rule.reason} | {rule.remedy} |" for rule in notes.values()]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[ConfigOption], columns: Sequence[ConfigOption], notes: dict[str, Rule]) -> Iterator[str]:
    yield f"| | {' | '.join(option.label for option in columns)} |"
    yield f"| --- |{' :-: |' * len(columns)}"
    for row in rows:
        yield f"| {row.label} | {' | '.join(_cell(row, column, notes) for column in columns)} |"


def _cell(one: ConfigOption, other: ConfigOption, notes: dict[str, Rule]) -> str:
    if are_alternatives(one, other):
        return "–"
    broken = broken_rules({**one.settings, **other.settings})
    notes.update((rule.name, rule) for rule in broken)
    return ", ".join(str(_number(rule, notes)) for rule in broken) or "✓"


def _refused(options: Sequence[ConfigOption], notes: dict[str, Rule]) -> Iterator[str]:
    """Nearly all of them combine, so only the rest is listed."""
    yield "All of them, but for:"
    yield ""
    for one, other in combinations(options, 2):
        cell = _cell(one, other, notes)
        if cell not in "–✓":
            yield f"- {one.label} with {other.label}: {cell}"


def _number(rule: Rule, notes: Mapping[str, Rule]) -> int:
    return list(notes).index(rule.name) + 1
