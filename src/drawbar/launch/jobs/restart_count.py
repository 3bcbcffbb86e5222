"""Restarts of a job that bring no new checkpoint, counted in a file, so that a crash loop ends."""

import json
from pathlib import Path

from drawbar.launch.job import FOLDER
from drawbar.util.atomic_files import write_atomically

MOST_RESTARTS = 3
"""Restarts without progress."""


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    return max(checkpoint_folders(run_dir), default=-1)


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of the checkpoints by step, ascending. Only names are looked at, not whether they are intact."""
    found = {path.name.removeprefix("step-"): path for path in (run_dir / "checkpoints").glob("step-*")}
    return dict(sorted((int(step), path) for step, path in found.items() if step.isdecimal()))


def count_restart(run_dir: Path, job: str) -> int:
    """Count one more start of the job. Returns how many restarts in a row, up to this one, found no new checkpoint."""
    record = run_dir / FOLDER / f"restarts-{job}.json"
    step, restarts = newest_step(run_dir), 0
    if record.exists():
        last = json.loads(record.read_text())
        restarts = last["restarts"] + 1 if step <= last["step"] else 0
    write_atomically(record, json.dumps({"step": step, "restarts": restarts}).encode())
    return restarts
