"""The strategies that ``drawbar parity`` compares: which there are, and how a user writes one."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Literal

from pydantic import ValidationError

from drawbar.config.io.problems import report_errors, report_missing_values
from drawbar.config.io.source import Settings, apply_override
from drawbar.config.rules.rule_table import RULES, check_degrees, check_rules, check_world
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.config.strategies import AUTO, STRATEGIES
from drawbar.errors import UserError, nearest

_OUTSIDE_BRACKETS = r"(?![^\[{]*[\]}])"
ONE_PROCESS = ParallelSection(strategy="single")
_KEPT = ("activation_checkpointing", "compile")
"""Settings of ``parallel`` that every case takes from the configuration: they do not change the layout."""
_Kind = Literal["strategy", "variant", "degree", "deepspeed", "other"]


@dataclass(frozen=True)
class ConfigOption:
    """What a user may switch on, and the settings that do it."""

    label: str
    settings: Mapping[str, Any]
    """Values by dotted key."""
    kind: _Kind = "other"
    """Of parallel settings: ``strategy`` and ``degree`` are tried in all combinations; a ``variant`` (a less usual
    strategy, or another value of a setting of a degree) by itself, over ddp if it names no strategy; those of
    ``deepspeed`` separately."""


def _fsdp(**settings: Any) -> dict[str, Any]:
    return {"parallel.strategy": "fsdp", **{f"parallel.{name}": value for name, value in settings.items()}}


def _deepspeed(stage: int, **settings: Any) -> dict[str, Any]:
    chosen = {"strategy": "deepspeed", "zero_stage": stage, **settings}
    return {f"parallel.{name}": value for name, value in chosen.items()}


PARALLEL_OPTIONS = (
    ConfigOption("single", {"parallel.strategy": "single"}, "variant"),
    ConfigOption("dp", {"parallel.strategy": "dp"}, "variant"),
    ConfigOption("ddp", {"parallel.strategy": "ddp"}, "strategy"),
    ConfigOption("zero1", {"parallel.strategy": "zero1"}, "variant"),
    ConfigOption("fsdp", _fsdp(), "strategy"),
    ConfigOption("fsdp, reshard=false", _fsdp(reshard=False), "variant"),
    ConfigOption("fsdp, replicate=2", _fsdp(replicate=2), "variant"),
    ConfigOption("fsdp, offload", _fsdp(offload=True), "variant"),
    *(ConfigOption(f"deepspeed, zero {stage}", _deepspeed(stage), "deepspeed") for stage in range(4)),
    ConfigOption("deepspeed, zero 2, offload", _deepspeed(2, offload=True), "deepspeed"),
    ConfigOption("deepspeed, zero 3, offload", _deepspeed(3, offload=True), "deepspeed"),
    ConfigOption("tensor", {"parallel.tensor": 2}, "degree"),
    ConfigOption("tensor, sequence", {"parallel.tensor": 2, "parallel.sequence": True}, "variant"),
    ConfigOption("pipeline, 1f1b", {"parallel.pipeline": 2}, "degree"),
    ConfigOption("pipeline, gpipe", {"parallel.pipeline": 2, "parallel.schedule": "gpipe"}, "variant"),
    ConfigOption("pipeline, interleaved", {"parallel.pipeline": 2, "parallel.schedule": "interleaved"}, "variant"),
    ConfigOption("context", {"parallel.context": 2}, "degree"),
)


@dataclass(frozen=True)
class Case:
    """One way of running a configuration."""

    name: str
    parallel: ParallelSection

    @property
    def alone(self) -> bool:
        """Whether it is one process with one device (the strategy ``dp`` has several): rank 0 runs it, however many
        ranks there are."""
        return _is_one_device(self.parallel)

    def apply_to(self, config: RunConfig, precision: str) -> RunConfig:
        """The configuration, run in this way."""
        return config.with_parallel(self.parallel).model_copy(update={"precision": precision})


def parse_cases(text: str, config: RunConfig) -> list[Case]:
    """Cases as a user writes them: ``ddp, fsdp reshard=false, tensor=2 pipeline=2``.

    Each is a strategy (by default ddp), settings of ``parallel``, or both. Settings that are not named are the
    defaults, but for activation checkpointing and compilation, which are those of ``config``.

    Raises:
        UserError: there is no such strategy or setting.
    """
    parts = [" ".join(part.split()) for part in re.split(rf",{_OUTSIDE_BRACKETS}", text)]
    cases = [parse_case(part, config) for part in parts if part]
    if not cases:
        raise UserError("no strategy is named", where="--strategies", remedy="name some: ddp, zero1, fsdp")
    return list({case.name: case for case in cases}.values())


def parse_case(text: str, config: RunConfig) -> Case:
    """One case, such as ``fsdp reshard=false``."""
    settings = Settings()
    values = config.parallel.model_dump(mode="json", include=set(_KEPT))
    settings.values["parallel"] = {**values, "strategy": "ddp"}
    for word in re.split(rf" {_OUTSIDE_BRACKETS}", text):
        names = [AUTO, *STRATEGIES.names()]
        if "=" not in word and ":" not in word and word not in names:
            guess = nearest(word, names)
            raise UserError(
                f"there is no strategy {word!r}" + (f"; did you mean {guess}?" if guess else ""),
                where="--strategies",
                remedy=f"name {', '.join(names)}, or settings of parallel such as tensor=2",
            )
        apply_override(settings, f"parallel.{word if '=' in word else f'strategy={word}'}")
    try:
        parallel = RunConfig.model_validate_json(json.dumps(settings.values)).parallel
    except ValidationError as error:
        report_errors(error, RunConfig, settings)
    report_missing_values(RunConfig, settings)
    if settings.problems:
        raise UserError(
            "\n".join(settings.problems), where="--strategies", remedy="`drawbar config explain parallel` lists them"
        )
    return Case(text, parallel)


def default_cases(config: RunConfig, ranks: int, precision: str) -> list[Case]:
    """The cases where the user names none: every layout that fits this configuration and so many processes, those of
    DeepSpeed where the configuration is for it, and the configuration's own ``parallel``.

    Whether the batches can be split over them is not checked here: a case that cannot run is reported as refused.
    """
    config = config.model_copy(update={"precision": precision})
    found = parallel_cases(config, ranks) if ranks > 1 else []
    cases = [parse_case(case_text(settings), config) for settings in found]
    own = config.parallel
    if config.strategy.zero_stages:
        own = own.model_copy(update={"strategy": config.strategy.name})
        cases += [parse_case(case_text(settings), config) for settings in deepspeed_cases(config, ranks)]
    elif (_is_one_device(own) or own.strategy == AUTO) and own.model_ranks == 1:
        own = own.model_copy(update={"strategy": "single" if ranks == 1 else "ddp"})
    if precision != "fp32" or (ranks == 1 and own != ONE_PROCESS):
        # ``single`` shows what rounding does in a lower precision, or, with one rank, what the settings in ``_KEPT`` do
        cases.insert(0, parse_case("single", config))
    if own not in [case.parallel for case in cases] and not _is_one_device(own):
        cases.append(Case("as configured", own))
    return cases


def _is_one_device(parallel: ParallelSection) -> bool:
    return parallel.features.one_process and not parallel.features.many_devices


def parallel_cases(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    """Every choice of parallel settings, but for those of DeepSpeed, that ``config`` allows over so many ranks and that
    uses all of them.

    These are each strategy and each degree, every combination of the two strategies and the degrees that matter most
    (``ddp`` and ``fsdp``, ``tensor``, ``pipeline`` and ``context``), and each variant by itself.

    Returns:
        Settings of ``parallel`` that are not the default, such as ``{"strategy": "fsdp", "tensor": 2}``.
    """
    ddp = next(option for option in PARALLEL_OPTIONS if option.label == "ddp")
    strategies = [option for option in PARALLEL_OPTIONS if option.kind == "strategy"]
    degrees = [option for option in PARALLEL_OPTIONS if option.kind == "degree"]
    together = chain.from_iterable(combinations(degrees, count) for count in range(len(degrees) + 1))
    tried: list[tuple[ConfigOption, ...]] = [(strategy, *chosen) for chosen in together for strategy in strategies]
    tried += [(ddp, option) for option in PARALLEL_OPTIONS if option.kind == "variant"]
    return _fitting(config, tried, ranks)


def deepspeed_cases(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    """Every choice of DeepSpeed's settings that ``config`` allows over so many ranks and that uses all of
    them.

    These are each ZeRO stage and offloading, and every combination of tensor and pipeline with stage 1.

    Returns:
        As ``parallel_cases``.
    """
    stages = [option for option in PARALLEL_OPTIONS if option.kind == "deepspeed"]
    stage_1 = next(option for option in stages if option.settings["parallel.zero_stage"] == 1)
    degrees = [option for option in PARALLEL_OPTIONS if option.kind == "degree"]
    together = chain.from_iterable(combinations(degrees, count) for count in range(1, len(degrees) + 1))
    return _fitting(config, [*((stage,) for stage in stages), *((stage_1, *chosen) for chosen in together)], ranks)


def _fitting(config: RunConfig, tried: Iterable[Sequence[ConfigOption]], ranks: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for options in tried:
        parallel = {
            key.removeprefix("parallel."): value for option in options for key, value in option.settings.items()
        }
        if _fits(config, parallel, ranks):
            found.append(parallel)
    return found


def _fits(config: RunConfig, parallel: Mapping[str, Any], ranks: int) -> bool:
    kept = {name: getattr(config.parallel, name) for name in _KEPT}
    section = ParallelSection(**kept, **parallel)
    launch = config.launch.model_copy(update={"nproc": ranks})
    changed = config.model_copy(update={"launch": launch}).with_parallel(section)
    if any(rule.broken(changed) for rule in RULES):
        return False
    try:
        data = check_degrees(changed, ranks)
    except UserError:
        return False
    # fsdp needs two shards or more; other strategies two replicas or more, or a model over several ranks
    return data > section.replicate if section.features.shards_parameters else data > 1 or data < ranks


def case_text(settings: Mapping[str, Any]) -> str:
    """Settings of ``parallel`` as a user writes a case: ``fsdp tensor=2``."""
    rest = {name: value for name, value in settings.items() if name != "strategy"}
    return " ".join(
        [settings["strategy"], *(f"{name}={json.dumps(value)}".replace('"', "") for name, value in rest.items())]
    )


def check_case(case: Case, config: RunConfig, ranks: int, precision: str) -> None:
    """Refuse what cannot be run.

    Raises:
        UserError: the settings do not combine, or do not fit so many processes.
    """
    placed = _placed(case, config, ranks, precision)
    check_rules(placed, RULES)
    check_world(placed, 1 if case.alone else ranks)


def _placed(case: Case, config: RunConfig, ranks: int, precision: str) -> RunConfig:
    """The configuration, run in this way on so many processes."""
    launch = config.launch.model_copy(update={"nproc": 1 if case.alone else ranks})
    return case.apply_to(config, precision).model_copy(update={"launch": launch})
