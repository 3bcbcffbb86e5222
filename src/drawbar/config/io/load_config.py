"""From a YAML file and ``key=value`` arguments to a checked, frozen :class:`RunConfig`, and back to YAML."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML, CommentedMap, CommentedSeq, RoundTripRepresenter, ScalarNode

from drawbar.config.io.fields import show
from drawbar.config.io.problems import report_errors, report_missing_values
from drawbar.config.io.source import (
    DEFAULT,
    Origin,
    Settings,
    apply_override,
    config_of_run,
    merge_over,
    read_file,
    run_folder,
)
from drawbar.config.io.user_modules import find_by_name
from drawbar.config.schema.guest_section import SECTIONS_GROUP
from drawbar.config.schema.run_config import RunConfig, run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, TASKS, TaskConfig
from drawbar.errors import UserError
from drawbar.util.registry import left_out_folders

_SPLITS = ("train", "validation", "test")
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("train.steps", "train.epochs"),
    ("train.micro_batch", "train.micro_batch_tokens"),
    ("data.validation", "data.validation_share"),
    *(tuple(f"data.{split}.{form}" for form in ("files", "parallel", "dataset")) for split in _SPLITS),
)
"""Groups of alternatives, of which at most one may be set."""


def replace_alternatives(settings: Settings) -> None:
    """If the command line sets one of several alternatives, drop the others that it does not set itself, with a note.
    Alternatives set in the same place are kept, and refused later."""
    for keys in ALTERNATIVES:
        chosen = [key for key in keys if _value(settings, key) not in (None, [], "auto")]
        given = [key for key in chosen if _origin(settings.origins, key).argument is not None]
        for old in [key for key in chosen if key not in given] if given else ():
            new = given[0]
            settings.notes.append(
                f"{new}={show(_value(settings, new))} ({_origin(settings.origins, new)}) takes the place of "
                f"{old}={show(_value(settings, old))} ({_origin(settings.origins, old)})"
            )
            section, _, name = old.rpartition(".")
            del _value(settings, section)[name]
            for known in [known for known in settings.origins if f"{known}.".startswith(f"{old}.")]:
                del settings.origins[known]


def _origin(origins: Mapping[str, Origin], key: str) -> Origin:
    inside = (origin for given, origin in origins.items() if given.startswith(f"{key}."))
    return origins.get(key) or next(inside, DEFAULT)


def _value(settings: Settings, key: str) -> Any:
    found: Any = settings.values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


SCRIPT_FILE = "script.json"
"""File in the run directory that names the script that defines the task, if ``task.type`` does not name its class."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and the origin of each setting."""

    config: RunConfig
    origins: Mapping[str, Origin]
    """Origins of the given keys, by dotted key."""
    path: Path | None
    """The YAML file, if any."""
    notes: tuple[str, ...] = ()
    """Notes about alternatives that the command line has replaced."""

    def origin(self, key: str) -> Origin:
        """The origin of a setting; for a section that was not given as a whole, that of its first key."""
        return _origin(self.origins, key)


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    task: type[Any] | None = None,
) -> LoadedConfig:
    """Read a YAML file, merge ``a.b.c=VALUE`` arguments over it (VALUE is YAML), and validate the result.

    Sections are merged; values and lists are replaced, as are alternatives (``train.steps`` replaces ``train.epochs``).
    ``task`` is your own task class, or its ``Config``; by default, ``task.type`` names it.

    Raises:
        UserError: a single error with a line per problem: location, key, what is allowed, the nearest spelling.
    """
    options = task if task is None or issubclass(task, TaskConfig) else task.Config
    return check_settings(read_settings(path, overrides), options)


def read_settings(path: str | Path | None, overrides: Sequence[str] = (), profile: Settings | None = None) -> Settings:
    """The first part of ``load_config``: the given settings, merged but not yet validated. Imports no user code.

    Args:
        profile: settings that the file and the arguments override.
    """
    settings = read_file(Path(path)) if path is not None else Settings()
    if profile is not None:
        settings = merge_over(profile, settings)
    for override in overrides:
        apply_override(settings, override)
    replace_alternatives(settings)
    return settings


def check_settings(settings: Settings, task: type[TaskConfig] | None = None) -> LoadedConfig:
    """The second part of ``load_config``; imports the user's module that ``task.type`` names."""
    for name in left_out_folders(SECTIONS_GROUP):
        if settings.values.get(name, "") is None:  # the configuration of a run that was trained where they are there
            del settings.values[name]
    # Present, so that a missing option of the task is reported under its key.
    settings.values.setdefault("task", {})
    if task is None:
        named = settings.origins.get("task.type", DEFAULT)
        if settings.path is not None and not named.argument:
            _expect_no_script(settings.path.parent, str(settings.path))
        task = _task_config(settings)
        if task is None:
            # Its options cannot be checked, but the rest of the file can.
            task, settings.values["task"] = TaskConfig, {}
    config_type = run_config_type(task)
    config = None
    try:
        # Validated as JSON, not as Python: strict, but a YAML list may become a tuple, and a YAML string a path. A
        # task's own options may have any type that pydantic can read.
        config = config_type.model_validate_json(json.dumps(settings.values))
    except ValidationError as error:
        report_errors(error, config_type, settings)
    report_missing_values(config_type, settings)
    if config is None or settings.problems:
        raise _one_error(settings.problems)
    return LoadedConfig(config, settings.origins, settings.path, tuple(settings.notes))


