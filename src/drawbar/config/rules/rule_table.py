"""Which settings combine: the single table that training checks, the documentation prints and the tests iterate over.

A rule refuses settings that cannot work, and settings that would have no effect, as these are usually mistakes.
"""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

from pydantic import BaseModel

from drawbar.config.io.fields import lookup, show
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.rules.parallel_rules import FLEX_TRAINING, PADDING_FREE, PARALLEL, TRAINING
from drawbar.config.rules.rule import Rule, one_error
from drawbar.config.schema.data_section import Sources, SourceSection
from drawbar.config.schema.guest_section import from_guests
from drawbar.config.schema.run_config import OptimSection, RunConfig
from drawbar.errors import UserError


class _Extra(NamedTuple):
    name: str
    package: str
    setting: str
    is_used: Callable[[RunConfig], bool]


def _tracker(name: str) -> _Extra:
    return _Extra(name, name, "tracking.trackers", lambda config: config.tracking.trackers.get(name) is not None)


_EXTRAS = (
    _Extra("lora", "peft", "lora", lambda config: config.lora is not None),
    _Extra("fp8", "torchao", "parallel.fp8", lambda config: config.parallel.fp8 is not None),
    _Extra("liger", "liger_kernel", "task.cross_entropy", lambda config: _cross_entropy(config) == "liger"),
    _Extra("object-store", "s3fs", "checkpoint.remote", lambda config: (config.checkpoint.remote or "")[:5] == "s3://"),
    *map(_tracker, ("wandb", "mlflow", "trackio")),
)


def _cross_entropy(config: RunConfig) -> str | None:
    return getattr(config.task, "cross_entropy", None)


def _rule(extra: _Extra) -> Rule:
    return Rule(
        name=f"{extra.setting} without {extra.package}",
        keys=(extra.setting,),
        broken=lambda config: extra.is_used(config) and find_spec(extra.package) is None,
        reason=f"it needs the package {extra.package}, which is not installed",
        remedy=f"pip install 'drawbar[{extra.name}]', or leave {extra.setting} out",
    )


PACKAGE_RULES: tuple[Rule, ...] = (*map(_rule, _EXTRAS), *chain(*from_guests("package_rules")))
"""Rules for this machine only: a machine that a job is submitted to may have other packages."""


MICRO_BATCH_TOKENS = 8192
"""Maximum number of tokens per forward with ``train.micro_batch: auto``, unless trial steps find a larger number."""

DEFAULTS = OptimSection()


def _warmup_share(config: RunConfig) -> float:
    """Warm-up as a fraction of all steps; 0 if the number of steps is not known yet."""
    if isinstance(config.optim.warmup, float):
        return config.optim.warmup
    steps = config.optim.schedule_steps or config.train.steps
    return config.optim.warmup / steps if steps else 0.0


def _sections(sources: Sources) -> list[SourceSection]:
    """The sources that are more than a path."""
    every = sources if isinstance(sources, list) else [sources]
    return [source for source in every if isinstance(source, SourceSection)]


def _has_weights(sources: Sources) -> bool:
    """Whether a source of several has a weight."""
    return isinstance(sources, list) and any(source.weight for source in _sections(sources))


def _splits_weights(config: RunConfig) -> bool:
    """Whether processes hold shards of weights, or another library or torch's ``nn.DataParallel`` copies them."""
    strategy = config.strategy
    return strategy.shards_parameters or strategy.has_engine or strategy.many_devices or config.parallel.model_ranks > 1


BATCHES_AND_STEPS = (
    Rule(
        "training data",
        ("data.train",),
        lambda c: c.data.train in (None, []),
        "there is nothing to train on",
        "set data.train to a file, a glob, a list of these, or python_stdlib; for a task that makes its own records, "
        "to any name, such as data.train=generated",
    ),
    Rule(
        "steps and epochs",
        ("train.steps", "train.epochs"),
        lambda c: c.train.steps is not None and c.train.epochs is not None,
        "both set how long to train",
        "keep one, and set the other to null",
    ),
    Rule(
        "steps or epochs",
        ("train.steps", "train.epochs"),
        lambda c: c.train.steps is None and c.train.epochs is None,
        "neither is set, so it is unknown how long to train",
        "set train.steps or train.epochs",
    ),
    Rule(
        "micro-batch",
        ("train.micro_batch", "train.global_batch"),
        lambda c: c.train.micro_batch != "auto" and c.train.global_batch % c.train.micro_batch != 0,
        "a global batch consists of whole micro-batches",
        "choose a micro_batch that divides global_batch, or auto",
    ),
    Rule(
        "micro-batch twice",
        ("train.micro_batch", "train.micro_batch_tokens"),
        lambda c: c.train.micro_batch != "auto" and c.train.micro_batch_tokens is not None,
        "both set the size of a micro-batch",
        "keep one",
    ),
    Rule(
        "profile",
        ("tracking.profile.start", "train.steps"),
        lambda c: bool(c.tracking.profile and c.train.steps and c.tracking.profile.start > c.train.steps),
        "training ends before the profile starts",
        "start the profile earlier",
    ),
)

