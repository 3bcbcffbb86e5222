"""docs/importing.md: every command runs, and shows what the page shows."""

from pathlib import Path

from pages import run_commands, write_files

PAGE = Path(__file__).parents[2] / "docs" / "importing.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 4
    assert "global_batch: 64" in (tmp_path / "config.yaml").read_text(encoding="utf-8")