def load_run_config(
    run: str | Path, overrides: Sequence[str] = (), task: type[TaskConfig] | None = None
) -> LoadedConfig:
    """The configuration of a run directory, at its current location.

    Raises:
        UserError: the folder is not a run directory, or is damaged.
    """
    folder = run_folder(run)
    if task is None and not any(setting.startswith(("task.type=", "task=")) for setting in overrides):
        _expect_no_script(folder, "RUN")
    place = (f"run.dir={json.dumps(str(folder.parent))}", f"run.name={json.dumps(folder.name)}")  # quoted for YAML
    with config_of_run(folder) as path:
        return load_config(path, [*overrides, *place], task=task)


def script_of_run(folder: Path) -> tuple[Path, str] | None:
    """The script that defines the task of a run, and the class; None if ``task.type`` names the class, or if the run
    was made by an older drawbar that did not record it."""
    try:
        script = json.loads((folder / SCRIPT_FILE).read_text("utf-8"))
        return Path(script["script"]), script["class"]
    except (OSError, ValueError, KeyError, TypeError):  # no such file
        return None


def _expect_no_script(folder: Path, where: str) -> None:
    """Refuse a run whose task is a class defined in a script and not named by ``task.type``."""
    found = script_of_run(folder)
    if found is None:
        return
    path, name = found
    raise UserError(
        f"the task of this run is the class {name} of the script {path}, which `drawbar` does not know",
        where=where,
        remedy=f"run the command through the script (`python {path} …`); or, if the command takes settings, set "
        f"task.type={path.stem}:{name} in the folder of the script; in Python, load_run(…, task={name})",
    )


def dump_yaml(config: RunConfig, comments: Mapping[str, str] | None = None) -> str:
    """The configuration as YAML with every default; ``load_config`` reads it back to an equal one.

    Args:
        config: the configuration to write.
        comments: comments to add to settings, by dotted key.
    """
    return dump_settings(config.model_dump(mode="json"), comments or {})


def dump_settings(settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The settings of a configuration, maybe not all, as YAML; ``comments`` as in ``dump_yaml``."""
    yaml = YAML()
    yaml.Representer = _Representer
    # A folded line cannot have a comment, and is hard to search.
    yaml.width = 2**20
    stream = StringIO()
    yaml.dump(_tree(settings, comments, ""), stream)
    return stream.getvalue()


class _Representer(RoundTripRepresenter):
    """Writes ``null`` where ruamel would leave the value empty, and escapes unprintable characters."""


def _represent_none(representer: RoundTripRepresenter, _: None) -> ScalarNode:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _represent_text(representer: RoundTripRepresenter, text: str) -> ScalarNode:
    # Only double-quoted text supports escapes; U+0085, for one, would otherwise be read back as a line break. A key
    # that starts with ? would not be read back as text.
    plain = text.isprintable() and not text.startswith("?")
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Representer.add_representer(type(None), _represent_none)
_Representer.add_representer(str, _represent_text)


def _tree(values: Mapping[str, Any], comments: Mapping[str, str], prefix: str) -> CommentedMap:
    """Block mappings of one-line values, with their comments."""
    tree = CommentedMap()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            tree[name] = _tree(value, comments, f"{key}.")
            continue
        tree[name] = value
        if isinstance(value, list):
            tree[name] = CommentedSeq(value)
            tree[name].fa.set_flow_style()
        if key in comments:
            tree.yaml_add_eol_comment(comments[key], name)
    return tree


def _one_error(problems: list[str]) -> UserError:
    remedy = "`drawbar config explain KEY` says what a key means and allows"
    if len(problems) == 1:
        return UserError(problems[0], remedy=remedy)
    return UserError("\n".join([f"{len(problems)} problems:", *problems]), remedy=remedy)


def _task_config(settings: Settings) -> type[TaskConfig] | None:
    """The options of the task that ``task.type`` names; reports a problem and returns None if there is no such task."""
    section = settings.values.get("task")
    name = section.get("type", "causal_lm") if isinstance(section, dict) else "causal_lm"
    if not isinstance(name, str):
        return TaskConfig
    if name in BUILT_IN_TASKS:  # without importing torch
        return BUILT_IN_TASKS[name]
    try:
        return _config_of(name)
    except UserError as error:
        settings.report("task.type", f"{error.what}; {error.remedy}")
        return None


def _config_of(name: str) -> type[TaskConfig]:
    """``Config`` of a task that is not built in."""
    config = getattr(find_by_name(TASKS, name, "task.type", "Class"), "Config", None)
    if isinstance(config, type) and issubclass(config, TaskConfig):
        return config
    raise UserError(
        f"{name} is not a task", remedy="name a class with a class `Config` that subclasses drawbar.TaskConfig"
    )
