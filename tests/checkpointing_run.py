"""A run that is interrupted while it restores, saves and deletes checkpoints; and that goes on exactly, or does not."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.read import open_snapshot, step_folders
from faulty_disk import Ended, FaultyDisk
from points import write_points
from runs import losses, scores

OLD, NEW, END = 2, 4, 6
"""Steps: of the checkpoint that the interrupted process begins from, of the one that it saves, and of the run's end."""
STRATEGIES = {("whole", 2): "ddp", ("parts", 2): "fsdp"}
"""By layout and number of ranks; ``auto`` for one process."""

KINDS = {
    "create": ("open", "mkdir", "mkdirat"),
    "write": ("write", "writev", "ftruncate", "ftruncate64"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "renameat", "link", "linkat"),
    "delete": ("unlink", "unlinkat", "rmdir"),
}
"""What the calls do. A link gives a file another name."""


@dataclass(frozen=True)
class Content:
    """What a run has come to: what it logged, and every bit of its last checkpoint."""

    losses: dict[int, float]
    scores: dict[int, dict[str, float]]
    tensors: dict[str, bytes]
    state: dict[str, Any]

    def difference(self, other: "Content") -> str:
        """The first thing in which two runs differ; empty where they are the same."""
        for name in ("losses", "scores", "state"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} and {getattr(other, name)}"
        if self.tensors.keys() != other.tensors.keys():
            return f"tensors: {list(self.tensors)} and {list(other.tensors)}"
        return next((name for name in self.tensors if self.tensors[name] != other.tensors[name]), "")


class CheckpointingRun:
    """A run whose next process sets a damaged checkpoint aside, ends what older processes have left half-done, goes on
    from step 2, saves step 4, evaluates, adds the score to that checkpoint, marks the best one, and deletes old ones.

    Args:
        folder: an empty one, which it works in.
        layout: ``whole`` or ``parts``.
    """

    def __init__(self, disk: FaultyDisk, folder: Path, layout: str, ranks: int) -> None:
        self._disk = disk
        self._folder = folder
        self._numbers = count()
        self.ranks = ranks
        self._settings = (
            *("train", "config.yaml", "task.type=points:PointsWithDropout", f"checkpoint.layout={layout}"),
            *("checkpoint.every=2", "eval.every=2", "optim.schedule=constant", "optim.lr=0.05", "launch.timeout=60"),
            "tracking.log_every=1",
            f"parallel.strategy={STRATEGIES.get((layout, ranks), 'auto')}",
        )
        self._source = folder / "source"
        self._source.mkdir()
        write_points(self._source)
        for steps in (1, 3):
            done = self.train(self._source, steps, keep=9)
            assert done.code == 0, done.output
        self._leave_traces()
        with self.copy() as project:
            for steps in (NEW, END):
                done = self.train(project, steps)
                assert done.code == 0, done.output
            self.expected = self._content(project)

    def _leave_traces(self) -> None:
        """What processes leave that were killed: a checkpoint that was being written, one that was to be replaced, and
        one whose successor was complete. And a checkpoint is damaged."""
        checkpoints = self.checkpoints(self._source)
        damaged = next(path for path in sorted((checkpoints / "step-00000003").glob("model*.safetensors")))
        content = bytearray(damaged.read_bytes())
        content[-3] ^= 1
        damaged.write_bytes(content)
        (checkpoints / "step-00000005.tmp").mkdir()
        (checkpoints / "step-00000005.tmp" / damaged.name).write_bytes(content[:20])
        (checkpoints / "step-00000001").rename(checkpoints / "step-00000001.replaced")
        shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000002.replaced")

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """A project in which the run stands before the interrupted process. Several may be used at the same time."""
        project = self._folder / f"project-{next(self._numbers)}"
        shutil.copytree(self._source, project)
        yield project
        shutil.rmtree(project)

    def checkpoints(self, project: Path) -> Path:
        return project / "runs" / "points" / "checkpoints"

    def train(self, project: Path, steps: int = NEW, keep: int = 1, **faults: Any) -> Ended:
        """The process that is interrupted; with other numbers of ``steps`` those before and after it.

        Args:
            faults: see ``FaultyDisk.run``.
        """
        folder = faults.pop("folder", self.checkpoints(project))
        command = (*self._settings, f"train.steps={steps}", f"checkpoint.keep={keep}")
        return self._disk.run(command, project, folder, ranks=self.ranks, **faults)

    def check_goes_on(self, project: Path, interrupted: Ended) -> int:
        """There is a complete checkpoint, and the run goes on from it and comes to the end that it would have come to.
        Returns its step."""
        folders = step_folders(self.checkpoints(project))
        step = next((step for step, folder in folders if problems(folder) == []), None)
        assert step in (OLD, NEW), interrupted.output
        done = self.train(project, END)
        assert done.code == 0, interrupted.output + done.output
        resumed = re.search(r"resumed from \S*step-(\d+)", done.output)
        assert resumed is not None, done.output
        assert int(resumed[1]) == step, interrupted.output + done.output
        difference = self._content(project).difference(self.expected)
        assert not difference, difference + interrupted.output + done.output
        left = [path.name for path in self.checkpoints(project).iterdir()]
        assert not [name for name in left if name.endswith((".tmp", ".deleting", ".replaced"))], left
        return step

    def _content(self, project: Path) -> Content:
        run = project / "runs" / "points"
        found = open_snapshot(self.checkpoints(project) / f"step-{END:08d}")
        tensors = {
            f"{kind}: {name}": bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            for kind in ("model", "optimizer", "rng")
            for name, tensor in getattr(found, kind).items()
        }
        return Content(losses(run), scores(run), tensors, found.state)


def kind(call: str) -> str:
    name = call.split()[0]
    return next(kind for kind, names in KINDS.items() if name in names)


def phase(calls: Sequence[str]) -> str:
    """Of the last of a process's calls on checkpoints."""
    new = f"step-{NEW:08d}"
    if not any(new in call for call in calls):
        return "restore"
    return (
        "rotation"
        if calls[-1].endswith(".deleting") or (".deleting/" in calls[-1] and new not in calls[-1])
        else "save"
    )
