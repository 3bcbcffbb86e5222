"""Records of the shapes that other projects read: their columns need not be named."""

import json
from pathlib import Path
from typing import Any

import pytest

import drawbar
from drawbar.commands.score_run import evaluate_run
from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.task_sections import CausalLMConfig
from drawbar.errors import UserError
from drawbar.tasks.messages import alpaca_prompt, as_chat, known_columns
from exhaustive import some
from runs import Fit, scores

SHAREGPT = [{"from": "human", "value": "far?"}, {"from": "gpt", "value": "No."}]
CHAT = [{"role": "user", "content": "far?"}, {"role": "assistant", "content": "No."}]
ALPACA = {"instruction": "Add.", "input": "1 1", "output": "2"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content + eos_token }}{% endfor %}"


def found(path: Path, record: dict[str, Any], before: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    path.write_text((json.dumps(record) + "\n") * 2)
    return known_columns(CausalLMConfig(**options), DataSection(train=str(path)), before)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": CHAT}, {"messages_column": "messages"}),
        ({"conversations": SHAREGPT, "id": 1}, {"messages_column": "conversations"}),
        ({"conversations": CHAT}, {"messages_column": "conversations"}),
        (ALPACA, {"prompt_column": "instruction", "completion_column": "output"}),
        ({"instruction": "a", "output": "b"}, {"prompt_column": "instruction", "completion_column": "output"}),
        ({"prompt": "a", "completion": "b"}, {"prompt_column": "prompt", "completion_column": "completion"}),
        ({"text": "a", "messages": CHAT}, {}),
        ({"conversations": "a name"}, {}),
        ({"prompt": CHAT, "completion": CHAT}, {}),
        ({"sentence": "a"}, {}),
    ],
)
def test_the_first_record_says_which_columns_are_read(
    name: str, record: dict[str, Any], options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert found(tmp_path / name, record) == options
    assert len(caplog.records) == bool(options)
    assert all(f"task.{option}={column}" in caplog.text for option, column in options.items())


def test_columns_that_a_user_names_are_kept(tmp_path: Path) -> None:
    for options in ({"text_column": "output"}, {"messages_column": None}):
        assert found(tmp_path / "a.jsonl", {"messages": CHAT, **ALPACA}, **options) == {}
    before = {"messages_column": "conversations", "metrics": None}
    of_run = {"messages_column": "conversations", "prompt_column": None, "completion_column": None}
    assert found(tmp_path / "a.jsonl", {"messages": CHAT}, before) == of_run


def test_data_that_cannot_be_read_are_left_to_who_encodes_them(tmp_path: Path) -> None:
    assert known_columns(CausalLMConfig(), DataSection(train=str(tmp_path / "none.jsonl")), None) == {}


def test_messages_of_sharegpt_are_those_of_templates() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    told = [
        {"from": "system", "value": "Be brief."},
        *SHAREGPT,
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2", "weight": 0},
    ]
    assert as_chat({}, told).messages == [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "weight": 0},
    ]


def test_an_instruction_has_the_text_of_alpaca_around_it() -> None:
    assert alpaca_prompt("Add.", "1 1") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n"
        "### Response:\n"
    )
    assert alpaca_prompt("Add.", "") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )


@pytest.mark.parametrize(
    ("record", "settings"),
    some([({"conversations": SHAREGPT}, (f"task.chat_template={json.dumps(TEMPLATE)}",)), (ALPACA, ())], 1),
)
def test_a_run_keeps_the_columns_that_it_found(
    record: dict[str, Any], settings: tuple[str, ...], fit: Fit, project: Path, run: Path, monkeypatch: Any
) -> None:
    (project / "records.json").write_text(json.dumps([record] * 9))
    data = ("data.train=records.json", "data.validation=records.json", "data.sequence_length=256")
    data = (*data, "task.from_scratch.max_position_embeddings=256")
    fit(*settings, *data, "train.steps=4")
    options = drawbar.load_config(run / "config.yaml").config.task
    assert {options.messages_column, options.prompt_column} == {None, next(iter(record))}
    assert fit(*settings, *data, "train.steps=6").progress.step == 6
    with pytest.raises(UserError, match="with another configuration"):
        fit(*settings, *data, "train.steps=8", "task.text_column=text")
    monkeypatch.chdir(project)
    score = evaluate_run(drawbar.load_config(run / "config.yaml").config, None, "validation", None)["loss"]
    assert score == pytest.approx(scores(run)[6]["eval/validation/loss"])
