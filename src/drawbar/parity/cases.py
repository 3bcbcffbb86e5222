"""The strategies that ``drawbar parity`` compares: which there are, and how a user writes one."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations

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
STRATEGIES_TRIED = ("ddp", "fsdp")
DEGREES = ("tensor=2", "pipeline=2", "context=2")
"""Tried with each of the strategies, in all combinations."""
VARIANTS = (
    *("single", "dp", "zero1", "fsdp reshard=false", "fsdp replicate=2", "fsdp offload=true"),
    *("ddp tensor=2 sequence=true", "ddp pipeline=2 schedule=gpipe", "ddp pipeline=2 schedule=interleaved"),
)
"""Less usual strategies, and other values of a degree's settings: each is tried by itself."""
DEEPSPEED = (
    *(f"deepspeed zero_stage={stage}" for stage in range(4)),
    *(f"deepspeed zero_stage={stage} offload=true" for stage in (2, 3)),
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
        if "=" not in word and ":" not in word and word != AUTO and word not in STRATEGIES:
            names = [AUTO, *STRATEGIES.names()]
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
    cases = parallel_cases(config, ranks) if ranks > 1 else []
    own = config.parallel
    if config.strategy.zero_stages:
        own = own.model_copy(update={"strategy": config.strategy.name})
        cases += deepspeed_cases(config, ranks)
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


def parallel_cases(config: RunConfig, ranks: int) -> list[Case]:
    """Every case, but for those of DeepSpeed, that ``config`` allows over so many ranks and that uses all of them."""
    combined = [" ".join((strategy, *degrees)) for degrees in _combinations(0) for strategy in STRATEGIES_TRIED]
    return _fitting(config, [*combined, *VARIANTS], ranks)


def deepspeed_cases(config: RunConfig, ranks: int) -> list[Case]:
    """Every case of DeepSpeed that ``config`` allows over so many ranks and that uses all of them: each ZeRO stage and
    offloading, and every combination of tensor and pipeline with stage 1."""
    combined = [" ".join(("deepspeed zero_stage=1", *degrees)) for degrees in _combinations(1)]
    return _fitting(config, [*DEEPSPEED, *combined], ranks)


def _combinations(least: int) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(DEGREES, count) for count in range(least, len(DEGREES) + 1))


def _fitting(config: RunConfig, texts: Iterable[str], ranks: int) -> list[Case]:
    return [case for text in texts if _fits(config, (case := parse_case(text, config)).parallel, ranks)]


def _fits(config: RunConfig, parallel: ParallelSection, ranks: int) -> bool:
    launch = config.launch.model_copy(update={"nproc": ranks})
    changed = config.model_copy(update={"launch": launch}).with_parallel(parallel)
    if any(rule.broken(changed) for rule in RULES):
        return False
    try:
        data = check_degrees(changed, ranks)
    except UserError:
        return False
    # fsdp needs two shards or more; other strategies two replicas or more, or a model over several ranks
    return data > parallel.replicate if parallel.features.shards_parameters else data > 1 or data < ranks


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
