"""Ranks that are forked from a process with their imports use the GPU, which that process has not looked at."""

import os
from contextlib import chdir
from pathlib import Path

import pytest
import torch

from drawbar.cli.train import RANK_MODULES
from drawbar.launch.warm_process import WarmProcess
from harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OWN = """
import torch
from drawbar.config.schema.task_sections import TaskConfig

class Own:
    class Config(TaskConfig):
        pass

assert torch.ones(2, device="cuda").sum().item() == 2
"""


def fork_one(project: str) -> int:
    with chdir(project), WarmProcess(RANK_MODULES, 1) as warm:
        rank = warm.fork(["-P", "-m", "drawbar", "config", "show", "config.yaml"], dict(os.environ))
        assert rank is not None, "something that ranks import has looked for a GPU, or started a thread"
        return rank.wait(120)


def test_a_forked_rank_uses_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.yaml").write_text("task: {type: own:Own}\n")
    assert run_ranks(fork_one, 1, str(tmp_path)) == [0]
