"""What a run directory is, by the files in it. Without torch."""

from pathlib import Path

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
"""In a run directory: locked by the process that trains the run, and says which one that is."""
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_ONLY_OF_RUNS = (LOCK_FILE, STATUS_FILE, METRICS_FILE, CHECKPOINTS)
"""A run locks its directory before it writes ``config.yaml``. A copy may lack the hidden lock file, and a run that was
converted from another program's has nothing but checkpoints."""


def is_run_dir(folder: Path) -> bool:
    """Whether training wrote this folder. A project folder has a ``config.yaml`` too, and nothing that only runs
    have."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).exists() for name in _ONLY_OF_RUNS)
