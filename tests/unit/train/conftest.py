"""Real runs of a tiny model in this process: less than a second each."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import drawbar
from drawbar.tasks.task import Task
from drawbar.train.trainer import Outcome

Fit = Callable[..., Outcome]


@pytest.fixture
def fit(project: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """``fit(*settings, task=None, resume="auto", fork=None)``: what ``drawbar train config.yaml SETTINGS`` does."""
    monkeypatch.chdir(project)
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for one another

    def fit(*settings: str, task: type[Task] | None = None, resume: str = "auto", fork: str | None = None) -> Outcome:
        loaded = drawbar.load_config("config.yaml", settings, task.Config if task else None)
        return drawbar.Trainer(loaded.config, task, resume=resume, fork=fork).fit()

    return fit


@pytest.fixture
def run(project: Path) -> Path:
    """The directory of the run that ``fit`` makes."""
    return project / "runs" / "tiny"