SOURCES_AND_STREAMS = (
    Rule(
        "epochs of a stream",
        ("data.streaming", "train.epochs"),
        lambda c: c.data.streaming and c.train.epochs is not None,
        "the length of a stream's epoch is known only at the epoch's end",
        "set train.steps instead of train.epochs",
    ),
    Rule(
        "grouped stream",
        ("data.streaming", "data.batching"),
        lambda c: c.data.streaming and c.data.batching == "grouped",
        "a stream is not sorted by length",
        "set data.batching=packed, which wastes least, or padded",
    ),
    Rule(
        "shuffling within lanes",
        ("data.shuffle_buffer", "data.stream_lanes"),
        lambda c: c.data.streaming and c.data.shuffle and c.data.shuffle_buffer < 2 * c.data.stream_lanes,
        "records are shuffled within their lane, and the buffer has room for only one record per lane",
        "in a new run, set data.shuffle_buffer to many times data.stream_lanes, or lower data.stream_lanes",
    ),
    Rule(
        "weights without shuffling",
        ("data.train", "data.shuffle"),
        lambda c: not c.data.shuffle and _has_weights(c.data.train),
        "weighted sources are sampled at random",
        "set data.shuffle=true, or remove the weights",
    ),
)

ADAPTERS = (
    Rule(
        "adapters of a model from scratch",
        ("lora", "task.from_scratch"),
        lambda c: c.lora is not None and getattr(c.task, "from_scratch", None) is not None,
        "adapters modify a pretrained model; frozen random weights learn nothing",
        "remove lora, or name a pretrained model and remove task.from_scratch",
    ),
    Rule(
        "adapters and new embeddings",
        ("lora", "task.resize_embeddings"),
        lambda c: c.lora is not None and bool(getattr(c.task, "resize_embeddings", False)),
        "the added rows would stay random",
        "add the tokens to the model beforehand, or remove lora",
    ),
    Rule(
        "a packed base that is sharded",
        ("lora.base", "parallel"),
        lambda c: c.lora is not None and c.lora.packs and _splits_weights(c),
        "packed weights are neither split nor copied between devices",
        "set parallel.strategy to ddp or zero1 and the degrees to 1, or remove lora.base: in bf16 training, frozen "
        "weights are in bf16 anyway",
    ),
    Rule(
        "DoRA with split or copied layers",
        ("lora.dora", "parallel"),
        lambda c: (
            c.lora is not None
            and c.lora.dora
            and (c.strategy.has_engine or c.strategy.many_devices or c.parallel.tensor > 1)
        ),
        "DoRA reads whole weights besides multiplying with them",
        "set lora.dora=false; or parallel.strategy to fsdp, zero1 or ddp, and parallel.tensor=1",
    ),
)

EVALUATION = (
    Rule(
        "evaluation without data",
        ("eval.every", "eval.patience", "eval.at_start", "eval.samples", "data.validation"),
        lambda c: (
            c.data.validation in (None, [])
            and c.data.validation_share is None
            and any((c.eval.every, c.eval.patience, c.eval.at_start, c.eval.samples))
        ),
        "there is no validation data to evaluate on",
        "set data.validation or data.validation_share, or remove these settings of eval",
    ),
    Rule(
        "names of training data",
        ("data.train", "data.validation_share"),
        lambda c: c.data.validation_share is None and any(source.name for source in _sections(c.data.train)),
        "only evaluations have scores by source",
        "give names in data.validation and data.test; in data.train, with data.validation_share",
    ),
    Rule(
        "patience",
        ("eval.patience", "eval.every"),
        lambda c: c.eval.patience is not None and c.eval.every is None,
        "patience counts evaluations, and there are none before the end",
        "set eval.every",
    ),
)

