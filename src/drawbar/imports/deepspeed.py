"""Rules for DeepSpeed's JSON: it is passed on, and what it says of the run becomes settings, too."""

from functools import partial
from typing import Any

from drawbar.imports.conversion import Conversion, Rule, absent, aside
from drawbar.imports.training_arguments import steps, zero_settings
from drawbar.util.registry import has_folder

AUTO = (None, "auto")
DEFAULTS = {"lr": 1e-3, "weight_decay": 0.0}
"""Of DeepSpeed's Adam, where they are not ours."""


def batch(c: Conversion, total: Any, micro: Any, accumulation: Any) -> None:
    rows, cycles = (None if value in AUTO else steps(value) for value in (micro, accumulation))
    if total not in AUTO:
        c.set("train.global_batch", steps(total), c.names[0])
    elif rows:
        c.set("train.global_batch", rows * (cycles or 1) * c.processes, *c.names[1:])
        c.note(f"train.global_batch is {rows} × {cycles or 1} × {c.processes}: --data-parallel N for other processes")
    if rows is None and cycles and total not in AUTO:
        rows = steps(steps(total) / cycles / c.processes)
    if rows:
        c.set("train.micro_batch", rows, *c.names[1:])
    c.no_effect("it follows from the run's settings")


def precision(c: Conversion, bf16: Any, fp16: Any) -> None:
    if "auto" in (bf16, fp16):
        c.no_effect("precision says it")
    else:
        c.set("precision", "bf16" if bf16 else "fp16" if fp16 else "fp32")


def optimizer(c: Conversion, kind: Any, *params: Any) -> None:
    from drawbar.deepspeed.config_json import OPTIMIZERS  # a guest, which may not be there

    name = next((ours for ours, theirs in OPTIMIZERS.items() if kind in theirs), None)
    if name is None:
        c.refuse(f"the optimizer {kind} has no counterpart; drawbar runs {', '.join(OPTIMIZERS)} on DeepSpeed")
        return
    c.set("optim.name", name, c.names[0])
    for key, value, place in zip(("lr", "betas", "eps", "weight_decay", "momentum"), params, c.names[1:], strict=True):
        if value not in AUTO:
            c.set(f"optim.{key}", value, place)
        elif value is None and key in DEFAULTS:
            c.set(f"optim.{key}", DEFAULTS[key], place)
    c.no_effect("it is filled in from optim.*")


def schedule(c: Conversion, kind: Any, total: Any, warmup: Any, peak: Any, shape: Any) -> None:
    from drawbar.deepspeed.config_json import SCHEDULES

    if kind not in SCHEDULES:
        c.refuse(f"the schedule {kind} has no counterpart; there are {', '.join(SCHEDULES)}")
        return
    if shape != "linear":
        c.refuse("by default the warm-up is logarithmic, and here a straight line: say warmup_type: linear", c.names[0])
    c.set("optim.schedule", SCHEDULES[kind], c.names[0])
    warmup = 1000 if warmup is None else warmup  # DeepSpeed's default
    for setting, value, place in zip(("train.steps", "optim.warmup"), (total, warmup), c.names[1:], strict=False):
        if value not in AUTO:
            c.set(setting, steps(value), place)
    if peak not in AUTO:
        c.set("optim.lr", peak, c.names[3])
    c.no_effect("it is filled in from optim.*")


def zero(c: Conversion, section: Any) -> None:
    c.set("parallel.strategy", "deepspeed")
    for setting, value in zero_settings(section).items():
        c.set(setting, value)


def _rules() -> dict[str, Rule]:
    from drawbar.deepspeed.config_json import OLDER, REFUSED

    refused = {key: partial(absent, why) for key, why in REFUSED.items()}
    older = {key: partial(absent, f"an older name: write {today}") for key, today in OLDER.items()}
    log = "drawbar logs itself: tracking.*"
    logs = dict.fromkeys(
        ("steps_per_print", "tensorboard", "wandb", "csv_monitor", "monitor_config"), partial(aside, log)
    )
    return {
        **refused,
        **older,
        **logs,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps": batch,
        "gradient_clipping": lambda c, value: (
            c.no_effect("it is filled in from train.gradient_clip")
            if value == "auto"
            else c.set("train.gradient_clip", float(value) or None)
        ),
        "bf16.enabled fp16.enabled": precision,
        "optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay "
        "optimizer.params.momentum": optimizer,
        "scheduler.type scheduler.params.total_num_steps scheduler.params.warmup_num_steps "
        "scheduler.params.warmup_max_lr scheduler.params.warmup_type": schedule,
        "zero_optimization": zero,
        "*": lambda c, everything: c.set("deepspeed.config", c.file.path.as_posix()),
    }


RULES = _rules() if has_folder("deepspeed") else {}
