"""Rules for LLaMA-Factory's files. What a dataset is stands in ``dataset_info.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawbar.imports import training_arguments as shared
from drawbar.imports.axolotl import template_of_model
from drawbar.imports.conversion import Conversion, Rule, is_off

SHAREGPT = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
OTHER_ROLES = {"system_tag": "system", "observation_tag": "observation", "function_tag": "function_call"}


def datasets(c: Conversion, train: Any, held: Any, folder: Any, share: Any, most: Any) -> None:
    """The datasets by their names in ``dataset_info.json``, which must be at hand."""
    place = Path(str(folder or "data"))
    path = next((one / "dataset_info.json" for one in (place, c.file.path.parent / place) if one.is_dir()), None)
    if path is None or not path.is_file():
        c.refuse(
            f"the datasets are described in {place}/dataset_info.json, which is not here: bring it",
            "dataset",
            "dataset_dir",
        )
        c.refuse("the datasets are not known", "eval_dataset")
    else:
        known = json.loads(path.read_text("utf-8"))
        for setting, names, key in (("data.train", train, "dataset"), ("data.validation", held, "eval_dataset")):
            listed = shared.listed(names)
            found = [_source(c, known.get(name), path.parent, key, name) for name in listed]
            if found:
                c.set(setting, found[0] if len(found) == 1 else found, key)
        c.no_effect("the folder of the datasets", "dataset_dir")
    if not is_off(share) and float(share) < 1:
        c.set("data.validation_share", float(share), "val_size")
        c.note("the same share, of other records: the content of a record decides", "val_size")
    elif not is_off(share):
        c.refuse("a number of records: write the share of the records that it is", "val_size")
    if not is_off(most) and "," in str(train):
        c.refuse("data.limit.train limits all datasets together: cut the files, or take one dataset", "max_samples")
    elif not is_off(most):
        c.set("data.limit.train", shared.steps(most), "max_samples")


DATASET_KEYS = {"file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking"}
"""Of an entry of dataset_info.json."""


def _source(c: Conversion, about: Any, folder: Path, key: str, name: str) -> Any:
    """A dataset as a source, and the task's options for its records; refuses what they are not in drawbar."""
    if about is None:
        c.refuse(f"dataset_info.json has no {name}", key)
        return name
    columns, stage = about.get("columns") or {}, c.value("stage")
    if stage == "pt":
        c.set("task.text_column", columns.get("prompt") or "instruction", key)
    elif about.get("formatting") == "sharegpt":
        for setting, column in _columns(c, columns).items():
            c.set(setting, column, key)
        tags = SHAREGPT | OTHER_ROLES | (about.get("tags") or {})
        if tags not in (SHAREGPT | OTHER_ROLES, OPENAI | OTHER_ROLES):
            c.refuse(f"{name} has roles or keys of its own: rename them to role and content, user and assistant", key)
    else:
        c.refuse(f"{name} has instructions, which LLaMA-Factory puts into a chat: write them as chats of messages", key)
    if columns.keys() - TEXT_COLUMNS - (ANSWER_COLUMNS.get(stage) or set()):
        c.refuse(f"{name} has images or the like, and drawbar trains text", key)
    if bool(about.get("ranking")) != (stage in ("dpo", "rm")):
        c.refuse(f"{name} is not of pairs, or the stage {stage} does not learn from pairs", key)
    moved = [own for own in ("system", "tools") if columns.get(own, own) != own]
    if moved:
        c.refuse(f"{name} has its {moved[0]} in the column {columns[moved[0]]}: name the column {moved[0]}", key)
    other = sorted(key for key in about.keys() - DATASET_KEYS if not is_off(about[key]))
    if other:
        c.refuse(f"{name} says {', '.join(other)}, which has no counterpart", key)
    if about.get("hf_hub_url"):
        return shared.hub_source(about["hf_hub_url"], about.get("subset"), about.get("split"))
    if not about.get("file_name"):
        c.refuse(f"{name} is from another hub", key)
    return (folder / str(about.get("file_name"))).as_posix()


TEXT_COLUMNS = {"prompt", "query", "response", "history", "system", "messages", "tools"}
ANSWER_COLUMNS = {"dpo": {"chosen", "rejected"}, "rm": {"chosen", "rejected"}, "kto": {"kto_tag"}}


