"""The JSON that DeepSpeed gets: what follows from the run's settings, and the rest of a user's own file.

What the file says of the run must agree with the settings; what would silently change the run is refused; the
rest is passed on as it is. Optimizer and schedule are drawbar's own: the file's are compared, and left out.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.config.io.fields import lookup, show
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.io.source import read_text
from drawbar.config.rules.rule import one_error
from drawbar.config.rules.rule_table import check_degrees, check_world, resolve_micro_batch
from drawbar.config.schema.run_config import RunConfig
from drawbar.deepspeed import settings as zero
from drawbar.errors import UserError
from drawbar.util.strict_json import read_json

AUTO = "auto"
NEVER = 1_000_000_000
"""``steps_per_print``: so large that DeepSpeed never prints; its pipeline does not take null."""
ROWS, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO, OPTIMIZER, SCHEDULER = "zero_optimization", "optimizer.params", "scheduler.params"
OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""Sections of ``zero_optimization``, and the settings of ``deepspeed`` that say the same."""
OPTIMIZERS = {"adamw": ("adamw", "AdamW", "adam", "Adam"), "sgd": ("sgd", "SGD")}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
SECTIONS = (
    *("optimizer", OPTIMIZER, "scheduler", SCHEDULER, "bf16", "fp16", "data_types", "tensor_parallel"),
    *(ZERO, *(f"{ZERO}.{name}" for name in OFFLOADS)),
)
"""What must be an object: keys of it are compared, or added."""

