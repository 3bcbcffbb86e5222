"""What the commands share: configuration arguments, and the folder of a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.config.load import LoadedConfig, load_config
from drawbar.config.source import config_of_run
from drawbar.errors import UserError, nearest

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


def load(arguments: tuple[str, ...], task: "type[Task] | None", cluster: str | None = None) -> LoadedConfig:
    """``[CONFIG] [KEY=VALUE]...``: a file, if the first argument is no override, and the overrides; over a cluster
    profile where there is one."""
    path, overrides = None, list(arguments)
    if overrides and "=" not in overrides[0]:
        path = overrides.pop(0)
    return load_config(path, overrides, task=task.Config if task else None, cluster=cluster)


def load_run(run: str, overrides: tuple[str, ...], task: "type[Task] | None") -> LoadedConfig:
    """The configuration of a run directory, wherever it lies now.

    Raises:
        UserError: the folder holds no run, or a damaged one.
    """
    folder = Path(run).absolute()
    if not (folder / "config.yaml").is_file():
        guess = nearest(folder.name, sorted(path.parent.name for path in folder.parent.glob("*/config.yaml")))
        raise UserError(
            f"{run} is no run directory: it has no config.yaml",
            where="RUN",
            remedy=f"did you mean {folder.parent / guess}?" if guess else "give the folder that training wrote",
        )
    place = (f"run.dir={json.dumps(str(folder.parent))}", f"run.name={json.dumps(folder.name)}")  # quoted for YAML
    with config_of_run(folder) as path:
        return load_config(path, [*overrides, *place], task=task.Config if task else None)
