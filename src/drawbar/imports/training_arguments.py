"""Rules for the keys of transformers' ``TrainingArguments``, and what the rules of several sources share."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawbar.imports.conversion import OFF, Conversion, Rule, is_off

EXACT_ADAMW = (
    *("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "adamw_apex_fused", "paged_adamw"),
    "paged_adamw_32bit",
)
ROUNDED_ADAMW = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8"),
    "ao_adamw_8bit",
)
ROUNDED: dict[str, Any] = {"optim.name": "adamw"}
"""The settings of such an optimizer."""
OTHER_OPTIMIZERS = {"sgd": "sgd", "rmsprop": "torch.optim:RMSprop", "adagrad": "torch.optim:Adagrad"}
SCHEDULES = {
    **{name: name for name in ("linear", "cosine", "polynomial", "constant", "inverse_sqrt")},
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "warmup_stable_decay": "wsd",
}
ATTENTIONS = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}


def steps(value: Any) -> int:
    """A whole number. Raises ValueError for another one."""
    if float(value) != int(float(value)):
        raise ValueError(f"{value} is no whole number")
    return int(float(value))


def duration(c: Conversion, most_steps: Any, epochs: Any) -> None:
    if most_steps is not None and steps(most_steps) > 0:
        c.set("train.steps", steps(most_steps), c.names[0])
        c.no_effect("the number of steps takes precedence", c.names[1])
    else:
        c.set("train.epochs", float(epochs), c.names[1])
        c.no_effect("the number of epochs counts", c.names[0])


def batch(c: Conversion, micro: Any, accumulation: Any) -> None:
    rows = steps(micro) * steps(accumulation or 1)
    c.set("train.global_batch", rows * c.processes)
    c.set("train.micro_batch", steps(micro), c.names[0])
    c.note(
        f"train.global_batch is {steps(micro)} × {steps(accumulation or 1)} × {c.processes}: if {c.processes} is not "
        "the number of data-parallel processes (GPUs) there, import with --data-parallel N"
    )


def schedule(c: Conversion, name: Any, warmup: Any, ratio: Any, options: Any) -> None:
    """As ``transformers.get_scheduler``; ``constant`` has no warm-up there."""
    options = json.loads(options) if isinstance(options, str) else dict(options or {})
    if name not in SCHEDULES:
        c.refuse(f"the schedule {name} has no counterpart; there are {', '.join(SCHEDULES)}", c.names[0])
        return
    c.set("optim.schedule", SCHEDULES[name], c.names[0])
    set_warmup(c, *((0, 0) if name == "constant" else (warmup, ratio)))
    inside = isinstance(c.value(c.names[3]), dict)
    for key, value in options.items():
        place = f"{c.names[3]}.{key}" if inside else c.names[3]
        if key in ("min_lr_rate", "min_lr_ratio"):
            c.set("optim.min_lr_ratio", float(value), place)
        elif key in ("min_lr", "lr_end"):
            c.set("optim.min_lr_ratio", _share_of_peak(c, value), place)
        elif key == "power":
            c.set("optim.power", float(value), place)
        elif key == "num_decay_steps" and c.value("max_steps"):
            c.set("optim.decay", steps(value) / steps(c.value("max_steps")), place)
        elif (name, key, value) == ("cosine_with_restarts", "num_cycles", 1) or value in OFF:
            c.no_effect("it is so by default", place)
        else:
            c.refuse(f"{key}={value} of {name} has no counterpart", place)
    if name == "polynomial" and "lr_end" not in options:
        c.set("optim.min_lr_ratio", _share_of_peak(c, 1e-7), c.names[0])
    if (name == "cosine_with_min_lr" and "optim.min_lr_ratio" not in c.settings) or (
        name == "warmup_stable_decay" and "optim.decay" not in c.settings
    ):
        c.refuse(
            f"{name} needs its lr_scheduler_kwargs (min_lr or min_lr_rate; num_decay_steps, with max_steps)", c.names[0]
        )


def _share_of_peak(c: Conversion, rate: Any) -> float:
    return float(f"{float(rate) / float(c.value('learning_rate')):.12g}")


def set_warmup(c: Conversion, count: Any, ratio: Any) -> None:
    """A positive number of steps takes precedence over the ratio; below 1 it is one, too."""
    if count is not None and float(count) > 0:
        c.set("optim.warmup", float(count) if float(count) < 1 else steps(count), c.names[1])
        c.no_effect("warmup_steps takes precedence", c.names[2])
        return
    c.set("optim.warmup", float(ratio) if ratio else 0, *(c.names[2:3] if ratio else c.names[1:3]))
    c.no_effect("the ratio counts, or there is no warm-up", *c.names[1:3])


def optimizer(c: Conversion, name: Any, decay: Any, beta1: Any, beta2: Any, eps: Any) -> None:
    if name in EXACT_ADAMW or name in ROUNDED_ADAMW:
        for setting, value in (ROUNDED if name in ROUNDED_ADAMW else {"optim.name": "adamw"}).items():
            c.set(setting, value, c.names[0])
        betas = [usual if beta is None else float(beta) for beta, usual in ((beta1, 0.9), (beta2, 0.999))]
        c.set("optim.betas", betas, *c.names[2:4])
        c.set("optim.eps", 1e-8 if eps is None else float(eps), c.names[4])
    elif name in OTHER_OPTIMIZERS:
        c.set("optim.name", OTHER_OPTIMIZERS[name], c.names[0])
        c.no_effect(f"{name} has none", *c.names[2:])
    else:
        c.refuse(
            f"{name} has no counterpart that makes the same updates; optim.name has adamw, or any class", c.names[0]
        )
    if name in ROUNDED_ADAMW:
        c.note("its moments have few bits there, and 32 here; optim.state_dtype=int8 gives them 8", c.names[0])
    c.set("optim.weight_decay", float(decay or 0), c.names[1])


def precision(c: Conversion, bf16: Any, fp16: Any) -> None:
    """``fp16`` alone takes the place of a default of ``bf16``."""
    if fp16 and (bf16 == "auto" or not c.given(c.names[0])):
        bf16 = False
    c.set("precision", "auto" if bf16 == "auto" else "bf16" if bf16 else "fp16" if fp16 else "fp32")


def weights_dtype(c: Conversion, dtype: Any) -> None:
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES and c.value("bf16") is None and c.value("fp16") is None:  # it computes in the weights' dtype
        c.set("precision", DTYPES[name])
    if name in DTYPES:
        c.note(f"the weights are {name} there, and fp32 here; precision says in what matrices are multiplied")
    elif name not in ("float32", "fp32", "auto"):
        c.refuse(f"there is no precision {name}")
    c.no_effect("trained weights are always fp32")


def attention(c: Conversion, name: Any) -> None:
    if name in ("auto", "xformers"):
        c.no_effect("task.attention=auto: the same numbers by another kernel")
    else:
        c.set("task.attention", ATTENTIONS.get(name, name))


def checkpointing(c: Conversion, value: Any) -> None:
    if not is_off(value):
        c.set("parallel.activation_checkpointing", "full")


def output(c: Conversion, folder: Any) -> None:
    path = Path(str(folder).rstrip("/") or "run")
    c.set("run.dir", path.parent.as_posix())
    c.set("run.name", re.sub(r"[^\w.-]", "-", path.name, flags=re.ASCII)[:128].lstrip(".-") or "run")


def evaluation(c: Conversion, strategy: Any, every: Any) -> None:
    if strategy == "steps" or (strategy is None and c.source.title == "axolotl" and every):
        _every(c, "eval.every", every if every is not None else c.value("logging_steps") or 500)
    else:
        c.aside("a run always evaluates at its end; for more, set eval.every, in steps (see `drawbar prepare`)")


def saving(c: Conversion, strategy: Any, every: Any) -> None:
    if strategy in (None, "steps") and every is not None:
        _every(c, "checkpoint.every", every)
    else:
        c.aside("a run saves every half hour, what scores best, and at its end: checkpoint.every, in steps or a time")


def _every(c: Conversion, setting: str, count: Any) -> None:
    total = c.value("max_steps")
    if float(count) >= 1:
        c.set(setting, steps(count))
    elif total and float(total) > 0:  # a share of all steps
        c.set(setting, max(1, int(float(count) * steps(total))))
    else:
        c.aside(f"a share of the steps, whose number the file does not say: set {setting} to a number of steps")
    c.no_effect("it is so by default", c.names[0])


def logging(c: Conversion, every: Any) -> None:
    c.set("tracking.log_every", steps(every)) if float(every) >= 1 else c.aside("set tracking.log_every, in steps")


def trackers(c: Conversion, names: Any) -> None:
    given = set(names if isinstance(names, list) else str(names or "none").replace(",", " ").split())
    c.set("tracking.tensorboard", bool({"tensorboard", "all"} & given))
    if others := sorted(given - {"tensorboard", "all", "none"}):
        c.aside(f"set tracking.trackers={{{others[0]}: {{project: NAME}}}}: it needs a project, and a login")


def fsdp(c: Conversion, words: Any, options: Any) -> None:
    options = {str(key).removeprefix("fsdp_"): value for key, value in (options or {}).items()}
    words = words if isinstance(words, list) else str(words or "").split()
    sharding = {str(options.get("sharding_strategy", "")).lower(), *map(str, words)}
    if is_off(words) and is_off(options):
        return
    if any(word.startswith("hybrid") for word in sharding):
        c.refuse("the number of replicas is not in the file: set parallel.strategy=fsdp and parallel.replicate")
    else:
        c.set("parallel.strategy", "ddp" if "no_shard" in sharding else "fsdp")
        if "shard_grad_op" in sharding or options.get("reshard_after_forward") is False:
            c.set("parallel.reshard", False)
        if "offload" in words or options.get("offload_params"):
            c.set("parallel.offload", True)
        if options.get("activation_checkpointing"):
            c.set("parallel.activation_checkpointing", "full")


def deepspeed_file(c: Conversion, name: Any) -> None:
    """A JSON for DeepSpeed is passed on; its ZeRO stage and offloading must be settings, too."""
    if not isinstance(name, str):
        c.refuse("write this object to a JSON file, and give its path here")
        return
    path = next((place for place in (Path(name), c.file.path.parent / name) if place.is_file()), None)
    if path is None:
        c.refuse(f"there is no file {name} here, and the configuration must say its ZeRO stage")
        return
    c.set("parallel.strategy", "deepspeed")
    c.set("deepspeed.config", path.as_posix())
    for setting, value in zero_settings(json.loads(path.read_text("utf-8")).get("zero_optimization") or {}).items():
        c.set(setting, value)


def zero_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a section ``zero_optimization``."""
    found: dict[str, Any] = {"parallel.zero_stage": section["stage"]} if isinstance(section.get("stage"), int) else {}
    for theirs, ours in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        target = section.get(theirs) or {}
        if target.get("device") not in (None, "none", "auto"):
            found[f"deepspeed.{ours}"] = "cpu" if target["device"] == "cpu" else target.get("nvme_path", "nvme")
    return found


