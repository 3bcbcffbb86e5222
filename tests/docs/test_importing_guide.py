"""docs/importing.md: every command runs, and shows what the page shows."""

import json
from pathlib import Path
from typing import Any

from pages import run_commands, write_files

PAGE = Path(__file__).parents[2] / "docs" / "importing.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    record: dict[str, Any] = {
        "instruction": "Add.",
        "input": "1 + 1",
        "output": "2",
        "history": [["Hello", "Hi"]],
        "system": "Be brief.",
    }
    (tmp_path / "instructions.json").write_text(json.dumps([record]), encoding="utf-8")
    assert run_commands(PAGE, tmp_path) == 5
    (chat,) = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [message["content"] for message in chat["messages"]] == ["Be brief.", "Hello", "Hi", "Add.\n1 + 1", "2"]
    assert "global_batch: 64" in (tmp_path / "config.yaml").read_text(encoding="utf-8")
