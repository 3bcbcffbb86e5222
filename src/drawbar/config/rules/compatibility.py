"""What combines with what, told by the rules: the page ``docs/compatibility.md``, and the layouts that tests and
``drawbar parity`` try. Both are made from ``FEATURES``."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Literal

from drawbar.config.deepspeed.meaning import laid_out
from drawbar.config.io.load_config import load_config
from drawbar.config.rules.rule import Rule
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_layout
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.errors import UserError

Kind = Literal["strategy", "variant", "degree", "deepspeed", "other"]


@dataclass(frozen=True)
class Feature:
    """What a user may switch on, and the settings that do it."""

    label: str
    settings: Mapping[str, Any]
    """Values by dotted key."""
    kind: Kind = "other"
    """For parallel layouts: strategies and degrees are tested in combination, their variants one at a time, and
    DeepSpeed's features separately."""


def _fsdp(**settings: Any) -> dict[str, Any]:
    return {"parallel.strategy": "fsdp", **{f"parallel.{name}": value for name, value in settings.items()}}


def _deepspeed(stage: int, **settings: Any) -> dict[str, Any]:
    chosen = {"strategy": "deepspeed", "zero_stage": stage, **settings}
    return {f"parallel.{name}": value for name, value in chosen.items()}


LAYOUTS = (
    Feature("single", {"parallel.strategy": "single"}, "variant"),
    Feature("dp", {"parallel.strategy": "dp"}, "variant"),
    Feature("ddp", {"parallel.strategy": "ddp"}, "strategy"),
    Feature("zero1", {"parallel.strategy": "zero1"}, "variant"),
    Feature("fsdp", _fsdp(), "strategy"),
    Feature("fsdp, reshard=false", _fsdp(reshard=False), "variant"),
    Feature("fsdp, replicate=2", _fsdp(replicate=2), "variant"),
    Feature("fsdp, offload", _fsdp(offload=True), "variant"),
    *(Feature(f"deepspeed, zero {stage}", _deepspeed(stage), "deepspeed") for stage in range(4)),
    Feature("deepspeed, zero 2, offload", _deepspeed(2, offload=True), "deepspeed"),
    Feature("deepspeed, zero 3, offload", _deepspeed(3, offload=True), "deepspeed"),
    Feature("tensor", {"parallel.tensor": 2}, "degree"),
    Feature("tensor, sequence", {"parallel.tensor": 2, "parallel.sequence": True}, "variant"),
    Feature("pipeline, 1f1b", {"parallel.pipeline": 2}, "degree"),
    Feature("pipeline, gpipe", {"parallel.pipeline": 2, "parallel.schedule": "gpipe"}, "variant"),
    Feature("pipeline, interleaved", {"parallel.pipeline": 2, "parallel.schedule": "interleaved"}, "variant"),
    Feature("context", {"parallel.context": 2}, "degree"),
)
OTHERS = (
    Feature("activation_checkpointing: full", {"parallel.activation_checkpointing": "full"}),
    Feature("activation_checkpointing: selective", {"parallel.activation_checkpointing": "selective"}),
    Feature("activation_checkpointing: every: 2", {"parallel.activation_checkpointing": {"every": 2}}),
    Feature("compile", {"parallel.compile": True}),
    Feature("lora", {"lora": {}}),
    Feature("precision: fp32", {"precision": "fp32"}),
    Feature("precision: bf16", {"precision": "bf16"}),
    Feature("precision: fp16", {"precision": "fp16"}),
    Feature("batching: grouped", {"data.batching": "grouped"}),
    Feature("batching: packed", {"data.batching": "packed"}),
    Feature("streaming", {"data.streaming": True}),
    Feature("adamw", {"optim.name": "adamw"}),
    Feature("sgd", {"optim.name": "sgd"}),
    Feature("adafactor", {"optim.name": "adafactor"}),
    Feature("muon", {"optim.name": "muon"}),
    Feature("attention: eager", {"task.attention": "eager"}),
    Feature("attention: flash", {"task.attention": "flash_attention_2"}),
    Feature("attention: flex", {"task.attention": "flex_attention"}),
    Feature("causal_lm", {"task.type": "causal_lm"}),
    Feature("seq2seq", {"task.type": "seq2seq", "task.model": "a-model"}),
    Feature("masked_lm", {"task.type": "masked_lm", "task.model": "a-model"}),
    Feature("sequence_classification", {"task.type": "sequence_classification", "task.model": "a-model"}),
    Feature("token_classification", {"task.type": "token_classification", "task.model": "a-model"}),
    Feature("device: cpu", {"device": "cpu"}),
    Feature("device: cuda", {"device": "cuda"}),
    Feature("device: mps", {"device": "mps"}),
)
FEATURES = LAYOUTS + OTHERS
TRAINABLE = {"data.train": "train.txt", "train.steps": 1}
"""The least that training needs."""


def broken_rules(settings: Mapping[str, Any]) -> list[Rule]:
    """The rules that refuse to train with these settings, by dotted key."""
    written = [f"{key}={json.dumps(value)}" for key, value in {**TRAINABLE, **settings}.items()]
    config = load_config(None, written).config
    return [rule for rule in RULES + TRAIN_RULES if rule.broken(config)]