_ANOTHER_MODEL = "it would train another model"
_CHECKPOINTS = "checkpoints are drawbar's own, of one format for every strategy: checkpoint.*"
_FP32 = "trained weights and the optimizer's state are fp32 in every run"
_REMOVED = "DeepSpeed has removed it"
REFUSED = {
    "elasticity": "the batch would change with the number of processes",
    "autotuning": "it would try out other batches and ZeRO stages; train.micro_batch=auto finds what fits",
    "curriculum_learning": "it would cut the samples that data.* describes",
    "data_efficiency": "it would choose and cut the samples that data.* describes",
    "dataloader_drop_last": "batches are drawbar's own: data.*",
    "progressive_layer_drop": "it would leave out layers",
    "compression_training": _ANOTHER_MODEL,
    "quantize_training": _ANOTHER_MODEL,
    "weight_quantization": _ANOTHER_MODEL,
    "eigenvalue": "it belongs to quantize_training",
    "amp": "DeepSpeed has removed NVIDIA's amp; set precision=bf16 or fp16",
    "torch_autocast": "the setting precision says what the dtype is",
    "sparse_attention": "DeepSpeed has removed it; the setting is task.attention",
    "sparse_gradients": "DeepSpeed has removed it: gradients of embeddings are dense",
    "graph_harvesting": "DeepSpeed has removed it; the setting is parallel.compile",
    "compile": "parallel.compile compiles blocks, in the same way for every strategy",
    "activation_checkpointing": "parallel.activation_checkpointing says what is computed again",
    "pipeline": "parallel.pipeline and parallel.cuts say how the model is cut into stages",
    "hybrid_engine": "the model that writes texts is the one that is trained: task.generation",
    "expert_parallel": "drawbar has no expert parallelism; it cuts matrices by parallel.tensor",
    "sequence_parallel_size": "parallel.context alone cuts sequences",
    "data_parallel_size": "it follows from launch.nproc and the degrees in parallel.*",
    "managed_gradient_accumulation": "the engine says when a batch is complete: train.micro_batch",
    **dict.fromkeys(("checkpoint", "checkpoint_writer", "datastates_ckpt", "nebula"), _CHECKPOINTS),
    "bf16.bf16_master_weights_and_grads": _FP32,
    "bf16.bf16_optimizer_states": _FP32,
    "fp16.fp16_master_weights_and_grads": _FP32,
    "tensor_parallel.vocab_parallel_lm_head": "only DeepSpeed's own loss takes logits of a cut vocabulary",
    f"{ZERO}.zenflow": "it would update with gradients of earlier steps",
    f"{ZERO}.legacy_stage1": _REMOVED,
    f"{ZERO}.mics_shard_size": "DeepSpeed has removed it; set parallel.strategy=fsdp parallel.replicate=N",
    f"{ZERO}.mics_hierarchical_params_gather": _REMOVED,
    f"{ZERO}.zeropp_loco_param": _REMOVED,
    f"{ZERO}.offload_optimizer.super_offload": "it is an optimizer of DeepSpeed's; the run's is optim.name",
}
"""What would silently change the run, and what drawbar does itself: why each is refused. A value that only says
that it is off is left out."""
OLDER = {
    "bfloat16": '"bf16"',
    f"{ZERO}.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    f"{ZERO}.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    f"{ZERO}.cpu_offload_params": '"offload_param": {"device": "cpu"}',
}
"""Older names of what is compared with the run's settings, and how to write it today."""
_WARM_UP = "the warm-up here is a straight line that begins at 0"
_OUR_OPTIMIZER = "the optimizer is drawbar's own"
FIXED: dict[str, tuple[Any, str]] = {
    "gradient_allreduce_op": ("mean", "the loss is divided by the number of targets in the global batch"),
    f"{ZERO}.compute_grad_norm": (True, "every run says what the gradients' norm is"),
    "zero_allow_untested_optimizer": (True, _OUR_OPTIMIZER),
    "zero_force_ds_cpu_optimizer": (False, _OUR_OPTIMIZER),
    f"{OPTIMIZER}.adam_w_mode": (True, "weight decay is decoupled here, as in AdamW"),
    f"{OPTIMIZER}.bias_correction": (True, "adamw here corrects the bias"),
    f"{SCHEDULER}.warmup_type": ("linear", _WARM_UP),
    f"{SCHEDULER}.warmup_min_lr": (0, _WARM_UP),
    f"{SCHEDULER}.warmup_min_ratio": (0, _WARM_UP),
    f"{SCHEDULER}.last_batch_iteration": (-1, "a run resumes at the step of its checkpoint"),
}
"""The one value that every run has, and why."""
SAME_UPDATE = (
    "optimizer.legacy_fusion",
    *(f"{OPTIMIZER}.{name}" for name in ("torch_adam", "fused", "foreach")),
)
"""Of the optimizer: which code computes the same update."""
CHANGES_LOSSES = {
    f"{ZERO}.zero_quantized_weights": "parameters are rounded on their way between ranks",
    f"{ZERO}.zero_quantized_nontrainable_weights": "frozen parameters are rounded",
    f"{ZERO}.zero_quantized_gradients": "gradients are rounded on their way between ranks",
    "communication_data_type": "gradients are summed over ranks in this format",
    "data_types": "gradients are added up in the formats that it names",
}
"""Passed on, with a warning: keys that make losses differ from those of the other strategies."""


@dataclass(frozen=True)
class DeepSpeedJson:
    """What ``deepspeed.initialize`` gets as ``config``."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Warnings for the log, a sentence each."""


@dataclass(frozen=True)
class Expected:
    """What a key of the file may say, if it is there."""

    setting: str
    """The run's setting that says it."""
    values: tuple[Any, ...]
    """The run's value first; empty if no value in the file says the same as the setting."""
    remedy: str = ""
    """What to do where the file has another value; by default, give the setting that value."""


def check_start(loaded: LoadedConfig, ranks: int) -> None:
    """Refuse a DeepSpeed run that will not start, as far as that can be seen without its processes.

    Raises:
        UserError: see ``deepspeed_json``.
    """
    if zero.is_deepspeed(loaded.config):
        check_world(loaded.config, ranks)
        deepspeed_json(loaded, ranks, loaded.config.precision)


