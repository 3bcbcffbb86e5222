"""docs/checkpoints.md: every command runs, and its script puts together what drawbar has written in parts."""

import random
from pathlib import Path

import pytest
from made_up import write_data
from pages import run_commands, write_files

from drawbar.checkpoint.directory import CheckpointDirectory
from harness import run_script
from parts_writing import state_of, write_parts

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) >= 6
    kept = CheckpointDirectory(tmp_path / "runs" / "roads" / "checkpoints")
    assert kept.steps() == [5, 6]


def test_parts_can_be_read_without_drawbar(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    model, optimizer = state_of(random.Random(3))
    folder = write_parts(CheckpointDirectory(tmp_path / "checkpoints"), 1, model, optimizer)
    namespace: dict[str, object] = {"__name__": "read_parts"}
    exec((tmp_path / "read_parts.py").read_text(), namespace)
    read = namespace["read"]
    assert callable(read)
    for name, tensor in (model | optimizer).items():
        assert read(folder, name).equal(tensor), name
    done = run_script(tmp_path / "read_parts.py", str(folder), "embed.weight", cwd=tmp_path)
    assert done.out == "torch.Size([700, 1100])\n", done.err
