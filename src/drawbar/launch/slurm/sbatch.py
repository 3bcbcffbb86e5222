"""Handing a batch script to Slurm."""

import re
import subprocess
from pathlib import Path

from drawbar.errors import UserError
from drawbar.launch.slurm.queue import check_configured


def sbatch(script: str, folder: Path) -> str:
    """Give the script to sbatch. Returns the number of the job.

    Args:
        folder: where the log is going to be. It is made, unless sbatch refuses.

    Raises:
        UserError: there is no sbatch, it has no configuration, or it refuses.
    """
    made = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        number = _call(script)
    except UserError:
        for path in made:
            path.rmdir()
        raise
    return number


def _call(script: str) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # names of files may be no UTF-8
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(
            "there is no Slurm here: the command sbatch is not installed",
            where="--to slurm",
            remedy="submit on a login node of the cluster; --dry-run prints the script anywhere",
        ) from error
    if done.returncode:
        check_configured(done.stderr)
        raise UserError(
            f"Slurm refuses the job: {_reason(done.stderr)}",
            where="sbatch",
            remedy="`sinfo` lists partitions with their limits; the settings are those of `cluster`",
        )
    return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several


def _missing(folder: Path) -> list[Path]:
    """The folders that must be made for ``folder``, from the innermost."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _reason(text: str) -> str:
    """What sbatch says, without its own name in front."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line) or "it does not say why"
