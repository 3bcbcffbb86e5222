"""Validation data that are training data: a warning."""

from pathlib import Path
from typing import Any

import pytest

from drawbar.config.schema.data_section import DataSection
from drawbar.data.sources import open_records
from drawbar.train.validation_share import warn_of_same_files


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"train": "a.txt", "validation": "a.txt"}, True),
        ({"train": ["b.txt", "*.txt"], "validation": "folder/../a.txt"}, True),
        ({"train": "a.txt", "validation": "link.text"}, True),
        ({"train": "a.txt", "validation": "b.txt"}, False),
        ({"train": "a.txt", "validation_share": 0.5}, False),
        ({"train": "python_stdlib", "validation": "python_stdlib"}, False),
        ({"train": {"dataset": "folder"}, "validation": {"dataset": "folder"}}, False),  # each its own split
    ],
)
def test_the_same_file_for_both(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    warned: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a line\nanother\n")
    (tmp_path / "link.text").symlink_to("a.txt")
    reader = (
        {"validation": {"files": "link.text", "reader": ".txt"}} if settings.get("validation") == "link.text" else {}
    )
    data = DataSection.model_validate(settings | reader)
    warn_of_same_files(data, open_records(data, "train"), open_records(data, "validation"))
    assert ("what data.train also reads" in caplog.text) is warned
    assert (str(tmp_path / "a.txt") in caplog.text) is warned


def test_the_same_split_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    data = DataSection.model_validate({"train": {"dataset": "."}, "validation": {"dataset": ".", "split": "train"}})
    warn_of_same_files(data, open_records(data, "train"), open_records(data, "validation"))
    assert f"reads what data.train also reads: {tmp_path / 'train'}: " in caplog.text