OPTIMIZATION = (
    Rule(
        "warm-up",
        ("optim.warmup", "train.steps"),
        lambda c: _warmup_share(c) >= 1,
        "training ends before the warm-up does",
        "set optim.warmup below train.steps, or as a fraction such as 0.05",
    ),
    Rule(
        "warm-up and decay",
        ("optim.schedule", "optim.warmup", "optim.decay", "train.steps"),
        lambda c: c.optim.schedule == "wsd" and _warmup_share(c) < 1 < _warmup_share(c) + c.optim.decay,
        "warm-up and decay take more than all steps",
        "make optim.warmup and optim.decay add up to at most 1",
    ),
    Rule(
        "momentum",
        ("optim.name", "optim.momentum"),
        lambda c: c.optim.momentum is not None and c.optim.name not in ("sgd", "muon"),
        "only sgd and muon have momentum",
        "remove optim.momentum; adamw's counterpart is optim.betas, and your own optimizer's is in optim.options",
    ),
    Rule(
        "muon_precision",
        ("optim.name", "optim.muon_precision"),
        lambda c: c.optim.muon_precision != "auto" and c.optim.name != "muon",
        "only muon reads it",
        "remove optim.muon_precision; the setting precision sets the dtype of matrix products",
    ),
    Rule(
        "state_dtype",
        ("optim.name", "optim.state_dtype"),
        lambda c: c.optim.state_dtype != "fp32" and c.optim.name != "adamw",
        "only adamw can keep its state in bf16 or int8",
        "remove optim.state_dtype, or set optim.name=adamw",
    ),
    Rule(
        "moments in 8 bits in shards",
        ("optim.state_dtype", "parallel"),
        lambda c: c.optim.state_dtype == "int8" and (c.strategy.shards_parameters or c.parallel.tensor > 1),
        "their blocks do not end where shards do, and a run must be able to go on with other shards",
        "set optim.state_dtype=bf16; or parallel.strategy=zero1 or ddp, and parallel.tensor=1",
    ),
    Rule(
        "betas and eps",
        ("optim.name", "optim.betas", "optim.eps"),
        lambda c: (
            c.optim.name not in ("adamw", "muon") and (c.optim.betas, c.optim.eps) != (DEFAULTS.betas, DEFAULTS.eps)
        ),
        "only adamw and muon (for the parameters that adamw updates) use them",
        "remove optim.betas and optim.eps; your own optimizer's are in optim.options",
    ),
    Rule(
        "options of optimizers",
        ("optim.name", "optim.options"),
        lambda c: bool(c.optim.options) and ":" not in c.optim.name,
        "the settings of drawbar's own optimizers are in the section optim itself",
        "remove optim.options, or set optim.name=package.module:Class",
    ),
    Rule(
        "min_lr_ratio",
        ("optim.schedule", "optim.min_lr_ratio"),
        lambda c: c.optim.min_lr_ratio != 0 and c.optim.schedule in ("constant", "inverse_sqrt"),
        "this schedule has no end value",
        "remove optim.min_lr_ratio, or choose linear, cosine, polynomial or wsd",
    ),
    Rule(
        "decay",
        ("optim.schedule", "optim.decay"),
        lambda c: c.optim.decay != DEFAULTS.decay and c.optim.schedule != "wsd",
        "only wsd has a decay phase",
        "remove optim.decay, or set optim.schedule=wsd",
    ),
    Rule(
        "frozen parameters under adapters",
        ("lora", "optim.groups"),
        lambda c: c.lora is not None and any(group.frozen for group in c.optim.groups),
        "adapters freeze all else already, and checkpoints hold only what is trained",
        "name what to adapt in lora.modules, and what to train besides in lora.train",
    ),
    Rule(
        "frozen parameters with a learning rate",
        ("optim.groups",),
        lambda c: any(g.frozen and (g.lr, g.weight_decay) != (None, None) for g in c.optim.groups),
        "frozen parameters have neither a learning rate nor weight decay",
        "remove lr and weight_decay of these groups, or frozen",
    ),
    Rule(
        "learning rates of groups",
        ("optim.lr", "optim.groups"),
        lambda c: c.optim.lr == 0 and any(group.lr for group in c.optim.groups),
        "groups learn at a fixed share of optim.lr",
        "set optim.lr to the largest learning rate of the groups, and freeze the others",
    ),
    Rule(
        "power",
        ("optim.schedule", "optim.power"),
        lambda c: c.optim.power != DEFAULTS.power and c.optim.schedule != "polynomial",
        "only polynomial has an exponent",
        "remove optim.power, or set optim.schedule=polynomial",
    ),
)

RULES: tuple[Rule, ...] = (*PARALLEL, *chain(*from_guests("rules")), *ADAPTERS)
"""The rules for every command on a run, not only for training."""

TRAIN_RULES: tuple[Rule, ...] = (
    FLEX_TRAINING,
    *TRAINING,
    *PADDING_FREE,
    *BATCHES_AND_STEPS,
    *SOURCES_AND_STREAMS,
    *EVALUATION,
    *OPTIMIZATION,
)
"""The rules that training checks in addition to ``RULES``."""


def check_rules(config: LoadedConfig | RunConfig, rules: Sequence[Rule] = RULES) -> None:
    """Refuse settings that do not combine.

    Args:
        config: the configuration; with a ``LoadedConfig``, the error also shows the origin of each setting.
        rules: ``RULES``, and for training ``RULES + TRAIN_RULES``.

    Raises:
        UserError: names every broken rule, the values that break it, the reason and the remedy.
    """
    loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, {}, None)
    broken = [rule for rule in rules if rule.broken(loaded.config)]
    if broken:
        raise one_error([(f"{_shown(rule, loaded)}: {rule.reason}", rule.remedy) for rule in broken])


