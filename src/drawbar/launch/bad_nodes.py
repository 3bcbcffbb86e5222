"""Records of bad nodes: written by a job, and read when it is requeued.

``<run>/launch/bad-nodes.json`` is a list with one entry for each time that a job named some.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import LAUNCH_FOLDER

FILE = "bad-nodes.json"
NODE_IS_LOST = "is lost"
"""Text that marks the reason of a node that went away in mid-run: Slurm will soon find it missing, too."""


def restart_number(environ: Mapping[str, str] = os.environ) -> int:
    """How often the scheduler has started this job before."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def record_bad_nodes(run_dir: Path, launch_id: str, reasons: Mapping[str, str]) -> None:
    """Add an entry. Raises OSError where it cannot be written.

    Args:
        launch_id: see ``Rendezvous``.
        reasons: what is wrong with each node, by its name.
    """
    path = run_dir / LAUNCH_FOLDER / FILE
    entry = {"job": launch_id, "attempt": restart_number(), "time": round(time.time(), 3), "nodes": dict(reasons)}
    text = json.dumps([*_entries(run_dir), entry], indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())


def bad_nodes(run_dir: Path, launch_id: str, restart: int | None = None) -> dict[str, str]:
    """What is wrong with each node that the job has named.

    Args:
        restart: of the job's starts, only the one with this ``restart_number`` (0: the first); None for all.
    """
    found: dict[str, str] = {}
    for entry in _entries(run_dir):
        if entry["job"] == launch_id and restart in (None, entry["attempt"]):
            found.update(entry["nodes"])
    return found


def _entries(run_dir: Path) -> list[dict]:
    path = run_dir / LAUNCH_FOLDER / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
