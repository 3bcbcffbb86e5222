"""A setting of another trainer is answered with ours, wherever it is given."""

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from drawbar.config.io.explain import explain
from drawbar.config.io.fields import catalogue
from drawbar.config.io.load_config import load_config
from drawbar.config.io.other_names import OUR_NAMES
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS
from drawbar.errors import UserError

KNOWN = {key for task in BUILT_IN_TASKS.values() for key in catalogue(run_config_type(task))}
TARGETS = sorted({target for targets in OUR_NAMES.values() for target in targets})


@pytest.mark.parametrize("target", TARGETS)
def test_every_answer_is_a_setting_with_a_value_that_it_takes(target: str) -> None:
    key, has_value, _ = target.partition("=")
    assert key in KNOWN
    if has_value:
        load_config(None, [target])


def test_no_name_of_ours_is_in_the_table() -> None:
    """A setting without its section is told where it belongs."""
    assert not OUR_NAMES.keys() & {key.rpartition(".")[2] for key in KNOWN}


def test_what_transformers_users_set_most_is_known() -> None:
    usual = """
        output_dir num_train_epochs max_steps learning_rate per_device_train_batch_size per_device_eval_batch_size
        gradient_accumulation_steps max_grad_norm lr_scheduler_type warmup_steps adam_beta1 adam_beta2 adam_epsilon
        eval_strategy eval_steps logging_steps save_steps save_total_limit load_best_model_at_end metric_for_best_model
        greater_is_better fp16 bf16 gradient_checkpointing report_to run_name dataloader_num_workers fsdp ddp_timeout
        """.split()  # noqa: SIM905 - a paragraph is easier to read than a list
    assert set(usual) <= {field.name for field in fields(TrainingArguments)}
    assert set(usual) <= OUR_NAMES.keys()


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("--learning-rate", "optim.lr"),
        ("train.max_epochs", "train.epochs"),
        ("trainer.accelerator", "device"),
        ("micro_batch_size", "train.micro_batch"),
        ("lora.r", "lora.rank"),
        ("train.batch_size", "train.global_batch or train.micro_batch"),
    ],
)
def test_explain_answers(written: str, ours: str) -> None:
    with pytest.raises(UserError) as caught:
        explain(written, load_config(None))
    assert caught.value.remedy == f"did you mean {ours}?"


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("optim.learning_rate=1e-4", "optim.lr"),
        ("learning_rate=1e-4", "optim.lr"),
        ("train.fp16=true", "precision=fp16"),
        ("optim=adamw_torch", "optim.name=adamw"),
    ],
)
def test_the_command_line_answers(argument: str, ours: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [argument])
    assert f"did you mean {ours}?" in caught.value.what


def test_a_file_says_it_for_each_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("learning_rate: 1e-4\ntrain: {max_steps: 5}\nlora: {lora_alpha: 8}\n")
    with pytest.raises(UserError) as caught:
        load_config("config.yaml")
    assert sorted(caught.value.what.splitlines()[1:]) == [
        "config.yaml:1: learning_rate: unknown key; did you mean optim.lr?",
        "config.yaml:2: train.max_steps: unknown key; did you mean train.steps?",
        "config.yaml:3: lora.lora_alpha: unknown key; did you mean lora.alpha?",
    ]


def test_an_option_that_the_task_does_not_have_is_not_named() -> None:
    with pytest.raises(UserError) as caught:
        explain("num_beams", load_config(None, ["task.type=masked_lm"]))
    assert "task.generation" not in str(caught.value)
