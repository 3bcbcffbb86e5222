"""What the commands share: configuration arguments, and the folder of a run."""

from typing import TYPE_CHECKING

from drawbar.config.io.load_config import LoadedConfig, check_settings, load_run_config, read_settings
from drawbar.config.io.source import Settings
from drawbar.util.torch_imports import quick_imports

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


def load(arguments: tuple[str, ...], task: "type[Task] | None", cluster: str | None = None) -> LoadedConfig:
    """``[CONFIG] [KEY=VALUE]...``: a file (if the first argument is no override) and overrides; both outrank a cluster
    profile, if one is given."""
    return check(read(arguments, cluster), task)


def read(arguments: tuple[str, ...], cluster: str | None = None) -> Settings:
    """The first part of ``load``: the settings, not yet checked."""
    path, overrides = None, list(arguments)
    if overrides and "=" not in overrides[0]:
        path = overrides.pop(0)
    return read_settings(path, overrides, cluster)


def check(settings: Settings, task: "type[Task] | None") -> LoadedConfig:
    """The other part of ``load``; the task's module may import torch."""
    with quick_imports():
        return check_settings(settings, task.Config if task else None)


def load_run(run: str, overrides: tuple[str, ...], task: "type[Task] | None") -> LoadedConfig:
    """See ``load_run_config``."""
    with quick_imports():
        return load_run_config(run, overrides, task.Config if task else None)
