"""The names of files in a run directory, and how to recognize one by them. Does not import torch."""

from pathlib import Path

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
"""In a run directory: locked by the process that trains the run, and says which one that is."""
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
FIRST_SAMPLES_FILE = "first_samples.json"
CHECKPOINTS = "checkpoints"
LAUNCH_FOLDER = "launch"
"""What is known of the launches of the run: its jobs, its plan, the nodes that failed it."""
_ONLY_OF_RUNS = (LOCK_FILE, STATUS_FILE, METRICS_FILE, CHECKPOINTS)
"""Names that only a run directory has; each run directory has at least one. The lock file is there before
``config.yaml``, but a copy may lack it, as it is hidden. What `drawbar convert` writes has only checkpoints."""


def is_run_dir(folder: Path) -> bool:
    """Whether this folder is a run directory. A ``config.yaml`` alone does not make it one: a project folder has that,
    too."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).exists() for name in _ONLY_OF_RUNS)


def plan_file(run_dir: Path) -> Path:
    """What the run was planned to take, as JSON, where it was planned before it was submitted."""
    return run_dir / LAUNCH_FOLDER / "plan.json"


def job_config(run_dir: Path, number: str) -> Path:
    """The configuration of a job, or of an element, as it was submitted."""
    return run_dir / LAUNCH_FOLDER / f"config-{number}.yaml"


def job_end(run_dir: Path, number: str) -> Path:
    """How a job ended, as its own script or launcher has written it down."""
    return run_dir / LAUNCH_FOLDER / f"ended-{number}.json"


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of the checkpoints by step, ascending. Only names are looked at, not whether they are intact."""
    found = {path.name.removeprefix("step-"): path for path in (run_dir / CHECKPOINTS).glob("step-*")}
    return dict(sorted((int(step), path) for step, path in found.items() if step.isdecimal()))


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    return max(checkpoint_folders(run_dir), default=-1)