def are_alternatives(one: Feature, other: Feature) -> bool:
    """Whether they are different values of one setting, or the same feature."""
    return one is other or any(other.settings.get(key, value) != value for key, value in one.settings.items())


def parallel_cases(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    """Every native layout of ``config`` over so many ranks that is allowed and makes use of all of them.

    These are each strategy and each degree, every combination of the two strategies and the degrees that matter most
    (``ddp`` and ``fsdp``, ``tensor``, ``pipeline`` and ``context``), and each of their variants alone.

    Returns:
        Settings of ``parallel`` that are not the default, such as ``{"strategy": "fsdp", "tensor": 2}``.
    """
    ddp = next(feature for feature in LAYOUTS if feature.label == "ddp")
    strategies = [feature for feature in LAYOUTS if feature.kind == "strategy"]
    degrees = [feature for feature in LAYOUTS if feature.kind == "degree"]
    together = chain.from_iterable(combinations(degrees, count) for count in range(len(degrees) + 1))
    tried: list[tuple[Feature, ...]] = [(strategy, *chosen) for chosen in together for strategy in strategies]
    tried += [(ddp, feature) for feature in LAYOUTS if feature.kind == "variant"]
    return _fitting(config, tried, ranks)


def deepspeed_cases(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    """Every layout of DeepSpeed's over so many ranks that is allowed and makes use of all of them.

    These are each ZeRO stage and offloading, and every combination of the degrees with stage 1, which goes with all.

    Returns:
        As ``parallel_cases``.
    """
    stages = [feature for feature in LAYOUTS if feature.kind == "deepspeed"]
    stage_1 = next(feature for feature in stages if feature.settings["parallel.zero_stage"] == 1)
    degrees = [feature for feature in LAYOUTS if feature.kind == "degree"]
    together = chain.from_iterable(combinations(degrees, count) for count in range(1, len(degrees) + 1))
    return _fitting(config, [*((stage,) for stage in stages), *((stage_1, *chosen) for chosen in together)], ranks)


def _fitting(config: RunConfig, tried: Iterable[Sequence[Feature]], ranks: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for features in tried:
        parallel = {key.removeprefix("parallel."): value for f in features for key, value in f.settings.items()}
        if _fits(config, parallel, ranks):
            found.append(parallel)
    return found


def _fits(config: RunConfig, parallel: Mapping[str, Any], ranks: int) -> bool:
    kept = {name: getattr(config.parallel, name) for name in ("activation_checkpointing", "compile")}
    section = ParallelSection(**kept, **parallel)
    launch = config.launch.model_copy(update={"nproc": ranks})
    changed = laid_out(config.model_copy(update={"launch": launch}), section)
    if any(rule.broken(changed) for rule in RULES):
        return False
    try:
        data = check_layout(changed, ranks)
    except UserError:
        return False
    # one shard is not sharded, and one replica not replicated
    return data > section.replicate if section.features.shards_parameters else data > 1 or data < ranks


def markdown() -> str:
    """The page ``docs/compatibility.md``."""
    notes: dict[str, Rule] = {}
    tables = [
        ("Layouts with one another", [*_table(LAYOUTS, LAYOUTS, notes)]),
        ("Everything else with layouts", [*_table(OTHERS, LAYOUTS, notes)]),
        ("Everything else with one another", [*_refused(OTHERS, notes)]),
    ]
    lines = [
        "# What combines with what",
        "",
        "Generated by `make docs` from the rules that every command obeys. ✓ works together; – is another value of",
        "the same setting; a number is refused, for the reason below. Each pair is added to a configuration with",
        "defaults, which trains a language model on whatever device there is.",
    ]
    for title, table in tables:
        lines += ["", f"## {title}", "", *table]
    lines += ["", "## Why", "", "| | Reason | What to do |", "| --- | --- | --- |"]
    lines += [f"| {_number(rule, notes)} | {rule.reason} | {rule.remedy} |" for rule in notes.values()]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Feature], columns: Sequence[Feature], notes: dict[str, Rule]) -> Iterator[str]:
    yield f"| | {' | '.join(feature.label for feature in columns)} |"
    yield f"| --- |{' :-: |' * len(columns)}"
    for row in rows:
        yield f"| {row.label} | {' | '.join(_cell(row, column, notes) for column in columns)} |"


def _cell(one: Feature, other: Feature, notes: dict[str, Rule]) -> str:
    if are_alternatives(one, other):
        return "–"
    broken = broken_rules({**one.settings, **other.settings})
    notes.update((rule.name, rule) for rule in broken)
    return ", ".join(str(_number(rule, notes)) for rule in broken) or "✓"


def _refused(features: Sequence[Feature], notes: dict[str, Rule]) -> Iterator[str]:
    """Nearly all of them combine, so only the rest is listed."""
    yield "All of them, but for:"
    yield ""
    for one, other in combinations(features, 2):
        cell = _cell(one, other, notes)
        if cell not in "–✓":
            yield f"- {one.label} with {other.label}: {cell}"


def _number(rule: Rule, notes: Mapping[str, Rule]) -> int:
    return list(notes).index(rule.name) + 1
