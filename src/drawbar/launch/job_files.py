"""Where a job's files are in the run directory, and the variables by which a job tells its nodes of them."""

from pathlib import Path

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