def deepspeed_json(config: LoadedConfig | RunConfig, ranks: int, precision: str) -> DeepSpeedJson:
    """The JSON of this run.

    Args:
        config: with a ``LoadedConfig`` an error also says where each setting came from.
        ranks: processes, all of them.
        precision: ``fp32``, ``bf16`` or ``fp16``; or ``auto`` where only errors are of interest.

    Raises:
        UserError: the user's file cannot be read, or contradicts the run: one error with all that is wrong.
            Or the processes do not make up whole models.
    """
    loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, {}, None)
    config = loaded.config
    path = zero.DeepSpeedSection.of(config).config
    theirs = _read(path) if path is not None else {}
    run = _of_run(config, ranks, precision)
    expected = _expected(config, run, precision)
    problems = [*_contradictions(loaded, theirs, expected), *_refusals(theirs, expected)]
    if problems:
        raise one_error([(f"{path}: {what}", remedy) for what, remedy in problems])
    values = _merged(_merged(_defaults(config, precision), _passed_on(theirs)), run)
    if config.parallel.tensor > 1 and config.parallel.pipeline == 1:
        # with AutoTP, DeepSpeed multiplies by all ranks, and would refuse the right number
        del values["train_batch_size"]
    notes = [
        f"{path}: {key}: {meaning}; the losses are not those of other strategies"
        for key, meaning in CHANGES_LOSSES.items()
        if not _is_off(_at(theirs, key))
    ]
    return DeepSpeedJson(values, tuple(notes))


def _read(path: str) -> dict[str, Any]:
    text = read_text(Path(path), "JSON")
    try:
        values = read_json(text)
    except ValueError as error:
        remedy = "no comments, no comma behind the last entry, and names in double quotes"
        raise UserError(f"the file is not valid JSON: {error}", where=path, remedy=remedy) from error
    if not isinstance(values, dict):
        remedy = 'write `{"zero_optimization": {"stage": "auto"}}`'
        raise UserError("the file holds no JSON object at its top level", where=path, remedy=remedy)
    for key in SECTIONS:
        if not isinstance(_at(values, key) or {}, dict):
            raise UserError(f"{key} is no JSON object", where=path, remedy='write {"…": …}, or remove it')
    return values


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if it is not there, or is ``"auto"``."""
    value: Any = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if value == AUTO else value


def _of_run(config: RunConfig, ranks: int, precision: str) -> dict[str, Any]:
    """What follows from the run's settings."""
    data_ranks = check_degrees(config, ranks)
    rows = 1 if config.train.micro_batch_tokens is not None else resolve_micro_batch(config, data_ranks)
    stage = zero.zero_stage(config)
    values: dict[str, Any] = {
        "train_batch_size": config.train.global_batch,
        ROWS: rows,
        # only consistent, as DeepSpeed demands: the engine tells it when a global batch is complete
        STEPS: config.train.global_batch // data_ranks // rows,
        "gradient_clipping": config.train.gradient_clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16" and stage > 0},
        "fp16": {"enabled": precision == "fp16"},
        ZERO: {"stage": stage},
    }
    places = zero.offload_optimizer(config), zero.offload_parameters(config)
    values[ZERO] |= {
        name: _offload(place) for name, place in zip(OFFLOADS, places, strict=True) if place != zero.NOWHERE
    }
    if precision == "bf16" and stage == 0:
        # with bf16 weights, stage 0 adds gradients up in bf16; with fp32 weights and autocast, it is DDP
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if config.parallel.tensor > 1:
        # a sharded vocabulary gives logits that only DeepSpeed's own loss takes
        values["tensor_parallel"] = {"autotp_size": config.parallel.tensor, "vocab_parallel_lm_head": False}
    return values


def _offload(place: str) -> dict[str, str]:
    return {"device": "cpu"} if place == zero.HOST else {"device": "nvme", "nvme_path": place}


