"""Where a job's files are in the run directory, and the variables by which a job tells its nodes of them."""

import json
from pathlib import Path

from drawbar.util.atomic_files import write_atomically

MOST_RESTARTS = 3
"""Restarts without progress."""
FOLDER = "launch"
"""Inside a run directory: what the launchers write."""
CONFIG = "DRAWBAR_CONFIG"
"""Environment variable: the configuration of the run, as YAML in base64."""
NODES = "DRAWBAR_NODES"
"""Environment variable: all nodes by name, in Slurm's order. The batch script sets it: not all nodes can ask Slurm."""
SIGNAL_SECONDS = "DRAWBAR_SIGNAL_SECONDS"
"""Environment variable: how many seconds before the job's time limit its ranks get the signal to save."""


def plan_file(run_dir: Path) -> Path:
    """What the run was planned to take, as JSON, where ``drawbar submit`` planned it."""
    return run_dir / FOLDER / "plan.json"


def config_file(run_dir: Path, number: str) -> Path:
    """The configuration of a job, or of an element, as it was submitted."""
    return run_dir / FOLDER / f"config-{number}.yaml"


def end_file(run_dir: Path, number: str) -> Path:
    """How a job ended, as its own script or launcher has written it down."""
    return run_dir / FOLDER / f"ended-{number}.json"


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of the checkpoints by step, ascending. Only names are looked at, not whether they are intact."""
    found = {path.name.removeprefix("step-"): path for path in (run_dir / "checkpoints").glob("step-*")}
    return dict(sorted((int(step), path) for step, path in found.items() if step.isdecimal()))


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    return max(checkpoint_folders(run_dir), default=-1)


def count_restart(run_dir: Path, job: str) -> int:
    """Count one more start of the job. Returns how many restarts in a row, up to this one, found no new checkpoint."""
    record = run_dir / FOLDER / f"restarts-{job}.json"
    step, restarts = newest_step(run_dir), 0
    if record.exists():
        last = json.loads(record.read_text())
        restarts = last["restarts"] + 1 if step <= last["step"] else 0
    write_atomically(record, json.dumps({"step": step, "restarts": restarts}).encode())
    return restarts
