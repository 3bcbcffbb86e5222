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
    assert ("a file that data.train also reads" in caplog.text) is warned
    assert (str(tmp_path / "a.txt") in caplog.text) is warned