def check_degrees(config: RunConfig, world_size: int) -> int:
    """Check that ``world_size`` is a multiple of the ranks per model. Returns the number of data-parallel ranks: those
    that read different rows.

    Raises:
        UserError: the processes do not form complete pipelines, tensor-parallel groups or replicas.
    """
    parallel = config.parallel
    model_ranks = parallel.model_ranks
    if world_size % model_ranks:
        above = -(-world_size // model_ranks) * model_ranks
        raise UserError(
            f"{world_size} process{'es' * (world_size > 1)} cannot hold models of {model_ranks} ranks each "
            f"(parallel.pipeline={parallel.pipeline}, context={parallel.context}, tensor={parallel.tensor})",
            where="parallel",
            remedy=f"start {above} processes (launch.nproc={above}), or choose degrees whose product divides "
            f"{world_size}",
        )
    data = world_size // model_ranks
    if parallel.features.shards_parameters and data % parallel.replicate:
        raise UserError(
            f"parallel.replicate={parallel.replicate} does not divide the {data} data-parallel ranks",
            where="parallel.replicate",
            remedy=f"set parallel.replicate to {_choices(_divisors(data), parallel.replicate)}",
        )
    return data


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse what cannot be split over ``world_size`` processes: the model, the batch, or the lanes of a stream.

    Raises:
        UserError: names values that would work.
    """
    ranks = check_degrees(config, world_size)
    batch, micro = config.train.global_batch, config.train.micro_batch
    each = "processes" if ranks == world_size else f"data-parallel ranks ({world_size} processes)"
    if batch % ranks:
        below, above = batch // ranks * ranks, -(-batch // ranks) * ranks
        fitting = f"{below} or {above}" if below else str(above)
        start = f", or start {_choices(_divisors(batch), ranks)} processes" if ranks == world_size else ""
        raise UserError(
            f"train.global_batch={batch} cannot be split evenly over {ranks} {each}",
            remedy=f"set train.global_batch to {fitting}{start}",
        )
    share = batch // ranks
    if micro != "auto" and share % micro:
        raise UserError(
            f"train.micro_batch={micro} does not divide the {share} rows that each process gets "
            f"(train.global_batch={batch} over {ranks} {each})",
            remedy=f"set train.micro_batch to {_choices(_divisors(share), micro)}, or to auto",
        )
    lanes = config.data.stream_lanes
    if config.data.streaming and lanes % ranks:
        raise UserError(
            f"data.stream_lanes={lanes} cannot be split evenly over {ranks} {each}",
            where="data.stream_lanes",
            remedy=f"start {_choices(_divisors(lanes), ranks)} {each.partition(' (')[0]}; or set data.stream_lanes="
            f"{math.lcm(lanes, ranks)}, in a new run or a fork (--fork NEWNAME)",
        )


def check_guests(loaded: LoadedConfig, ranks: int) -> None:
    """Let guests check the run, as far as they can before its ranks are started.

    Raises:
        UserError: a guest refuses the run.
    """
    for check in from_guests("check_start"):
        check(loaded, ranks)


def resolve_micro_batch(config: RunConfig, data_ranks: int) -> int:
    """Rows per forward and backward of one process, as a number, for samples without tokens and for engines that need
    one. (With ``auto``, samples with tokens are split by tokens: ``train.batches.train_micro_batch``.)

    Here ``auto`` is the largest divisor of the process's share of the global batch that keeps a micro-batch at or below
    ``MICRO_BATCH_TOKENS`` tokens (rows × ``data.sequence_length``), but at least one row.
    """
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    share = max(1, config.train.global_batch // data_ranks)
    fitting = [rows for rows in _divisors(share) if rows * config.data.sequence_length <= MICRO_BATCH_TOKENS]
    return max(fitting, default=1)


def _shown(rule: Rule, loaded: LoadedConfig) -> str:
    """``train.steps=10 (config.yaml:3), lora={"rank": 4} (command line)``: for a section, only what was set; without
    origins if these are unknown."""
    texts = []
    for key in rule.keys:
        value = lookup(loaded.config, key)
        own = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        place = f" ({loaded.origin(key)})" if loaded.origins else ""
        texts.append(f"{key}={show(own)}{place}")
    return ", ".join(texts)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _choices(numbers: list[int], near: int) -> str:
    """``1, 2 or 4``: the up to four numbers closest to ``near``."""
    closest = sorted(sorted(numbers, key=lambda number: abs(number - near))[:4])
    return f"{', '.join(map(str, closest[:-1]))} or {closest[-1]}" if len(closest) > 1 else str(closest[0])
