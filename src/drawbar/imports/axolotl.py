"""Rules for axolotl's files."""

import re
from collections.abc import Mapping
from typing import Any

from drawbar.imports import training_arguments as shared
from drawbar.imports.conversion import OFF, Conversion, Rule, is_off

FORMATS = ("json", "csv", "parquet", "arrow", "text")
ALWAYS = {"path", "name", "split", "type", "ds_type", "data_files", "trust_remote_code", "revision"}
OF_TEXTS = {"field", "text_column"}
OF_CHATS = {
    *("field_messages", "message_property_mappings", "message_field_role", "message_field_content"),
    *("roles", "roles_to_train", "train_on_eos", "chat_template"),
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OF_PAIRS = {
    *("field_messages", "field_chosen", "field_rejected", "message_property_mappings", "message_field_role"),
    *("message_field_content", "roles", "chat_template"),
}
"""Keys of a dataset, by the kind of its records."""
ROLES = {"user": {"user", "human"}, "assistant": {"assistant", "gpt", "chatgpt", "bot"}, "system": {"system"}}
PAIRS = (("role", "content"), ("from", "value"))


def datasets(c: Conversion, train: Any, pretraining: Any, test: Any, share: Any) -> None:
    """Where the records are, and of which one kind."""
    name = "datasets" if train else "pretraining_dataset"
    given = train or pretraining
    given = [{"path": given}] if isinstance(given, str) else given
    if name == "pretraining_dataset":
        given = [{"type": "pretrain", **one} for one in given]
        c.set("data.streaming", True, name)
        c.note("with sample_packing, texts may be joined and cut there; here, each is cut by itself", name)
    options = [_kind(c, one, f"{name}[{number}]") for number, one in enumerate(given)]
    if any(one != options[0] for one in options):
        c.refuse("a run reads records of one kind: convert these datasets to one of them", name)
    sources = [_source(c, one, f"{name}[{number}]") for number, one in enumerate(given)]
    for setting, value in (options[0] or {}).items():
        c.set(setting, value, name)
    if "task.text_column" not in c.settings:
        c.note("samples longer than sequence_len are dropped there, and truncated here", name)
    c.set("data.train", sources[0] if len(sources) == 1 else sources, name)
    if test:
        if any(_kind(c, one, f"test_datasets[{number}]") != options[0] for number, one in enumerate(test)):
            c.refuse("the records are not like those of the training data", "test_datasets")
        held = [_source(c, one, f"test_datasets[{number}]") for number, one in enumerate(test)]
        c.set("data.validation", held[0] if len(held) == 1 else held, "test_datasets")
    if is_off(share) or test:
        c.no_effect("nothing is held out", "val_set_size")
    elif float(share) < 1:
        c.set("data.validation_share", float(share), "val_set_size")
        c.note("the same share, of other records: the content of a record decides", "val_set_size")
    else:
        c.refuse("a number of records: write the share of the records that it is", "val_set_size")


def _kind(c: Conversion, one: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """The task's options for these records; None where they have no counterpart."""
    kind = one.get("type")
    options: dict[str, Any]
    if c.settings.get("task.type") == "preference":
        known, options = OF_PAIRS, _pairs(c, one, place)
    elif kind in ("completion", "pretrain"):
        known, options = OF_TEXTS, {"task.text_column": one.get("field") or one.get("text_column") or "text"}
    elif kind == "alpaca":  # the same text as axolotl's AlpacaPrompter
        known, options = set(), {"task.prompt_column": "instruction", "task.completion_column": "output"}
    elif kind in ("chat_template", "chat_template.default"):
        known, options = OF_CHATS, {"task.messages_column": one.get("field_messages") or "messages"}
    else:
        known, options = set(), {}
    if not options:
        c.refuse(f"records of the type {kind} have no counterpart: write them as chats of messages", f"{place}.type")
        return None
    if "chat_template" in known:
        _check_chat(c, one, place)
        if template := _template(c, one.get("chat_template") or c.value("chat_template")):
            options["task.chat_template"] = template
    for key in one.keys() - ALWAYS - known:
        if is_off(one[key]):
            c.no_effect("it is off", f"{place}.{key}")
        else:
            c.refuse(f"it has no counterpart for records of the type {kind}", f"{place}.{key}")
    return options


def _pairs(c: Conversion, one: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The task's options for records with two answers; none where they have no counterpart."""
    if one.get("type") in ("chat_template", "chat_template.default") and c.value("rl") != "orpo":
        prompt = one.get("field_messages") or "messages"
        c.note("TRL also ends answers with the tokenizer's end token, where a template has another", f"{place}.type")
    elif one.get("type") in ("chat_template.argilla", "chat_template.argilla_chat"):  # answers are whole chats
        prompt = None
    else:
        return {}
    answers = {f"task.{name}_column": one.get(f"field_{name}") or name for name in ("chosen", "rejected")}
    return {"task.prompt_column": prompt, **answers}


def _check_chat(c: Conversion, one: Mapping[str, Any], place: str) -> None:
    """Refuse what is not as drawbar reads and trains chats."""
    names = dict(one.get("message_property_mappings") or {})
    pair = (
        names.get("role") or one.get("message_field_role") or "role",
        names.get("content") or one.get("message_field_content") or "content",
    )
    unusual = {
        "message_property_mappings": pair not in PAIRS or bool(names.keys() - {"role", "content"}),
        "message_field_role": pair not in PAIRS,
        "roles_to_train": one.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]),
        "train_on_eos": one.get("train_on_eos") not in (None, "turn"),
        "roles": any(set(found) - ROLES.get(role, set()) for role, found in (one.get("roles") or {}).items()),
    }
    for key in [key for key, is_so in unusual.items() if is_so and key in one]:
        c.refuse(
            "messages have role and content, or ShareGPT's from and value, and the assistant's are trained",
            f"{place}.{key}",
        )


def _template(c: Conversion, name: Any) -> str | None:
    """What ``task.chat_template`` is; None for the tokenizer's own."""
    if c.value("chat_template_jinja"):
        return str(c.value("chat_template_jinja"))
    if name == "chatml":
        return CHATML
    if name not in (None, "tokenizer_default"):
        template_of_model(c, str(name), c.value("base_model"), "chat_template")
    return None


def template_of_model(c: Conversion, name: str, model: Any, key: str) -> None:
    """Take the tokenizer's own template for one that is named after the model; refuse any other."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"_(nothink|thinking)$", "", name.lower()))
    if plain in re.sub(r"[^a-z0-9]", "", str(model).lower()):
        c.note(f"the tokenizer's own template is taken for {c.source.title}'s {name}: compare them", key)
    else:
        c.refuse(f"the template {name} is {c.source.title}'s own, and not named after the model: remove it, and set "
                 "task.chat_template to a Jinja file after the import", key)  # fmt: skip


def _source(c: Conversion, one: Mapping[str, Any], place: str) -> Any:
    path, found = str(one.get("path")), one.get("data_files")
    if one.get("revision"):
        c.refuse("download that revision of the dataset to a folder, and name the folder", f"{place}.revision")
    if "://" in path:
        c.refuse("drawbar reads data from disks and the Hub: download them", f"{place}.path")
    if found and path not in FORMATS:
        c.refuse("download these files, and give them with `path: json` (csv, …)", f"{place}.data_files")
    if (found or shared.is_file(path)) and one.get("split") not in (None, "train"):
        c.refuse("files have no splits: data.limit.train takes the first records", f"{place}.split")
    if found:
        return {"files": found}
    return path if shared.is_file(path) else shared.hub_source(path, one.get("name"), one.get("split"))


def batch(c: Conversion, micro: Any, accumulation: Any, rows: Any) -> None:
    """``batch_size`` counts only where ``gradient_accumulation_steps`` is not given."""
    if rows and not c.given("gradient_accumulation_steps"):
        accumulation = shared.steps(rows) // shared.steps(micro)
    else:
        c.no_effect("gradient_accumulation_steps takes precedence", "batch_size")
    shared.batch(c, micro, accumulation)


def schedule(c: Conversion, name: Any, warmup: Any, ratio: Any, options: Any, least: Any, constant: Any) -> None:
    """With the two peculiarities of axolotl: a warm-up by default, and never one of a single step."""
    if warmup is None and ratio is None:
        ratio = 0.03
        c.note("by default axolotl warms up for 3% of the steps, at most 100; here, for 3%", "warmup_ratio")
    shared.schedule(c, name, 2 if warmup == 1 else warmup, None if warmup == 0 else ratio, options)
    if is_off(least) or name != "cosine":
        c.no_effect("it is off, or not of this schedule", "cosine_min_lr_ratio", "cosine_constant_lr_ratio")
        return
    c.set("optim.min_lr_ratio", float(least), "cosine_min_lr_ratio")
    if not is_off(constant):
        c.refuse("a cosine that ends before the run does has no counterpart", "cosine_constant_lr_ratio")


def lora(c: Conversion, adapter: Any, linear: Any, parameters: Any, *values: Any) -> None:
    rank, alpha, dropout, modules, *others = values
    if is_off(adapter):
        c.no_effect("there is no adapter")
    elif adapter not in ("lora", "qlora"):
        c.refuse(f"the adapter {adapter} has no counterpart", "adapter")
    else:
        c.no_effect("the keys of lora say it", "adapter")
        if not isinstance(modules, str):
            modules = ["all-linear"] * bool(linear) + list(modules or ()) + list(parameters or ())
        if rank is None or alpha is None:
            c.refuse("an adapter needs lora_r and lora_alpha: axolotl has no defaults for them", "adapter")
        else:
            shared.set_lora(c, rank, alpha, dropout, modules, *others)


def preference(c: Conversion, method: Any, loss: Any, beta: Any, *others: Any) -> None:
    if is_off(method):
        c.no_effect("rl is off")
    elif method not in ("dpo", "ipo", "orpo", "simpo"):
        c.refuse(f"{method} is not imported; dpo, ipo, orpo and simpo are", "rl")
    else:
        options = {"beta": "orpo_alpha" if beta is None else "rl_beta", "gamma": "simpo_gamma"}
        shared.preference(c, method, "rl", **options, label_smoothing="dpo_label_smoothing")
        c.no_effect("it is so by default", "dpo_loss_type") if loss in ("sigmoid", ["sigmoid"]) else None
        c.no_effect("rl_beta takes precedence", "orpo_alpha")


def plugins(c: Conversion, names: Any) -> None:
    kernels = ("CutCrossEntropy", "Liger", "KernelsPlugin")
    others = [name for name in names or [] if not any(kernel in name for kernel in kernels)]
    if others:
        c.refuse(f"drawbar does not run {', '.join(others)}")
    else:
        c.no_effect("they change speed or memory, not what is trained")


def special_tokens(c: Conversion, tokens: Any) -> None:
    model = str(c.value("base_model")).lower()
    llama = any(name in model for name in ("llama", "mistral", "mixtral")) and "llama-3" not in model
    for name in tokens or {}:
        if name in ("pad_token", "unk_token") or tokens[name] in OFF:
            c.no_effect("padding is not trained, and the tokenizer has its own token", f"special_tokens.{name}")
        elif llama and tokens[name] == {"bos_token": "<s>", "eos_token": "</s>"}.get(name):
            c.no_effect("it is Llama's and Mistral's own token", f"special_tokens.{name}")
        else:
            c.refuse(
                "if the tokenizer has another, change it there first; if not, remove this", f"special_tokens.{name}"
            )


def model_class(c: Conversion, name: Any) -> None:
    if any(word in str(name) for word in ("Classification", "Reward", "ConditionalGeneration")):
        c.refuse("only models that predict the next token are imported")
    else:
        c.no_effect("the model's config.json says its class")


RULES: dict[str, Rule] = {
    "rl dpo_loss_type rl_beta orpo_alpha simpo_gamma cpo_alpha dpo_label_smoothing": preference,
    "datasets pretraining_dataset test_datasets val_set_size": datasets,
    "micro_batch_size gradient_accumulation_steps batch_size": batch,
    "lr_scheduler warmup_steps warmup_ratio lr_scheduler_kwargs cosine_min_lr_ratio cosine_constant_lr_ratio": schedule,
    "adapter lora_target_linear lora_target_parameters lora_r lora_alpha lora_dropout lora_target_modules "
    "lora_modules_to_save peft_use_rslora": lora,
    "sample_packing group_by_length": lambda c, packed, grouped: c.set(
        "data.batching", "packed" if packed else "grouped" if grouped else "padded"
    ),
    "bf16 fp16 bfloat16 float16": lambda c, *values: shared.precision(
        c, values[2] or values[0], values[1] or values[3]
    ),
    "chat_template chat_template_jinja": lambda c, *values: c.no_effect("the datasets of chats say it"),
    "peft_use_dora": shared.dora,
    "plugins": plugins,
    "special_tokens": special_tokens,
    "model_type": model_class,
}
