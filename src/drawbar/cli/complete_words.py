"""Shell completions for the arguments of commands: settings and their values, runs, checkpoints.

Cheap to import, as each TAB starts a process: only settings need pydantic, and nothing needs torch.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from click import Context, Parameter
from click.shell_completion import CompletionItem

from drawbar.util.run_dir import is_run_dir

if TYPE_CHECKING:
    from drawbar.config.io.fields import Setting

RUNS = "runs"
"""The folder that is searched for runs: the default of ``run.dir``."""
_CONFIGS = (".yaml", ".yml")


def complete_settings(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``[KEY=VALUE]...``: the keys of all settings, or the words that a setting allows."""
    before = _words_before(context, parameter)
    settings = _all_settings()
    if before and before[-1] in settings:  # bash splits at "=", and click drops that: KEY= is complete, a value follows
        return _values(settings[before[-1]], incomplete, "")
    if before[-1:] == ["="]:
        return _values(settings.get(before[-2]), incomplete, "") if len(before) > 1 else []
    key, equals, value = incomplete.partition("=")
    if equals:
        return _values(settings.get(key), value, f"{key}=")
    return [
        CompletionItem(f"{key}=", help=setting.meaning)
        for key, setting in settings.items()
        if key.startswith(incomplete) and not setting.is_section
    ]


def complete_config(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``CONFIG``: YAML files, and folders on the way to them."""
    return [
        CompletionItem(f"{path}{os.sep}" if path.is_dir() else str(path))
        for path in _paths(incomplete)
        if path.is_dir() or path.suffix in _CONFIGS
    ]


def complete_config_and_settings(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``[CONFIG] [KEY=VALUE]...``: a file first, and settings from the second argument on."""
    if _words_before(context, parameter):
        return complete_settings(context, parameter, incomplete)
    found = complete_config(context, parameter, incomplete)
    return found or complete_settings(context, parameter, incomplete)


def complete_keys(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``KEY``: all settings and sections."""
    return [
        CompletionItem(key, help=setting.meaning)
        for key, setting in _all_settings().items()
        if key.startswith(incomplete)
    ]


def complete_run(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``RUN``: the folders in ``runs/`` unless another path is typed; else the folders whose path starts with the
    typed text. A folder that is not a run gets a trailing ``/``, so that the user can continue."""
    folders = [path for path in _paths(incomplete) if path.is_dir()]
    if RUNS.startswith(incomplete):
        folders = [path for path in _paths(f"{RUNS}{os.sep}") if path.is_dir()] or folders
    return [CompletionItem(str(path) if is_run_dir(path.expanduser()) else f"{path}{os.sep}") for path in folders]


def complete_checkpoint(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """For ``best|latest|STEP``: these two words, and the steps of the run named earlier on the command line."""
    # click may not have assigned the arguments to their names: it stops parsing at the option whose value is incomplete
    run = context.params.get("run") or context.params.get("source") or next(iter(context.args), RUNS)
    folder = Path(str(run)) / "checkpoints"
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal())
    words = ["best", "latest", *map(str, steps)]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _words_before(context: Context, parameter: Parameter) -> list[str]:
    """The words already typed for this argument."""
    return list(context.params.get(parameter.name or "") or ())


def _all_settings() -> "dict[str, Setting]":
    """Every setting by its key, including those of all built-in tasks."""
    from drawbar.config.io.fields import catalogue
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.config.schema.task_sections import BUILT_IN_TASKS

    found = dict(catalogue(RunConfig))
    for task in BUILT_IN_TASKS.values():
        found |= {f"task.{key}": setting for key, setting in catalogue(task).items()}
    return found


def _values(setting: "Setting | None", incomplete: str, prefix: str) -> list[CompletionItem]:
    """The words that a setting allows, each after ``prefix``; none for a setting that takes any text or number."""
    if setting is None:
        return []
    from drawbar.config.schema.task_sections import BUILT_IN_TASKS

    words = tuple(BUILT_IN_TASKS) if setting.key == "type" else setting.words
    words += tuple(word for word in ("true", "false", "null") if word in setting.allowed.split(" | "))
    return [CompletionItem(prefix + word) for word in words if word.startswith(incomplete)]


def _paths(incomplete: str) -> list[Path]:
    """Files and folders whose path starts with ``incomplete``; hidden ones only if the dot is typed."""
    folder, _, name = incomplete.rpartition(os.sep)
    parent = Path(folder or (os.sep if incomplete.startswith(os.sep) else "."))
    try:
        entries = sorted(parent.expanduser().iterdir())
    except OSError:
        return []
    return [
        parent / path.name
        for path in entries
        if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith("."))
    ]