def set_lora(c: Conversion, rank: Any, alpha: Any, dropout: Any, modules: Any, train: Any, rslora: Any) -> None:
    """Adapters. The last six names of the entry are those of these values."""
    names = c.names[-6:]
    c.set("lora.rank", steps(rank), names[0])
    c.set("lora.alpha", float(alpha), names[1])
    is_preference = c.settings.get("task.type") == "preference"
    c.set("lora.dropout", 0.0 if is_preference else float(dropout or 0), names[2])
    c.set("lora.rslora", bool(rslora), names[5])
    c.set("lora.train", listed(train), names[4])
    if isinstance(modules, str) and re.search(r"[\\()|*^$]", modules):
        c.refuse("a regular expression for modules has no counterpart: list the ends of their names", names[3])
        return
    found = ["linear" if name in ("all", "all-linear") else name for name in listed(modules)]
    c.set("lora.modules", "linear" if found == ["linear"] else found or "attention", names[3], *c.names[1:-6])


METHODS = {"sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
"""Losses of preferences, as the trainers call them, and as ``task.method`` does."""
OF_METHODS = {
    "dpo": ("beta", "label_smoothing"),
    "simpo": ("beta", "gamma"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
"""The options of ``task`` that each method has; those not named have ``beta`` alone."""
OTHERWISE = {
    "orpo": "TRL's ORPO also learns the prompt, and averages over the tokens of a batch; here, over those of an answer",
    "kto": "the divergence is estimated from each batch there, and here from the global batch",
}
"""In what a method differs there."""


def preference(c: Conversion, method: str, key: str, **options: str) -> None:
    """The task ``preference``. ``key`` names the method, and ``options`` the key of each option of the task."""
    c.set("task.type", "preference", key)
    c.set("task.method", method, key)
    for option, name in options.items():
        if option in OF_METHODS.get(method, ("beta",)) and c.value(name) is not None:
            c.set(f"task.{option}", float(c.value(name)), name)
        else:
            c.no_effect(f"{method} does not have it", name)
    c.note("dropout is off there; here lora.dropout is 0, and a model keeps its own (in config.json)", key)
    if method in OTHERWISE:
        c.note(OTHERWISE[method], key)
    if method == "simpo" and not is_off(c.value("cpo_alpha")):
        c.refuse("with cpo_alpha, SimPO also learns the better answer: set it to 0", "cpo_alpha", key)


def has_adapters(c: Conversion) -> bool:
    """Whether the file trains LoRA, in the words of any of the trainers."""
    adapter = c.value("adapter") in ("lora", "qlora") or c.value("finetuning_type") == "lora"
    return adapter or not is_off(c.value("use_peft"))


def dora(c: Conversion, on: Any) -> None:
    if is_off(on) or not has_adapters(c):
        c.no_effect("it is off, or there are no adapters")
    else:
        c.set("lora.dora", True)


def quantized(c: Conversion, four_bits: Any, eight_bits: Any, kind: Any, double: Any) -> None:
    """Names: of the two switches, of the kind of 4 bits, and of double quantization."""
    if is_off(four_bits) and is_off(eight_bits):
        c.no_effect("quantization is off")
    elif not has_adapters(c):
        c.refuse("quantized weights learn only through adapters (lora.base)", *c.names[:2])
    elif not is_off(four_bits) and kind not in (None, "nf4"):
        c.refuse(f"4 bits are nf4 here, and not {kind}", c.names[2])
    else:
        c.set("lora.base", "int8" if is_off(four_bits) else "nf4", *c.names[:2])
        c.no_effect("nf4 here has double quantization; int8 has a scale for each row", *c.names[2:])
        c.note("the frozen weights are packed by drawbar's own code: rounded as in QLoRA, not bit by bit as there")


def listed(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else str(value or "").replace(",", " ").split()


def is_file(name: str) -> bool:
    """Whether a source of data is a file, not a dataset of the Hub or a folder."""
    ends = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
    return name.removesuffix(".gz").endswith(ends)


def hub_source(path: Any, subset: Any = None, split: Any = None, usual: str = "train") -> dict[str, Any]:
    """A source of ``data.*``: a dataset of the Hub, or a folder."""
    found = {"dataset": str(path), "subset": subset, "split": split}
    return {key: str(value) for key, value in found.items() if value is not None and (key, value) != ("split", usual)}


RULES: dict[str, Rule] = {
    "output_dir": output,
    "max_steps num_train_epochs": duration,
    "per_device_train_batch_size gradient_accumulation_steps": batch,
    "lr_scheduler_type warmup_steps warmup_ratio lr_scheduler_kwargs": schedule,
    "optim weight_decay adam_beta1 adam_beta2 adam_epsilon": optimizer,
    "max_grad_norm": lambda c, value: c.set("train.gradient_clip", float(value) or None),
    "bf16 fp16": precision,
    "dtype": weights_dtype,
    "torch_dtype": weights_dtype,
    "attn_implementation": attention,
    "gradient_checkpointing": checkpointing,
    "activation_checkpointing": checkpointing,
    "fsdp fsdp_config": fsdp,
    "deepspeed": deepspeed_file,
    "eval_strategy eval_steps": evaluation,
    "save_strategy save_steps": saving,
    "logging_steps": logging,
    "report_to": trackers,
    "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant": quantized,
    "metric_for_best_model": lambda c, value: c.set("eval.metric", str(value).removeprefix("eval_")),
}
