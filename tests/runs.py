"""What the tests of whole runs share: making a run in this process, and reading its losses and weights."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path

import torch
from safetensors.torch import load_file

import drawbar
from drawbar.tasks.task import Task
from drawbar.train.trainer import Outcome
from harness import wait_until

Fit = Callable[..., Outcome]
"""The fixture ``fit``: :func:`fit_in` in the tiny project."""


def fit_in(
    project: Path,
    *settings: str,
    task: type[Task] | None = None,
    resume: str = "auto",
    fork: str | None = None,
    weights_only: bool = False,
    callbacks: Sequence[drawbar.Callback] = (),
) -> Outcome:
    """What ``drawbar train config.yaml SETTINGS`` does in ``project``, in this process: less than a second."""
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for one another
    with chdir(project):
        loaded = drawbar.load_config("config.yaml", settings, task.Config if task else None)
        return drawbar.Trainer(
            loaded.config, task, resume=resume, fork=fork, weights_only=weights_only, callbacks=callbacks
        ).fit()


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of every logged step."""
    return {int(line["step"]): line["train/loss"] for line in metrics(run) if "train/loss" in line}


def scores(run: Path) -> dict[int, dict[str, float]]:
    """The scores of every evaluation."""
    return {
        int(line["step"]): {name: value for name, value in line.items() if name.startswith("eval/")}
        for line in metrics(run)
        if any(name.startswith("eval/") for name in line)
    }


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint."""
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model-00000.safetensors")


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference between two loss traces of the same steps."""
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


class AtStep(drawbar.Callback):
    """Does something after a step, on rank 0, before anything is saved."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self._step, self._what = step, what

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == self._step and run.rank == 0:
            self._what()


def delete(folder: Path) -> None:
    """Also while a checkpoint is being written there."""
    wait_until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists(), "the end of the folder")
