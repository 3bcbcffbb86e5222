"""``drawbar import``: files of each trainer become the settings that they mean, and every key has its outcome."""

import json
from collections import Counter
from contextlib import chdir, suppress
from dataclasses import fields
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from transformers import TrainingArguments

from drawbar.cli import group
from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.imports.command import SOURCES as CHOICES
from drawbar.imports.conversion import SOURCES, Conversion, detect, load_source
from drawbar.imports.reading import read_keys
from drawbar.imports.writing import check, write

HERE = Path(__file__).parent
FILES = sorted(path for path in (HERE / "files").iterdir() if path.is_file())


def conversion(path: Path, processes: int = 1) -> Conversion:
    keys = read_keys(path)
    with chdir(HERE):
        return Conversion(keys, load_source(detect(keys) or ""), processes).convert()


EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl_lora.yaml": {
        "run.dir": "outputs",
        "run.name": "support-lora",
        "run.seed": 42,
        "task.model": "Qwen/Qwen2.5-1.5B-Instruct",
        "task.messages_column": "conversations",
        "task.attention": "flash_attention_2",
        "data.train": {"dataset": "my-org/support-chats", "split": "train[:90%]"},
        "data.validation_share": 0.05,
        "data.sequence_length": 1024,
        "data.batching": "packed",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.1,
        "lora.modules": "linear",
        "lora.train": [],
        "lora.rslora": False,
        "train.global_batch": 8,
        "train.micro_batch": 2,
        "train.epochs": 3,
        "optim.name": "adamw",
        "optim.lr": 2e-4,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.1,
        "optim.schedule": "cosine",
        "optim.warmup": 0.05,
        "optim.min_lr_ratio": 0.1,
        "precision": "auto",
        "parallel.activation_checkpointing": "full",
        "tracking.log_every": 5,
    },
    "axolotl_full.yaml": {
        "run.dir": ".",
        "run.name": "books",
        "run.seed": 7,
        "task.model": "meta-llama/Llama-3.2-1B",
        "task.text_column": "content",
        "data.train": "books.jsonl",
        "data.validation": "held.jsonl",
        "data.sequence_length": 4096,
        "data.batching": "padded",
        "train.global_batch": 16,
        "train.micro_batch": 1,
        "train.steps": 2000,
        "optim.name": "adamw",
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.0,
        "optim.schedule": "constant",
        "optim.warmup": 0,  # transformers' "constant" has none
        "eval.every": 250,
        "checkpoint.every": 500,
        "checkpoint.keep": 2,
        "precision": "auto",
        "parallel.strategy": "fsdp",
        "parallel.activation_checkpointing": "full",
    },
    "llama_factory.yaml": {
        "run.dir": "saves/qwen",
        "run.name": "lora",
        "run.seed": 42,
        "task.model": "Qwen/Qwen2.5-7B-Instruct",
        "task.messages_column": "conversations",
        "task.answers": "last",
        "data.train": "files/datasets/chats.json",
        "data.validation_share": 0.1,
        "data.limit.train": 5000,
        "data.sequence_length": 2048,
        "data.batching": "packed",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0,
        "lora.modules": "linear",
        "lora.train": [],
        "lora.rslora": False,
        "train.global_batch": 8,
        "train.micro_batch": 1,
        "train.epochs": 3,
        "optim.name": "adamw",
        "optim.lr": 1e-4,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0,
        "optim.schedule": "cosine",
        "optim.warmup": 0.1,
        "eval.every": 500,
        "checkpoint.every": 500,
        "precision": "bf16",
        "parallel.activation_checkpointing": "full",
        "tracking.log_every": 10,
    },
    "torchtitan.toml": {
        "run.dir": "outputs",
        "run.name": "llama",
        "task.model": "./assets/hf/Llama-3.1-8B",
        "task.tokenizer": "./assets/hf/Llama-3.1-8B",
        "task.from_scratch": {},
        "data.train": {"dataset": "allenai/c4", "subset": "en"},
        "data.validation": {"dataset": "allenai/c4", "subset": "en"},
        "data.limit.validation": 80,
        "data.sequence_length": 8192,
        "data.batching": "packed",
        "data.streaming": True,
        "train.global_batch": 128,
        "train.micro_batch": 2,
        "train.steps": 1000,
        "train.gradient_clip": 1,
        "optim.name": "adamw",
        "optim.lr": 3e-4,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.1,
        "optim.schedule": "cosine",
        "optim.warmup": 200,
        "optim.min_lr_ratio": 0.1,
        "eval.every": 200,
        "precision": "bf16",
        "parallel.strategy": "fsdp",
        "parallel.replicate": 2,
        "parallel.tensor": 4,
        "parallel.activation_checkpointing": {"every": 2},
        "parallel.compile": False,
        "tracking.log_every": 20,
        "tracking.tensorboard": True,
    },
    "run_clm.json": {
        "run.dir": "out",
        "run.name": "pythia",
        "run.seed": 3,
        "task.model": "EleutherAI/pythia-70m",
        "data.train": "train.jsonl",
        "data.validation": "valid.jsonl",
        "data.sequence_length": 512,
        "data.batching": "packed",
        "train.global_batch": 8,
        "train.micro_batch": 4,
        "train.steps": 400,
        "train.gradient_clip": 0.5,
        "optim.name": "adamw",
        "optim.lr": 1e-4,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0,
        "optim.schedule": "cosine",
        "optim.warmup": 40,  # takes precedence over the ratio
        "optim.min_lr_ratio": 0.1,
        "eval.every": 100,
        "precision": "fp16",
        "tracking.tensorboard": False,
    },
    "run_glue.yaml": {
        "run.dir": ".",
        "run.name": "mrpc",
        "run.seed": 42,
        "task.type": "sequence_classification",
        "task.model": "bert-base-cased",
        "task.text_column": "sentence1",
        "task.text_pair_column": "sentence2",
        "data.train": {"dataset": "nyu-mll/glue", "subset": "mrpc"},
        "data.validation": {"dataset": "nyu-mll/glue", "subset": "mrpc", "split": "validation"},
        "data.sequence_length": 128,
        "train.global_batch": 32,
        "train.micro_batch": 32,
        "train.epochs": 3,
        "optim.name": "adamw",
        "optim.lr": 2e-5,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0,
        "optim.schedule": "linear",
        "optim.warmup": 0,
        "precision": "fp32",
    },
    "run_translation.yaml": {
        "run.dir": "out",
        "run.name": "t5",
        "run.seed": 42,
        "task.type": "seq2seq",
        "task.model": "google-t5/t5-small",
        "task.source_column": "translation.en",
        "task.target_column": "translation.ro",
        "task.source_prefix": "translate English to Romanian: ",
        "task.target_length": 128,
        "task.label_smoothing": 0.1,
        "task.generation.beams": 4,
        "data.train": {"dataset": "wmt16", "subset": "ro-en"},
        "data.sequence_length": 1024,
        "train.global_batch": 4,
        "train.micro_batch": 4,
        "train.epochs": 3,
        "optim.name": "sgd",
        "optim.lr": 5e-5,
        "optim.weight_decay": 0,
        "optim.schedule": "linear",
        "optim.warmup": 0,
        "precision": "fp32",
    },
    "trl_sft.yaml": {
        "run.dir": ".",
        "run.name": "Qwen2.5-0.5B-stories",
        "run.seed": 42,
        "task.model": "Qwen/Qwen2.5-0.5B",
        "task.text_column": "story",
        "data.train": {"dataset": "my-org/stories"},
        "data.sequence_length": 2048,
        "data.batching": "packed",
        "lora.rank": 8,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "lora.modules": ["q_proj", "v_proj"],
        "lora.train": [],
        "lora.rslora": False,
        "train.global_batch": 2,
        "train.micro_batch": 2,
        "train.epochs": 1,
        "optim.name": "adamw",
        "optim.lr": 2e-5,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0,
        "optim.schedule": "linear",
        "optim.warmup": 0,
        "precision": "bf16",
        "parallel.activation_checkpointing": "full",
        "tracking.log_every": 25,
        "tracking.tensorboard": False,
    },
    "deepspeed.json": {
        "train.global_batch": 64,
        "train.micro_batch": 8,
        "train.gradient_clip": None,  # DeepSpeed clips only where it is told to
        "optim.name": "adamw",
        "optim.lr": 2e-4,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.0,
        "precision": "bf16",
        "parallel.strategy": "deepspeed",
        "parallel.zero_stage": 3,
        "deepspeed.config": str(HERE / "files" / "deepspeed.json"),
        "deepspeed.offload_optimizer": "cpu",
    },
    "deepspeed_schedule.json": {
        "train.global_batch": 8,
        "train.micro_batch": 4,
        "train.gradient_clip": 0.5,
        "train.steps": 1000,
        "optim.name": "adamw",
        "optim.lr": 3e-4,
        "optim.schedule": "linear",
        "optim.warmup": 100,
        "parallel.strategy": "deepspeed",
        "parallel.zero_stage": 2,
        "deepspeed.config": str(HERE / "files" / "deepspeed_schedule.json"),
    },
}
PROCESSES = {"torchtitan.toml": 64}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_becomes_the_settings_that_it_means(path: Path, tmp_path: Path) -> None:
    found = conversion(path, PROCESSES.get(path.name, 1))
    assert found.refusals == []
    assert found.settings == EXPECTED[path.name]
    with chdir(HERE):
        check(found)
    (tmp_path / "config.yaml").write_text(write(found), encoding="utf-8")
    loaded = load_config(tmp_path / "config.yaml")
    for setting, value in found.settings.items():
        given: Any = loaded.config
        for name in setting.split("."):
            given = given.get(name) if isinstance(given, dict) else getattr(given, name)
        if isinstance(value, str | int | float | bool | None):
            assert given == value, setting
    assert EXPECTED.keys() == {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_key_is_in_the_report_once(path: Path) -> None:
    found = conversion(path)
    text = write(found)
    assert found.entries.keys() == found.leaves.keys()
    for key, entry in found.entries.items():
        name = key.rpartition(".")[2].partition("[")[0]
        assert name in path.read_text(encoding="utf-8").splitlines()[entry.line - 1], key
        if entry.outcome == "converted":
            assert any(key in keys for keys in found.origins.values()), key
        else:
            assert text.count(f"{key} ({entry.line})") == 1, key


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_key_is_dropped_and_no_value_ends_in_a_traceback(
    name: str, data: st.DataObject, tmp_path_factory: Any
) -> None:
    """Any keys, known or not, with any values."""
    known = sorted(key for entry in load_source(name).rules for key in entry.split() if "*" not in key)
    values = st.sampled_from(
        [None, True, False, 0, 1, 0.5, 3, "auto", "steps", "cosine", "adamw", "x,y", [], ["a"], {"b": 1}]
    )
    chosen = data.draw(st.dictionaries(st.sampled_from([*known, "unheard_of"]), values, min_size=1, max_size=12))
    tree: dict[str, Any] = {}
    for key, value in chosen.items():
        *parents, last = key.split(".")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {}) if isinstance(inside.setdefault(parent, {}), dict) else {}
        inside[last] = value
    path = tmp_path_factory.getbasetemp() / f"{name}.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    found = Conversion(read_keys(path), load_source(name)).convert()
    assert found.leaves.keys() <= found.entries.keys()
    named = Counter(key for keys in found.origins.values() for key in set(keys))
    for key, entry in found.entries.items():
        assert entry.outcome != "converted" or named[key], key
    with suppress(UserError):
        check(found)