def _defaults(config: RunConfig, precision: str) -> dict[str, Any]:
    """What holds where a user's file says nothing else."""
    values: dict[str, Any] = {"steps_per_print": NEVER}
    if precision == "fp16":  # as drawbar.parallel.precision.LossScaler
        values["fp16"] = {
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        }
    sharded = zero.zero_stage(config) > 0
    if precision != "fp32" and (sharded or precision != "bf16"):
        values["communication_data_type"] = "fp32"
        if sharded:  # stage 0 cannot add gradients up in another format than theirs
            values["data_types"] = {"grad_accum_dtype": "fp32"}
    return values


def _expected(config: RunConfig, run: Mapping[str, Any], precision: str) -> dict[str, Expected]:
    """What each key may say that might contradict a setting.

    Args:
        run: what follows from the settings.
        precision: ``auto`` where it is not known yet, so that nothing contradicts it.
    """
    train, tensor = config.train, config.parallel.tensor
    clip = Expected("train.gradient_clip", (run["gradient_clipping"],), "set train.gradient_clip, to null for 0")
    degree = Expected("parallel.tensor", (tensor, 0) if tensor == 1 else (tensor,))
    expected = {
        "train_batch_size": Expected("train.global_batch", (train.global_batch,)),
        "gradient_clipping": clip,
        f"{OPTIMIZER}.max_grad_norm": clip,
        "tensor_parallel.autotp_size": degree,
        "tensor_parallel.tp.tp_size": degree,
        **_of_zero(config, run[ZERO]),
        **_of_optimizer(config),
        **_of_schedule(config),
    }
    if train.micro_batch_tokens is not None:  # a micro-batch has as many rows as fit: no number says that
        remedy = "set train.micro_batch_tokens=null and train.micro_batch"
        expected |= dict.fromkeys((ROWS, STEPS), Expected("train.micro_batch_tokens", (), remedy))
    else:
        remedy = f"set train.micro_batch to the {run[ROWS] * run[STEPS]} rows of a rank, divided by it"
        expected[ROWS] = Expected("train.micro_batch", (run[ROWS],))
        expected[STEPS] = Expected("train.micro_batch", (run[STEPS],), remedy)
    for name in ("bf16", "fp16") if precision != AUTO else ():
        remedy = "set precision to what the file enables"
        expected[f"{name}.enabled"] = Expected("precision", (name == precision,), remedy)
    return expected


def _of_zero(config: RunConfig, run: Mapping[str, Any]) -> dict[str, Expected]:
    setting = _first_set(config, "parallel.zero_stage", "deepspeed.preset")
    remedy = "set another deepspeed.preset, or parallel.zero_stage instead" if setting.endswith("preset") else ""
    expected = {f"{ZERO}.stage": Expected(setting, (run["stage"],), remedy)}
    for name, own in OFFLOADS.items():
        setting = _first_set(config, f"deepspeed.{own}", "parallel.offload", "deepspeed.preset")
        remedy = f"set deepspeed.{own} (or parallel.offload, or the preset) to what the file says"
        place = run.get(name, {"device": zero.NOWHERE})
        expected |= {f"{ZERO}.{name}.{key}": Expected(setting, (value,), remedy) for key, value in place.items()}
    return expected


def _first_set(config: RunConfig, *settings: str) -> str:
    """The first of these settings that is set; the first of all where none is."""
    for setting in settings:
        if show(lookup(config, setting)) not in ("null", "false"):
            return setting
    return settings[0]


def _of_optimizer(config: RunConfig) -> dict[str, Expected]:
    optim = config.optim
    remedy = "set optim.name=adamw or sgd; DeepSpeed runs no other optimizer here"
    expected = {"optimizer.type": Expected("optim.name", OPTIMIZERS.get(optim.name, ()), remedy)}
    values = {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "momentum": optim.momentum or 0.0,
    }
    return expected | {f"{OPTIMIZER}.{name}": Expected(f"optim.{name}", (value,)) for name, value in values.items()}


