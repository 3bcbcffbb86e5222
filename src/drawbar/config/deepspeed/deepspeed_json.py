"""The JSON that DeepSpeed gets, made from the run's configuration.

The optimizer and the learning rate are drawbar's own, so the JSON has no ``optimizer`` and no ``scheduler``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drawbar.config.deepspeed.deepspeed_checks import add_contradictions
from drawbar.config.deepspeed.deepspeed_file import read_json, without_auto
from drawbar.config.deepspeed.zero_settings import (
    HOST,
    NOWHERE,
    is_deepspeed,
    offload_optimizer,
    offload_parameters,
    zero_stage,
)
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.rules.rule import one_error
from drawbar.config.rules.rule_table import check_degrees, check_world, resolve_micro_batch
from drawbar.config.schema.deepspeed_section import DeepSpeedSection
from drawbar.config.schema.run_config import RunConfig

NEVER = 1_000_000_000
"""``steps_per_print``: so many steps that DeepSpeed never prints; its pipeline does not take null."""
ZERO_SETTINGS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "reduce_scatter": "reduce_scatter",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
    "sub_group_size": "sub_group_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}
"""Settings of the section ``deepspeed``, and their names in ``zero_optimization``."""
_OURS = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
"""What a file cannot change."""


@dataclass(frozen=True)
class DeepSpeedJson:
    """What ``deepspeed.initialize`` gets as ``config``."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Warnings for the log, a sentence each."""


def deepspeed_json(config: LoadedConfig | RunConfig, ranks: int, precision: str) -> DeepSpeedJson:
    """The JSON of this run, with what the user's own file adds.

    Args:
        config: with a ``LoadedConfig`` an error also says where each setting came from.
        ranks: processes, all of them.
        precision: ``fp32``, ``bf16`` or ``fp16``; or ``auto`` where only errors are of interest.

    Raises:
        UserError: the file cannot be read, or contradicts the configuration: one error with all that is wrong. Or the
            processes do not make up whole models.
    """
    loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, {}, None)
    config = loaded.config
    values = _generated(config, ranks, precision)
    if config.deepspeed is None or config.deepspeed.config is None:
        return DeepSpeedJson(values)
    file = read_json(config.deepspeed.config)
    add_contradictions(file, loaded, precision, values, ZERO_SETTINGS)
    if file.problems:
        raise one_error(file.problems)
    theirs, automatic = without_auto(file.values)
    merged = _merged(values, theirs)
    for name in ("optimizer", "scheduler"):
        merged.pop(name, None)
    merged |= {name: values[name] for name in _OURS}
    for name in ("bf16", "fp16"):  # whether one is enabled also depends on the ZeRO stage
        merged[name] = {**merged[name], "enabled": values[name]["enabled"]}
    if "train_batch_size" not in values:
        merged.pop("train_batch_size", None)
    open_keys = [
        key for key in automatic if not _has(values, key) and key.split(".")[0] not in ("optimizer", "scheduler")
    ]
    notes = list(file.notes)
    if open_keys:
        notes.append(f'{file.path}: "auto" is DeepSpeed\'s default for {", ".join(open_keys)}')
    return DeepSpeedJson(merged, tuple(notes))


def check_deepspeed(loaded: LoadedConfig, ranks: int) -> None:
    """Refuse a DeepSpeed run that will not start, as far as that can be seen without its processes.

    Raises:
        UserError: see ``deepspeed_json``.
    """
    if is_deepspeed(loaded.config):
        check_world(loaded.config, ranks)
        deepspeed_json(loaded, ranks, loaded.config.precision)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """``theirs`` merged over ``ours``. Where the two still differ, ours is only a default that no setting stands for
    (``steps_per_print``), and theirs is taken."""
    merged = dict(ours)
    for name, value in theirs.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _has(values: Mapping[str, Any], key: str) -> bool:
    name, _, rest = key.partition(".")
    return name in values and (not rest or (isinstance(values[name], dict) and _has(values[name], rest)))


def _generated(config: RunConfig, ranks: int, precision: str) -> dict[str, Any]:
    """The JSON, but for what a user's file adds."""
    stage = zero_stage(config)
    values: dict[str, Any] = _batches(config, ranks)
    values |= {
        "gradient_clipping": config.train.gradient_clip or 0.0,
        "steps_per_print": NEVER,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16" and stage > 0},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": _zero(config, stage),
    }
    if precision == "fp16":  # as drawbar.parallel.precision.LossScaler
        values["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    if precision == "bf16" and stage == 0:
        # with bf16 weights, stage 0 adds gradients up in bf16, too; with fp32 weights and autocast, stage 0 is DDP
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision != "fp32":
        values["communication_data_type"] = "fp32"
        if stage > 0:  # stage 0 cannot add gradients up in another format than theirs
            values["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.parallel.tensor > 1:
        # a sharded vocabulary gives logits that only DeepSpeed's own loss takes
        values["tensor_parallel"] = {"autotp_size": config.parallel.tensor, "vocab_parallel_lm_head": False}
    return values


def _batches(config: RunConfig, ranks: int) -> dict[str, int]:
    """Batch sizes, consistent as DeepSpeed demands; drawbar's engine tells it when a global batch is complete."""
    data_ranks = check_degrees(config, ranks)
    share = config.train.global_batch // data_ranks
    rows = 1 if config.train.micro_batch_tokens is not None else resolve_micro_batch(config, data_ranks)
    values = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": share // rows}
    if config.parallel.tensor == 1 or config.parallel.pipeline > 1:
        # left out with AutoTP, where DeepSpeed multiplies by all ranks, and would refuse the right number
        values = {"train_batch_size": config.train.global_batch, **values}
    return values


def _zero(config: RunConfig, stage: int) -> dict[str, Any]:
    section = config.deepspeed or DeepSpeedSection()
    found: dict[str, Any] = {"stage": stage}
    for name, place in (("optimizer", offload_optimizer(config)), ("param", offload_parameters(config))):
        if place != NOWHERE:
            found[f"offload_{name}"] = _offload(place, section.pin_memory)
    for name, theirs in ZERO_SETTINGS.items():
        if (value := getattr(section, name)) is not None:
            found[theirs] = value
    return found


def _offload(place: str, pin_memory: bool | None) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "cpu"} if place == HOST else {"device": "nvme", "nvme_path": place}
    return found if pin_memory is None else {**found, "pin_memory": pin_memory}
