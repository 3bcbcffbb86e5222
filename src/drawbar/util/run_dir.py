"""The names of files in a run directory, and how to recognize one by them. Does not import torch."""

from pathlib import Path

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
"""In a run directory: locked by the process that trains the run, and says which one that is."""
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_ONLY_OF_RUNS = (LOCK_FILE, STATUS_FILE, METRICS_FILE, CHECKPOINTS)
"""Names that only a run directory has; each run directory has at least one. The lock file is there before
``config.yaml``, but a copy may lack it, as it is hidden. What `drawbar convert` writes has only checkpoints."""


def is_run_dir(folder: Path) -> bool:
    """Whether this folder is a run directory. A ``config.yaml`` alone does not make it one: a project folder has that,
    too."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).exists() for name in _ONLY_OF_RUNS)
