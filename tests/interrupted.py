"""A run that is interrupted after half of its steps, and what it comes to otherwise."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from conftest import make_project
from drawbar.checkpoint.read import open_snapshot
from harness import Finished, run_cli
from runs import losses


class InterruptedRun:
    """The run of ``make_project``, which has made 4 of its 8 steps.

    Args:
        folder: for the run, and for the same run at its end.
        command: ``train config.yaml SETTINGS``, with 8 steps.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._command = command
        self._begun, whole = folder / "begun", folder / "whole"
        self._begun.mkdir()
        make_project(self._begun)
        begun = run_cli(*command, "train.steps=4", cwd=self._begun)
        assert begun.code == 0, begun.err
        shutil.copytree(self._begun, whole)
        ended = run_cli(*command, cwd=whole)
        assert ended.code == 0, ended.err
        self._losses = losses(whole / "runs" / "tiny")
        self._checkpoints = checkpoints(whole)

    def copy(self, project: Path) -> Path:
        """The run as it was interrupted, in a new folder ``project``."""
        shutil.copytree(self._begun, project)
        return project

    def check_goes_on(self, project: Path) -> Finished:
        """The same command comes to the end that the run would have come to, and leaves nothing half-written."""
        done = run_cli(*self._command, cwd=project)
        assert done.code == 0, done.err
        self.check_equal(project)
        left = [path.name for path in checkpoints(project).iterdir() if path.suffix in (".tmp", ".deleting")]
        assert not left
        return done

    def check_equal(self, project: Path) -> None:
        """The run has come to that end."""
        assert losses(project / "runs" / "tiny") == self._losses
        folders = self._checkpoints, checkpoints(project)
        wanted, found = (open_snapshot(folder / "step-00000008").model for folder in folders)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def checkpoints(project: Path) -> Path:
    return project / "runs" / "tiny" / "checkpoints"