def _columns(c: Conversion, columns: Mapping[str, str]) -> dict[str, Any]:
    """The task's options for records of chats."""
    stage, messages = c.value("stage"), columns.get("messages") or "conversations"
    if stage == "kto":  # of which the last message is the answer
        label = columns.get("kto_tag") or "kto_tag"
        return {"task.prompt_column": None, "task.completion_column": messages, "task.label_column": label}
    if stage in ("dpo", "rm"):
        answers = {f"task.{name}_column": columns.get(name) or name for name in ("chosen", "rejected")}
        return {"task.prompt_column": messages, **answers}
    return {"task.messages_column": messages}


def method(c: Conversion, stage: Any, loss: Any, *others: Any) -> None:
    loss = "kto" if stage == "kto" else loss or "sigmoid"
    if stage in ("dpo", "kto") and loss in shared.METHODS:
        shared.preference(
            c, shared.METHODS[loss], "pref_loss" if c.given("pref_loss") else "stage",
            beta="pref_beta", gamma="simpo_gamma", label_smoothing="dpo_label_smoothing",
            desirable_weight="kto_chosen_weight", undesirable_weight="kto_rejected_weight",
        )  # fmt: skip
        if loss == "ipo":
            c.note("LLaMA-Factory 0.9.5 has the loss of DPO on means there; here it is that of IPO", "pref_loss")
    elif stage == "dpo":
        c.refuse(f"{loss} has no counterpart; {', '.join(shared.METHODS)} have", "pref_loss")
    elif stage == "rm":
        c.set("task.type", "reward", "stage")
        c.note("the head is that of a classifier of transformers; LLaMA-Factory's is its own, with a bias", "stage")
    elif stage not in ("sft", "pt"):
        c.refuse(f"the stage {stage} is not imported; pt, sft, rm, dpo and kto are", "stage")
    c.no_effect("the datasets say what is trained", "stage")
    c.no_effect("the stage does not use it", *c.names[1:])


def packing(c: Conversion, packed: Any, neat: Any) -> None:
    packed = packed if packed is not None else c.value("stage") == "pt"
    c.set("data.batching", "packed" if packed or neat else "padded", "packing", "neat_packing")
    if packed and not neat:
        why = "there, samples are joined and cut, and see one another; here they do neither (as with neat_packing)"
        c.note(why, "packing")


def lora(c: Conversion, kind: Any, rank: Any, alpha: Any, dropout: Any, modules: Any, train: Any, rslora: Any) -> None:
    if kind == "lora":
        rank = 8 if rank is None else rank
        shared.set_lora(c, rank, alpha or 2 * rank, dropout, modules or "all", train, rslora)
        c.no_effect("the keys of lora say it", "finetuning_type")
    elif kind == "full":
        c.no_effect("all weights are trained")
    else:
        c.refuse(f"{kind} has no counterpart; lora and full have", "finetuning_type")
        c.no_effect("finetuning_type is not lora")


def template(c: Conversion, name: Any) -> None:
    if c.value("stage") != "pt":
        template_of_model(c, str(name), c.value("model_name_or_path"), "template")
    c.no_effect("the chat template is the tokenizer's own")


def weights(c: Conversion, pure: Any) -> None:
    if pure:
        c.set("precision", "bf16")
        c.note("weights and optimizer are bf16 there; here they are fp32, and matrix products bf16")


def quantized(c: Conversion, bits: Any, method: Any, kind: Any, double: Any) -> None:
    if is_off(bits):
        c.no_effect("quantization is off")
    elif method not in (None, "bnb", "bitsandbytes") or bits not in (4, 8):
        c.refuse(f"{bits} bits of {method or 'bnb'} have no counterpart; 4 and 8 bits of bnb have", *c.names[:2])
    elif not shared.has_adapters(c):
        c.refuse("quantized weights learn only through adapters (lora.base)", c.names[0])
    elif bits == 4 and kind not in (None, "nf4"):
        c.refuse(f"4 bits are nf4 here, and not {kind}", c.names[2])
    else:
        c.set("lora.base", "nf4" if bits == 4 else "int8", *c.names[:1])
        c.no_effect("nf4 here has double quantization; int8 has a scale for each row", *c.names[1:])


RULES: dict[str, Rule] = {
    "stage pref_loss pref_beta simpo_gamma dpo_label_smoothing kto_chosen_weight kto_rejected_weight": method,
    "pure_bf16": weights,
    "bf16 fp16": lambda c, *values: shared.precision(c, values[0] or c.value("pure_bf16"), values[1]),
    "dataset eval_dataset dataset_dir val_size max_samples": datasets,
    "packing neat_packing": packing,
    "finetuning_type lora_rank lora_alpha lora_dropout lora_target additional_target use_rslora": lora,
    "use_dora": shared.dora,
    "quantization_bit quantization_method quantization_type double_quantization": quantized,
    "template": template,
    "flash_attn": shared.attention,
}
