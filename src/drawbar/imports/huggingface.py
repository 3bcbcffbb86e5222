"""Rules for the arguments of transformers' example scripts and of TRL's SFT."""

from typing import Any

from drawbar.imports import training_arguments as shared
from drawbar.imports.conversion import Conversion, Rule, is_off

GLUE = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
"""The columns of run_glue's tasks."""
TASKS = (
    *("block_size", "mlm_probability", "line_by_line", "task_name", "source_lang", "summary_column"),
    *("text_column_name", "label_column_name"),
)
"""Keys that say which of transformers' scripts a file is for."""
TRL = (
    *("dataset_text_field", "dataset_train_split", "dataset_mixture", "max_length", "packing", "assistant_only_loss"),
    *("completion_only_loss", "beta", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs"),
)
"""Keys that only TRL's scripts have."""


def glue(c: Conversion, name: Any) -> None:
    first, second = GLUE[str(name).lower()]
    c.set("task.type", "sequence_classification")
    c.set("task.text_column", first)
    if second:
        c.set("task.text_pair_column", second)
    if name == "stsb":
        c.set("task.problem", "regression")
    splits = ("train", "validation_matched" if name == "mnli" else "validation")
    for key, split in zip(("data.train", "data.validation"), splits, strict=True):
        c.set(key, shared.hub_source("nyu-mll/glue", name, split))


def masked(c: Conversion, share: Any, by_line: Any) -> None:
    c.set("task.type", "masked_lm")
    if share is not None:
        c.set("task.mask_share", float(share), c.names[0])
    if by_line:
        c.no_effect("it is always so", c.names[1])
    else:
        c.note("run_mlm joins all texts and cuts the whole; here each text is cut by itself")


def translation(c: Conversion, source: Any, target: Any, text: Any, summary: Any) -> None:
    """run_translation's records have the texts by language, run_summarization's in two columns."""
    c.set("task.type", "seq2seq")
    c.set("task.source_column", f"translation.{source}" if source else text or "text", *c.names[0:3:2])
    c.set("task.target_column", f"translation.{target}" if target else summary or "summary", *c.names[1:4:2])


def words(c: Conversion, text: Any, labels: Any) -> None:
    c.set("task.type", "token_classification")
    c.set("task.tokens_column", text or "tokens", c.names[0])
    c.set("task.labels_column", labels or "ner_tags", c.names[1])


def data(c: Conversion, hub: Any, *given: Any) -> None:
    """Files, or a dataset of the Hub, whose validation data are its own or a part of the training data."""
    subset, split, held_split, train, held, test, percent = given
    if not any(c.given(name) for name in (*TASKS, *TRL)):
        c.refuse(
            "no key says which script the file is for: add block_size (run_clm), line_by_line (run_mlm), task_name "
            "(run_glue) or max_length (TRL's SFT)",
            *(name for name in c.names if c.given(name)),
        )
    if c.given("block_size") or c.given("line_by_line") or c.given("mlm_probability"):
        percent = 5 if percent is None else percent  # which these scripts hold out by default
        if hub:
            c.note("without a split for validation, 5% are held out there: set data.validation or validation_share")
    if held_split is None and any(c.given(name) for name in TRL) and c.value("eval_strategy") in ("steps", "epoch"):
        held_split = "test"  # TRL's default
    if hub:
        c.set("data.train", shared.hub_source(hub, subset, split), *c.names[:4])
        if held_split:
            c.set("data.validation", shared.hub_source(hub, subset, held_split, "validation"), c.names[0], c.names[4])
    for setting, file, name in zip(("train", "validation", "test"), (train, held, test), c.names[5:8], strict=True):
        if file:
            c.set(f"data.{setting}", str(file), name)
    if percent and train and not held:
        c.set("data.validation_share", float(percent) / 100, c.names[8])
        c.note("the same share, of other records: the content of a record decides", c.names[8])
    c.no_effect("the files, or the dataset's own split, are taken", *c.names[1:5], c.names[8])


def mixture(c: Conversion, given: Any) -> None:
    sources = []
    for number, one in enumerate(given["datasets"]):
        place = f"dataset_mixture.datasets[{number}]"
        if one.get("weight", 1) != 1:
            c.refuse("a random part of a dataset: take a slice as its split, such as train[:10%]", f"{place}.weight")
        if "messages" in (one.get("columns") or ["messages"]) and not c.value("assistant_only_loss"):
            c.refuse(
                "TRL trains all tokens of a chat, drawbar the answers: set assistant_only_loss: true",
                f"{place}.columns",
            )
        c.no_effect("a mixture is shuffled, and drawbar says which columns it does not read", f"{place}.columns")
        c.no_effect("all of it", f"{place}.weight")
        sources.append(shared.hub_source(one["id"], one.get("config"), one.get("split")))
    c.set("data.train", sources[0] if len(sources) == 1 else sources, "dataset_mixture.datasets")
    c.no_effect("the order follows from run.seed", "dataset_mixture.seed")
    held = float(given.get("test_split_size") or 0)
    if 0 < held < 1:
        c.set("data.validation_share", held, "dataset_mixture.test_split_size")
    elif held:
        c.refuse("a number of records: write the share that it is", "dataset_mixture.test_split_size")


def texts(c: Conversion, text: Any, answers: Any, completions: Any, packed: Any, *lengths: Any) -> None:
    """What a record is in causal_lm, and in how long rows: TRL's records are texts or chats, run_clm's are texts."""
    length = next((value for value in lengths if value is not None), None)
    if length is not None:
        c.set("data.sequence_length", shared.steps(length), *c.names[4:])
    if any(c.given(name) for name in TRL):
        is_preference = c.settings.get("task.type") == "preference"
        if packed or is_off(c.value("group_by_length")):
            c.set("data.batching", "packed" if packed else "padded", c.names[3])
        c.no_effect("rows are grouped by length", c.names[3])
        if completions:
            c.set("task.prompt_column", "prompt", c.names[2])
            c.set("task.completion_column", "completion", c.names[2])
        elif answers:
            c.set("task.messages_column", "messages", c.names[1])
        elif not c.given("dataset_mixture") and not is_preference:
            c.set("task.text_column", text or "text", c.names[0])
        if not is_preference:
            c.note("longer samples are truncated there; here texts are split, and chats truncated", *c.names[4:])
    for name in c.names:
        c.no_effect("it is so by default", name)


def preference(c: Conversion, loss: Any, beta: Any, smoothing: Any, *others: Any) -> None:
    """TRL's DPO, KTO, and CPO as SimPO. No key of ORPO's is its own."""
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    weights = [name for name in ("desirable_weight", "undesirable_weight") if c.given(name)]
    method = shared.METHODS.get("kto" if weights and loss is None else str(loss))
    if weights and method != "kto":
        method = None
    dropout_is_off = c.value("disable_dropout")
    if loss in (None, "nll") and (beta, method, dropout_is_off) == (None, None, None):
        c.no_effect("it is so by default")
    elif method is None:
        c.refuse(
            "no key says that the file is for DPO (loss_type: sigmoid), IPO (ipo), KTO (desirable_weight, and no "
            "loss_type but kto) or SimPO (loss_type: simpo): add it, if it is for one of these",
            *("loss_type", "beta", "disable_dropout", *weights),
        )
    else:
        shared.preference(
            c, method, "loss_type" if c.given("loss_type") else weights[0],
            beta="beta", label_smoothing="label_smoothing", gamma="simpo_gamma",
            desirable_weight="desirable_weight", undesirable_weight="undesirable_weight",
        )  # fmt: skip
        if method == "simpo" and not is_off(smoothing):
            c.refuse("remove it, and set task.label_smoothing after the import", "label_smoothing")
        if method != "simpo" and c.given("cpo_alpha"):
            c.refuse("it says that the file is for CPO, of which only SimPO has a counterpart", "cpo_alpha")
        if dropout_is_off is False:
            c.refuse("remove it, and set lora.dropout after the import", "disable_dropout")
        c.no_effect("lora.dropout is 0", "disable_dropout")


def template(c: Conversion, text: Any) -> None:
    if c.value("assistant_only_loss"):
        c.set("task.chat_template", text)
    else:
        c.no_effect("only chats have a template")


def blocks(c: Conversion, size: Any) -> None:
    c.set("data.sequence_length", shared.steps(size))
    c.set("data.batching", "packed")
    c.note(
        "run_clm joins all texts and cuts the whole; here a text ends with the end token and is cut by itself, and "
        "rows are filled with several"
    )


def lora(c: Conversion, on: Any, *values: Any) -> None:
    if is_off(on):
        c.no_effect("use_peft is off")
        return
    usual = (16, 32, 0.05, None, None, None)
    shared.set_lora(c, *(given if given is not None else value for given, value in zip(values, usual, strict=True)))
    c.no_effect("the keys of lora say it", "use_peft")


def revision(c: Conversion, name: Any) -> None:
    c.no_effect("it is so by default") if name == "main" else c.refuse(
        "download it to a folder, and name that as the model"
    )


RULES: dict[str, Rule] = {
    "loss_type beta label_smoothing cpo_alpha simpo_gamma desirable_weight undesirable_weight "
    "disable_dropout": preference,
    "task_name": glue,
    "source_lang target_lang text_column summary_column": translation,
    "text_column_name label_column_name": words,
    "mlm_probability line_by_line": masked,
    "dataset_name dataset_config_name dataset_config dataset_train_split dataset_test_split train_file validation_file "
    "test_file validation_split_percentage": lambda c, hub, first, second, *others: data(
        c, hub, first or second, *others
    ),
    "dataset_mixture": mixture,
    "dataset_text_field assistant_only_loss completion_only_loss packing max_seq_length max_length": texts,
    "chat_template": template,
    "block_size": blocks,
    "use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora": lora,
    "use_dora": shared.dora,
    "model_revision": revision,
}
