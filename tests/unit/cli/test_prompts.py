"""The prompts of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawbar.cli.prompts import as_instruction, as_messages, read_prompts
from drawbar.errors import UserError
from drawbar.tasks.messages import alpaca_prompt

CHAT = [{"role": "user", "content": "is it far?"}]


@pytest.mark.parametrize(
    ("record", "column", "rename", "prompt"),
    [
        ({"chat": {"en": CHAT}}, "chat.en", {}, CHAT),
        ({"conversation": CHAT}, "messages", {"messages": "conversation"}, CHAT),
        ({"talk": {"en": CHAT}}, "chat.en", {"chat": "talk"}, CHAT),
        ({"talk": {"en": CHAT}}, "messages", {"messages": "talk.en"}, CHAT),
        ({"messages": CHAT}, "messages", {"messages": "conversation"}, CHAT),
        ({"prompt": "go on", "text": "not on"}, "messages", {"messages": "conversation"}, "go on"),
        ({"sentence": "go on"}, None, {"text": "sentence"}, "go on"),
        ({"prompt": None, "text": "go on"}, None, {}, "go on"),
        ({"messages": CHAT, "tools": [], "id": 1}, "messages", {}, {"messages": CHAT, "tools": []}),
        ({"talk": CHAT, "schemas": "[]"}, "talk", {"tools": "schemas"}, {"messages": CHAT, "tools": "[]"}),
    ],
)
def test_columns_have_the_names_of_training(
    tmp_path: Path, record: dict[str, Any], column: str | None, rename: dict[str, str], prompt: Any
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record) + "\n")
    assert read_prompts(str(tmp_path / "prompts.jsonl"), column, rename) == [prompt]


def test_instructions_are_those_of_training(tmp_path: Path) -> None:
    records = [{"instruction": "Add.", "input": "1 1"}, {"instruction": "Add.", "input": None}, {"prompt": "Add."}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = [as_instruction(prompt) for prompt in read_prompts(str(tmp_path / "prompts.jsonl"), None, {}, True)]
    assert found == [alpaca_prompt("Add.", "1 1"), alpaca_prompt("Add.", ""), alpaca_prompt("Add.", "")]
    renamed = read_prompts(str(tmp_path / "prompts.jsonl"), None, {"input": "prompt"}, True)
    assert as_instruction(renamed[2]) == alpaca_prompt("Add.", None)
    (tmp_path / "asked.jsonl").write_text('{"ask": "Add.", "with": "1 1"}\n')
    rename = {"instruction": "ask", "input": "with"}
    assert as_instruction(*read_prompts(str(tmp_path / "asked.jsonl"), None, rename, True)) == found[0]


def test_a_record_without_a_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"chat": {"de": []}}\n')
    with pytest.raises(UserError, match=r"no prompt[\s\S]*prompts.jsonl:2[\s\S]*chat.en"):
        read_prompts(str(tmp_path / "prompts.jsonl"), "chat.en", {})


def test_a_prompt_may_be_a_chat_with_its_tools() -> None:
    chat = {"messages": CHAT, "tools": []}
    assert as_messages(chat) == as_messages(json.dumps(chat)) == chat
    assert as_messages('{"tools": []}') == [{"role": "user", "content": '{"tools": []}'}]
