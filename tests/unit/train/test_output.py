"""Files that the user names."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from drawbar.commands.output_files import write_lines
from drawbar.errors import UserError

MIB = 2**20


def test_lines_are_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    records = ({"id": np.int64(number), "text": "ä" + "x" * MIB} for number in range(20))
    tracemalloc.start()
    try:
        count = write_lines(path, records)
        assert tracemalloc.get_traced_memory()[1] < 10 * MIB
    finally:
        tracemalloc.stop()
    assert count == 20
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(20))
    assert lines[0].startswith('{"id": 0, "text": "äx')


def test_lines_are_written_all_or_none(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_lines(tmp_path / "out.jsonl", ({"x": 1 / (2 - number)} for number in range(4)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot write"):
        write_lines(tmp_path / "missing" / "out.jsonl", [])