def test_every_argument_of_the_trainer_has_a_rule() -> None:
    known = {key for entry in load_source("huggingface").rules for key in entry.split()}
    assert {field.name for field in fields(TrainingArguments)} - known == set()


def test_no_key_has_two_rules() -> None:
    assert set(CHOICES) == set(SOURCES)
    for name in SOURCES:
        table = YAML(typ="safe").load(files("drawbar.imports").joinpath("tables", f"{name}.yaml").read_text("utf-8"))
        keys = Counter(key for entry in import_module(f"drawbar.imports.{name}").RULES for key in entry.split())
        keys.update(key for section in ("to", "values") for key in table.get(section, {}))
        sections = (table.get(section, {}) for section in ("no effect", "aside", "absent"))
        keys.update(key for section in sections for names in section.values() for key in names.split())
        assert [key for key, count in keys.items() if count > 1] == [], name


def test_a_refusal_lists_every_reason_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text(
        "base_model: a/b\nsequence_len: 64\nrl: grpo\nlearning_rate: 1e-4\nload_in_4bit: true\nlora_fancy: 3\n"
        "datasets:\n  - path: a/c\n    type: chatml.intel\n",
        encoding="utf-8",
    )
    with chdir(tmp_path):
        done = CliRunner().invoke(group, ["import", "dpo.yaml", "--out", "config.yaml"])
    assert isinstance(done.exception, UserError)
    assert done.exception.exit_code == 2
    for line in (
        "dpo.yaml:3: rl",
        "dpo.yaml:5: load_in_4bit: quantized weights learn only through adapters (lora.base)",
        "dpo.yaml:6: lora_fancy",
        "dpo.yaml:9: datasets[0].type",
    ):
        assert line in str(done.exception)
    assert not (tmp_path / "config.yaml").exists()


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    with chdir(HERE):
        shown = CliRunner().invoke(group, ["import", "files/run_glue.yaml"], catch_exceptions=False)
        arguments = ["import", "files/run_glue.yaml", "--data-parallel", "4", "--out", str(tmp_path / "c.yaml")]
        written = CliRunner().invoke(group, arguments, catch_exceptions=False)
        again = CliRunner().invoke(group, arguments)
    assert shown.exit_code == written.exit_code == 0
    assert YAML().load(shown.stdout)["train"]["global_batch"] == 32
    assert YAML().load(tmp_path / "c.yaml")["train"]["global_batch"] == 128
    assert "9 keys of Hugging Face: 7 converted, 2 no effect" in written.stderr
    assert isinstance(again.exception, UserError)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.py", "x = 1", "no file of a kind"),
        ("a.yaml", "a: [1\nb: 2", "expected"),
        ("a.toml", "a = \n", "Invalid value"),
        ("a.json", "{", "Expecting"),
        ("a.yaml", "- 1\n", "no keys"),
        ("a.yaml", "!x [a]\n", "no keys"),
        ("a.yaml", "a: " + "[" * 3000, "recursion"),
        ("a.yaml", "some: thing\n", "whose file"),
        ("a.yaml", "base_model: m\nlearning_rate: fast\ndatasets: [{path: a/b, type: alpaca}]\n", "optim.lr"),
        ("a.yaml", "model_name_or_path: m\nlr_scheduler_type: rex\n", "rex"),
        ("a.yaml", "model_name_or_path: m\noptim: adafactor\n", "adafactor"),
    ],
)
def test_what_cannot_be_imported(name: str, text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(group, ["import", str(tmp_path / name)])
    assert isinstance(done.exception, UserError)
    assert what in str(done.exception)
    assert name in str(done.exception)
    assert done.exception.remedy
