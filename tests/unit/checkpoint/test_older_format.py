"""A checkpoint of format 1, which drawbar wrote before there was another: it is read as ever."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from drawbar.checkpoint import CheckpointDirectory, Snapshot, read, read_state
from drawbar.checkpoint.inspection import problems, summaries

WRITTEN = Path(__file__).parent / "format_1" / "step-00000003"


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    shutil.copytree(WRITTEN, tmp_path / WRITTEN.name)
    return CheckpointDirectory(tmp_path)


def expect_its_content(folder: Path, learning_rate: float) -> None:
    found = read(folder)
    tied = torch.arange(12.0).view(4, 3)
    assert found.step == 3
    assert {name: tensor.dtype for name, tensor in found.model.items()} == {
        "embed.weight": torch.float32,
        "lm_head.weight": torch.float32,
        "bias": torch.bfloat16,
        "steps": torch.int64,
    }
    assert found.model["embed.weight"].equal(tied)
    assert found.model["lm_head.weight"].equal(tied)
    assert found.model["bias"].tolist() == [0, 1, 2, 3, 4]
    assert found.model["steps"].item() == 7
    assert found.optimizer["embed.weight/exp_avg"].equal(tied / 2)
    assert found.optimizer["embed.weight/step"].item() == 3
    assert found.rng["seed-0000/torch"].tolist() == list(range(16))
    state = read_state(folder)
    assert math.isnan(state.pop("nan"))
    assert state == {"progress": {"step": 3, "best_step": None}, "lr": learning_rate}


def test_it_is_read(directory: CheckpointDirectory) -> None:
    folder = directory.latest()
    assert folder is not None
    expect_its_content(folder, 0.1)
    assert problems(folder) == []
    (summary,) = summaries(directory)
    assert (summary.step, summary.format, summary.parts, summary.problem) == (3, 1, 0, None)


def test_it_is_amended_in_its_own_format(directory: CheckpointDirectory) -> None:
    directory.update_state(3, {"lr": 0.2})
    expect_its_content(directory.resolve("3"), 0.2)
    assert summaries(directory)[0].format == 1


def test_what_is_written_today_is_listed_in_the_same_way(directory: CheckpointDirectory) -> None:
    """So an older drawbar reads it."""
    directory.write(Snapshot(4, {"w": torch.ones(2)}, {}, {}, {}))
    then, now = (json.loads((directory.resolve(step) / "manifest.json").read_text()) for step in "34")
    assert then.keys() == now.keys()
    assert then["format"] == now["format"]
    assert then["files"].keys() == now["files"].keys()
    assert then["files"]["state.json"].keys() == now["files"]["state.json"].keys()