def _of_schedule(config: RunConfig) -> dict[str, Expected]:
    optim = config.optim
    same = [name for name, schedule in SCHEDULES.items() if schedule == optim.schedule]
    if optim.schedule == "linear" and optim.min_lr_ratio:
        same = []  # DeepSpeed's ends at 0
    steps = "train.steps" if optim.schedule_steps is None else "optim.schedule_steps"
    total = lookup(config, steps)
    warmup: float | None = optim.warmup
    if isinstance(warmup, float):  # as drawbar.optim.schedules.warmup_steps
        warmup = math.ceil(warmup * total) if total else None
    ours = ", ".join(f"{name} is {schedule}" for name, schedule in SCHEDULES.items())
    remedy = f"set optim.schedule ({ours}, where optim.min_lr_ratio=0)"
    return {
        "scheduler.type": Expected("optim.schedule", tuple(same), remedy),
        f"{SCHEDULER}.warmup_max_lr": Expected("optim.lr", (optim.lr,)),
        f"{SCHEDULER}.cos_min_ratio": Expected("optim.min_lr_ratio", (optim.min_lr_ratio,)),
        f"{SCHEDULER}.total_num_steps": Expected(steps, (total,)),
        f"{SCHEDULER}.warmup_num_steps": Expected("optim.warmup", (warmup,)),
    }


def _contradictions(
    loaded: LoadedConfig, theirs: Mapping[str, Any], expected: Mapping[str, Expected]
) -> Iterator[tuple[str, str]]:
    for key, ours in expected.items():
        value = _at(theirs, key)
        if value is None or value in ours.values:
            continue
        has = lookup(loaded.config, ours.setting)
        place = f" ({loaded.origin(ours.setting)})" if loaded.origins else ""
        meaning = ""
        if ours.values and show(ours.values[0]) != show(has):
            meaning = f", which makes it {json.dumps(ours.values[0])}"
        yield (
            f"{key} = {json.dumps(value)} contradicts {ours.setting}={show(has)}{place}{meaning}",
            f'write "auto" in the file, or {ours.remedy or f"set {ours.setting}={show(value)}"}',
        )


def _refusals(theirs: Mapping[str, Any], compared: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Problems that no setting can correct.

    Args:
        compared: the keys that are compared with the settings.
    """
    reasons = {key: reason for key, reason in REFUSED.items() if not _is_off(_at(theirs, key))}
    for key, (value, reason) in FIXED.items():
        if _at(theirs, key) not in (None, value):
            reasons[key] = reason
    known = {*compared, *FIXED, *SECTIONS, *SAME_UPDATE}
    for section in ("optimizer", OPTIMIZER, "scheduler", SCHEDULER):
        for name, value in (_at(theirs, section) or {}).items():
            key = f"{section}.{name}"
            if key not in known and not _is_off(value):
                reasons[key] = "drawbar makes optimizer and schedule itself, and optim.* has no such setting"
    for key, reason in reasons.items():
        yield f"{key} = {json.dumps(_at(theirs, key))}: {reason}", "remove it from the file"
    for key, today in OLDER.items():
        if _at(theirs, key) is not None:
            yield f"{key} is an older name, which drawbar does not read", f"write {today}"


def _is_off(value: Any) -> bool:
    """Whether a value only says that there is no such thing, or that numbers are fp32, as they are anyway."""
    if isinstance(value, dict):
        return value.get("enabled") in (False, AUTO) or all(_is_off(inner) for inner in value.values())
    # a size of 1, or of -1: nothing is split
    return value is not True and value in (None, False, 0, 1, -1, AUTO, "fp32")


def _passed_on(theirs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The file without what is null, ``"auto"`` or off, and without optimizer and schedule."""
    kept: dict[str, Any] = {}
    for name, value in theirs.items():
        key = f"{prefix}{name}"
        if value is not None and value != AUTO and key not in ("optimizer", "scheduler", *REFUSED):
            kept[name] = _passed_on(value, f"{key}.") if isinstance(value, dict) else value
    return kept


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` merged over ``base``."""
    merged = dict(base)
    for name, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
