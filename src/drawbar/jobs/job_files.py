"""Where a job's files are in the run directory, and the variables by which a job tells its nodes of them."""

import json
from pathlib import Path

from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import LAUNCH_FOLDER, newest_step

MOST_RESTARTS = 3
"""Restarts without progress."""
CONFIG = "DRAWBAR_CONFIG"
"""Environment variable: the configuration of the run, as YAML in base64."""
NODES = "DRAWBAR_NODES"
"""Environment variable: all nodes by name, in Slurm's order. The batch script sets it: not all nodes can ask Slurm."""


def config_file(run_dir: Path, number: str) -> Path:
    """The configuration of a job, or of an element, as it was submitted."""
    return run_dir / LAUNCH_FOLDER / f"config-{number}.yaml"


def end_file(run_dir: Path, number: str) -> Path:
    """How a job ended, as its own script or launcher has written it down."""
    return run_dir / LAUNCH_FOLDER / f"ended-{number}.json"


def count_restart(run_dir: Path, job: str) -> int:
    """Count one more start of the job. Returns how many restarts in a row, up to this one, found no new checkpoint."""
    record = run_dir / LAUNCH_FOLDER / f"restarts-{job}.json"
    step, restarts = newest_step(run_dir), 0
    if record.exists():
        last = json.loads(record.read_text())
        restarts = last["restarts"] + 1 if step <= last["step"] else 0
    write_atomically(record, json.dumps({"step": step, "restarts": restarts}).encode())
    return restarts
