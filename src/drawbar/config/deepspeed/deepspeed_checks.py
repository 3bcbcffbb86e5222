"""Where a user's DeepSpeed JSON and the run's configuration contradict each other: both places, and the remedy."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drawbar.config.deepspeed.deepspeed_file import DeepSpeedFile, offload_target
from drawbar.config.deepspeed.deepspeed_keys import ZERO_SECTION
from drawbar.config.deepspeed.zero_settings import NOWHERE, offload_optimizer, offload_parameters, zero_stage
from drawbar.config.io.fields import lookup, show
from drawbar.config.io.load_config import LoadedConfig

OPTIMIZERS = ("adamw", "sgd", "adafactor")
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OPTIMIZER_PARAMS, SCHEDULER_PARAMS = "optimizer.params", "scheduler.params"


@dataclass
class FileCheck:
    """Compares a DeepSpeed JSON with the run's configuration; contradictions go to ``file.problems``."""

    file: DeepSpeedFile
    loaded: LoadedConfig

    def expect(self, key: str, setting: str, expected: Any, remedy: str | None = None) -> None:
        """Report the key if the file has another value than ``expected``, which follows from ``setting``.

        Args:
            remedy: what to do instead of writing ``"auto"`` in the file; by default, give the setting the file's value.
        """
        value = self.file.at(key)
        if value is None or _equal(value, expected):
            return
        has = lookup(self.loaded.config, setting)
        meaning = "" if _equal(has, expected) else f", which is {json.dumps(expected)} here"
        self._report(key, value, f"{self._shown(setting)}{meaning}", remedy or f"set {setting}={show(value)}")

    def refuse_value(self, key: str, value: Any, reason: str, remedy: str) -> None:
        """Report a value that no setting agrees with."""
        self.file.refuse(key, value, reason, remedy)

    def _report(self, key: str, value: Any, other: str, remedy: str) -> None:
        self.file.problems.append(
            (
                f"{self.file.path}: {key} = {json.dumps(value)} contradicts {other}",
                f'write "auto" in the file, or {remedy}',
            )
        )

    def contradict(self, key: str, setting: str, reason: str, remedy: str) -> None:
        """Report that the file's value contradicts a setting, for ``reason``; the values are not compared."""
        self._report(key, self.file.at(key), f"{self._shown(setting)}: {reason}", remedy)

    def _shown(self, setting: str) -> str:
        place = f" ({self.loaded.origin(setting)})" if self.loaded.origins else ""
        return f"{setting}={show(lookup(self.loaded.config, setting))}{place}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def add_contradictions(
    file: DeepSpeedFile, loaded: LoadedConfig, precision: str, generated: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Add what contradicts the configuration to ``file.problems``.

    Args:
        precision: ``auto`` where it is not known yet.
        generated: the JSON that this configuration makes without the file.
        names: settings of the section ``deepspeed``, and their names in ``zero_optimization``.
    """
    check = FileCheck(file, loaded)
    _compare_batches(check, generated)
    _compare_precision_and_degree(check, precision)
    _compare_zero(check, names)
    _compare_optimizer(check)
    _compare_schedule(check)
    _check_other_keys(file)


def _compare_batches(check: FileCheck, generated: Mapping[str, Any]) -> None:
    file, train = check.file, check.loaded.config.train
    check.expect("train_batch_size", "train.global_batch", train.global_batch)
    key = "train_micro_batch_size_per_gpu"
    if train.micro_batch_tokens is None:
        check.expect(key, "train.micro_batch", generated[key])
    elif (rows := file.at(key)) is not None:
        remedy = f"set train.micro_batch={rows} and train.micro_batch_tokens=null"
        reason = "a micro-batch has as many rows as fit"
        check.contradict(key, "train.micro_batch_tokens", reason, remedy)
    _compare_accumulation(check, generated[key], generated["gradient_accumulation_steps"])
    remedy = f"set train.gradient_clip={show(file.at('gradient_clipping') or None)}"
    check.expect("gradient_clipping", "train.gradient_clip", train.gradient_clip or 0.0, remedy)


def _compare_precision_and_degree(check: FileCheck, precision: str) -> None:
    file, tensor = check.file, check.loaded.config.parallel.tensor
    for name in ("bf16", "fp16") if precision != "auto" else ():
        key = f"{name}.enabled"
        remedy = f"set precision={name if file.at(key) else 'fp32'}"
        check.expect(key, "precision", name == precision, remedy)
    for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if (file.at(key) or 1) != tensor:  # 0 stands for 1, too
            check.expect(key, "parallel.tensor", tensor)


def _compare_accumulation(check: FileCheck, rows: int, steps: int) -> None:
    key, train = "gradient_accumulation_steps", check.loaded.config.train
    value, share = check.file.at(key), rows * steps
    if value is None or value == steps:
        return
    dividing = f"set train.micro_batch={share // int(value)}" if value >= 1 and share % value == 0 else None
    if train.micro_batch_tokens is not None:
        remedy = f"{dividing or 'set train.micro_batch'} and train.micro_batch_tokens=null"
        check.contradict(key, "train.micro_batch_tokens", "a micro-batch has as many rows as fit", remedy)
        return
    batch = train.global_batch // share * rows * value
    reason = f"each data-parallel rank has {share} rows of it, in {steps} micro-batches of {rows}"
    remedy = f"set train.global_batch={batch}" + (f", or {dividing}" if dividing else "")
    check.contradict(key, "train.global_batch", reason, remedy)


def _compare_zero(check: FileCheck, names: Mapping[str, str]) -> None:
    config, file = check.loaded.config, check.file
    assert config.deepspeed is not None
    check.expect(f"{ZERO_SECTION}.stage", "parallel.zero_stage", zero_stage(config))
    places = {
        "offload_optimizer": ("offload_optimizer", offload_optimizer(config)),
        "offload_param": ("offload_parameters", offload_parameters(config)),
    }
    for name, (setting, expected) in places.items():
        key = f"{ZERO_SECTION}.{name}"
        place = offload_target(file.at(key))
        if place is not None and place != expected:
            own = getattr(config.deepspeed, setting) is not None or not config.parallel.offload
            reason = "it is kept on the device" if expected == NOWHERE else f"it lies in {expected}"
            remedy = f"set deepspeed.{setting}={place}"
            if place == NOWHERE:
                remedy = "set parallel.offload=false" if config.parallel.offload else remedy
            check.contradict(key, f"deepspeed.{setting}" if own else "parallel.offload", reason, remedy)
        if config.deepspeed.pin_memory is not None:
            check.expect(f"{key}.pin_memory", "deepspeed.pin_memory", config.deepspeed.pin_memory)
    for setting, name in names.items():
        if (value := getattr(config.deepspeed, setting)) is not None:
            check.expect(f"{ZERO_SECTION}.{name}", f"deepspeed.{setting}", value)


def _compare_optimizer(check: FileCheck) -> None:
    file, optim = check.file, check.loaded.config.optim
    kind = file.at("optimizer.type")
    if kind is not None:
        name = {"adam": "adamw"}.get(kind.lower(), kind.lower())
        if name not in OPTIMIZERS:
            check.refuse_value(
                "optimizer.type",
                kind,
                f"the optimizers here are {', '.join(OPTIMIZERS)}",
                "write one of them, or remove it",
            )
        elif name != optim.name:
            check.contradict("optimizer.type", "optim.name", "it is another optimizer", f"set optim.name={name}")
        if (
            file.at(f"{OPTIMIZER_PARAMS}.adam_w_mode") is False
            and (file.at(f"{OPTIMIZER_PARAMS}.weight_decay") or optim.weight_decay) != 0
        ):
            reason = "weight decay is decoupled here, as in AdamW"
            check.refuse_value(
                f"{OPTIMIZER_PARAMS}.adam_w_mode", False, reason, "remove it, or set optim.weight_decay=0"
            )
    for name in ("lr", "betas", "eps", "weight_decay"):
        check.expect(f"{OPTIMIZER_PARAMS}.{name}", f"optim.{name}", getattr(optim, name))
    check.expect(f"{OPTIMIZER_PARAMS}.momentum", "optim.momentum", optim.momentum or 0.0)
    clip = check.loaded.config.train.gradient_clip
    check.expect(f"{OPTIMIZER_PARAMS}.max_grad_norm", "train.gradient_clip", clip or 0.0)
    if file.at(f"{OPTIMIZER_PARAMS}.bias_correction") is False:
        check.refuse_value(f"{OPTIMIZER_PARAMS}.bias_correction", False, "adamw here corrects the bias", "remove it")


def _compare_schedule(check: FileCheck) -> None:
    file, config = check.file, check.loaded.config
    kind = file.at("scheduler.type")
    if kind is None:
        return
    if kind not in SCHEDULES:
        reason = f"of DeepSpeed's schedules, drawbar has {', '.join(SCHEDULES)}"
        check.refuse_value(
            "scheduler.type", kind, reason, "remove the section, and set optim.schedule and optim.warmup"
        )
        return
    schedule = SCHEDULES[kind]
    if config.optim.schedule != schedule:
        remedy = f"set optim.schedule={schedule}"
        check.contradict("scheduler.type", "optim.schedule", f"{kind} is {schedule}", remedy)
    check.expect(f"{SCHEDULER_PARAMS}.warmup_max_lr", "optim.lr", config.optim.lr)
    check.expect(f"{SCHEDULER_PARAMS}.cos_min_ratio", "optim.min_lr_ratio", config.optim.min_lr_ratio)
    if kind == "WarmupDecayLR" and config.optim.min_lr_ratio:
        remedy = "set optim.min_lr_ratio=0"
        check.contradict("scheduler.type", "optim.min_lr_ratio", "it decays to warmup_min_lr", remedy)
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if value := file.at(f"{SCHEDULER_PARAMS}.{name}"):
            check.refuse_value(
                f"{SCHEDULER_PARAMS}.{name}", value, "the warm-up here begins at 0", 'write 0, or "auto"'
            )
    if (last := file.at(f"{SCHEDULER_PARAMS}.last_batch_iteration")) not in (None, -1):
        reason = "a run goes on from the step of its checkpoint"
        check.refuse_value(f"{SCHEDULER_PARAMS}.last_batch_iteration", last, reason, "remove it")
    _compare_steps(check)


def _compare_steps(check: FileCheck) -> None:
    file, config = check.file, check.loaded.config
    total, warmup = config.train.steps, config.optim.warmup
    steps: int | None = warmup if isinstance(warmup, int) else None
    if steps is None and total is not None:
        steps = math.ceil(warmup * total)  # as drawbar.optim.schedules.warmup_steps
    for key, setting, expected in (
        (f"{SCHEDULER_PARAMS}.total_num_steps", "train.steps", total),
        (f"{SCHEDULER_PARAMS}.warmup_num_steps", "optim.warmup", steps),
    ):
        value = file.at(key)
        if value is not None and expected is None:
            check.contradict(
                key,
                "train.epochs",
                "the number of steps depends on the data",
                f"set train.steps={show(total or value)}",
            )
        else:
            check.expect(key, setting, expected)
    shape = file.at(f"{SCHEDULER_PARAMS}.warmup_type")
    if shape not in (None, "linear"):
        remedy = 'write "warmup_type": "linear"'
        check.refuse_value(f"{SCHEDULER_PARAMS}.warmup_type", shape, "the warm-up here is a straight line", remedy)
    elif shape is None and steps != 0:
        file.note(
            f"{SCHEDULER_PARAMS}.warmup_type",
            "DeepSpeed's default is a logarithmic warm-up, and this run's is a straight line",
        )


def _check_other_keys(file: DeepSpeedFile) -> None:
    if file.at("gradient_allreduce_op") not in (None, "mean"):
        reason = "the loss is divided by the number of targets in the global batch, not left as a sum"
        file.refuse("gradient_allreduce_op", file.at("gradient_allreduce_op"), reason, "remove it from the file")
    if file.at(f"{ZERO_SECTION}.compute_grad_norm") is False:
        reason = "every run says what the gradients' norm is"
        file.refuse(f"{ZERO_SECTION}.compute_grad_norm", False, reason, "remove it from the file")
    for key in ("zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"):
        if file.at(key) is (key == "zero_force_ds_cpu_optimizer"):
            file.note(key, "without effect here: optim.* says which optimizer it is, and drawbar makes it")
