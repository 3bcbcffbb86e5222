"""Rules for torchtitan's TOML files."""

from typing import Any

from drawbar.imports import training_arguments as shared
from drawbar.imports.conversion import Conversion, Rule, is_off

DATASETS = {"c4": ("allenai/c4", "en", "train"), "c4_validation": ("allenai/c4", "en", "validation")}
DECODERS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")


def model(c: Conversion, name: Any, flavor: Any, folder: Any, tokenizer: Any) -> None:
    """torchtitan trains from random weights; what a flavor is stands in its Python code."""
    if name not in DECODERS:
        c.refuse(f"the model {name} is not one that predicts the next token of a text", "model.name")
    elif "debug" in str(flavor):
        c.refuse(f"only torchtitan knows the flavor {flavor}: describe it in task.from_scratch", "model.flavor")
    c.set("task.model", folder, "model.hf_assets_path")
    c.set("task.from_scratch", {}, "model.name", "model.flavor")
    c.set("task.tokenizer", tokenizer or folder, "model.tokenizer_path", "model.hf_assets_path")
    c.note(f"the folder's config.json says what the model is, and should be {name} {flavor}'s", "model.flavor")


def data(c: Conversion, name: Any, path: Any, on: Any, held: Any, every: Any, batches: Any, rows: Any) -> None:
    names = dict(zip(("train", "path", "on", "held", "every", "batches", "rows"), c.names, strict=True))
    if path:
        c.set("data.train", shared.hub_source(path), names["path"], names["train"])
    elif name in DATASETS:
        c.set("data.train", shared.hub_source(*DATASETS[name]), names["train"])
    else:
        c.refuse(f"only torchtitan knows the dataset {name}: give its folder as training.dataset_path", names["train"])
    c.set("data.streaming", True, names["train"])
    c.set("data.batching", "packed", names["train"])
    c.note(
        "texts are joined and cut there; here a text is cut by itself, and rows are filled with several", names["train"]
    )
    if on and held in DATASETS:
        c.set("data.validation", shared.hub_source(*DATASETS[held], usual="validation"), names["on"], names["held"])
        c.set("eval.every", shared.steps(every or 10), names["every"])
        if batches and batches > 0:
            c.set("data.limit.validation", batches * shared.steps(rows or 8), names["batches"], names["rows"])
    c.aside("set data.validation and eval.every", *c.names[2:]) if on else c.no_effect(
        "validation is off", *c.names[2:]
    )


def batch(c: Conversion, local: Any, total: Any) -> None:
    shared.batch(c, local, 1) if total in (None, -1) else c.set("train.global_batch", total)
    if total not in (None, -1):
        c.set("train.micro_batch", local, "training.local_batch_size")
    c.no_effect("it follows from the other", "training.global_batch_size")


def schedule(c: Conversion, warmup: Any, kind: Any, decay: Any, least: Any, total: Any) -> None:
    """Linear and cosine to the end; after a stable phase (``decay_ratio``), drawbar has only a cosine."""
    steps = c.value("training.steps") if total is None else total
    stable = decay is not None and round(steps * decay) + warmup < steps
    if kind not in ("linear", "cosine") or (stable and kind == "linear"):
        c.refuse(f"drawbar has no schedule with this {kind} decay: wsd decays as a cosine", c.names[1], c.names[2])
    elif stable:
        c.set("optim.decay", float(decay), c.names[2])
        if warmup and least:
            c.refuse("a wsd schedule with a smallest rate warms up from that rate here, and from 0 there", c.names[3])
    c.set("optim.schedule", "wsd" if stable else kind, *c.names[1:3])
    c.set("optim.warmup", min(warmup, steps), c.names[0])
    c.set("optim.min_lr_ratio", float(least or 0), c.names[3])
    if total is not None:
        c.set("optim.schedule_steps", total, c.names[4])
    c.note("the rate of step n there is that of step n + 1 here in the warm-up, which begins at 0", c.names[0])


def optimizer(c: Conversion, beta1: Any, beta2: Any, decay: Any) -> None:
    c.set("optim.betas", [float(beta1), float(beta2)], *c.names[:2])
    c.set("optim.weight_decay", float(decay), c.names[2])
    c.note("biases and norms have no weight decay here", c.names[2])


def strategy(c: Conversion, replicas: Any) -> None:
    sharded = c.value("parallelism.data_parallel_shard_degree") != 1
    c.set("parallel.strategy", "fsdp" if sharded else "auto")
    if replicas > 1 and sharded:
        c.set("parallel.replicate", replicas)


def recompute(c: Conversion, mode: Any, option: Any) -> None:
    every = str(option if option is not None else "2")
    if mode not in ("none", "full", "selective"):
        c.aside("set parallel.activation_checkpointing")
        return
    c.set(
        "parallel.activation_checkpointing",
        {"every": int(every)} if mode == "selective" and every.isdigit() else mode,
        c.names[0],
        *([c.names[1]] if mode == "selective" else []),
    )
    c.no_effect("mode is not selective", c.names[1])


def converters(c: Conversion, names: Any) -> None:
    if is_off(names):
        c.no_effect("there are none")
    elif names == ["float8"] and (recipe := c.value("quantize.linear.float8.recipe_name")) in (
        "tensorwise",
        "rowwise",
        None,
    ):
        c.set("parallel.fp8", recipe or "tensorwise")
        c.note("all linear layers of the blocks are fp8 here, whatever filter_fqns says")
    else:
        c.refuse(f"{', '.join(names)} has no counterpart; float8 is parallel.fp8")


RULES: dict[str, Rule] = {
    "job.dump_folder": shared.output,
    "model.name model.flavor model.hf_assets_path model.tokenizer_path": model,
    "model.converters": converters,
    "training.dataset training.dataset_path validation.enable validation.dataset validation.freq validation.steps "
    "validation.local_batch_size": data,
    "training.local_batch_size training.global_batch_size": batch,
    "lr_scheduler.warmup_steps lr_scheduler.decay_type lr_scheduler.decay_ratio lr_scheduler.min_lr_factor "
    "lr_scheduler.total_steps": schedule,
    "optimizer.beta1 optimizer.beta2 optimizer.weight_decay": optimizer,
    "parallelism.data_parallel_replicate_degree": strategy,
    "activation_checkpoint.mode activation_checkpoint.selective_ac_option": recompute,
}
