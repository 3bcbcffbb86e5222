"""What the commands share: configuration arguments, and the folder of a run."""

from typing import TYPE_CHECKING

from drawbar.config.io.load_config import LoadedConfig, load_config, load_run_config

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
    """See ``load_run_config``."""
    return load_run_config(run, overrides, task.Config if task else None)
