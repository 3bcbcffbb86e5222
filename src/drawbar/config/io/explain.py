"""Explains the configuration: a setting to a user at the terminal, or all of them to an editor, as a JSON schema."""

import json
from collections.abc import Iterator
from typing import Any

from drawbar.config.io.fields import (
    Setting,
    TolerantJsonSchema,
    catalogue,
    children,
    lookup,
    show,
    suggestions,
)
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.io.source import ancestors
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, CausalLMConfig, TaskConfig
from drawbar.errors import UserError


def explain(key: str, loaded: LoadedConfig) -> str:
    """Value, origin, type, default and meaning of one setting; for a section, one line per setting.

    Raises:
        UserError: there is no such key.
    """
    known = catalogue(type(loaded.config))
    if key not in known:
        return _explain_free(key, loaded, known)
    setting = known[key]
    if setting.is_section:
        return _explain_section(setting, loaded, known)
    lines = [f"{key} = {_value(key, loaded)}", *_facts(setting, loaded)]
    inside = children(known, key)
    if inside:
        lines += ["", "Its keys:", *_listing(inside, loaded)]
    return "\n".join(lines)


def schema_json(task: type[TaskConfig] | None = None) -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors.

    Args:
        task: the options under ``task:``; None for those of the built-in task that ``task.type`` names, and arbitrary
            options for a user's own task.
    """
    schema = run_config_type(task or CausalLMConfig).model_json_schema(schema_generator=TolerantJsonSchema)
    if task is None:
        for options in BUILT_IN_TASKS.values():
            own = options.model_json_schema(schema_generator=TolerantJsonSchema)
            schema["$defs"] |= own.pop("$defs", {}) | {options.__name__: own}
        schema["properties"]["task"] = _schema_by_type()
    return schema


def _schema_by_type() -> dict[str, Any]:
    """The JSON schema of the section ``task``, with the options of the task that ``type`` names."""
    words = {"anyOf": [{"enum": list(BUILT_IN_TASKS)}, {"type": "string"}]}
    meaning = TaskConfig.model_fields["type"].description
    by_type = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {"$ref": f"#/$defs/{options.__name__}"},
        }
        for name, options in BUILT_IN_TASKS.items()
    ]
    # without a type it is causal_lm, or the task of the script that reads the file, with arbitrary options
    untyped = {"if": {"not": {"required": ["type"]}}, "then": {"anyOf": [{"$ref": "#/$defs/CausalLMConfig"}, {}]}}
    properties = {"type": {**words, "description": meaning}}
    return {"type": "object", "properties": properties, "allOf": [*by_type, untyped]}


def schema_text(schema: dict[str, Any]) -> str:
    """A JSON schema as a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _explain_section(section: Setting, loaded: LoadedConfig, known: dict[str, Setting]) -> str:
    title = f"{section.key}: {section.meaning}" if section.meaning else section.key
    return "\n".join([title, "", *_listing(children(known, section.key), loaded)])


def _explain_free(key: str, loaded: LoadedConfig, known: dict[str, Setting]) -> str:
    """Explain a key of a mapping with arbitrary keys, such as ``task.from_scratch.n_layer``."""
    holder = next((known[ancestor] for ancestor in ancestors(key) if ancestor in known), None)
    if holder is None or not holder.is_mapping:
        meant = suggestions(known, key)
        section = holder.key if holder is not None and holder.is_section else ""
        listed = f"{f'in {section}' if section else 'sections'}: {', '.join(children(known, section))}"
        raise UserError(f"there is no setting {key}", remedy=f"did you mean {' or '.join(meant)}?" if meant else listed)
    return "\n".join(
        [
            f"{key} = {_value(key, loaded)}",
            f"  from:     {loaded.origin(key)}",
            f"  part of:  {holder.key}: {holder.meaning}",
        ]
    )


def _value(key: str, loaded: LoadedConfig) -> str:
    holder, _, name = key.rpartition(".")
    inside = lookup(loaded.config, holder) if holder else loaded.config
    is_set = name in (inside if isinstance(inside, dict) else getattr(type(inside), "model_fields", ()))
    return show(lookup(loaded.config, key)) if is_set else "(not set)"


def _facts(setting: Setting, loaded: LoadedConfig) -> Iterator[str]:
    yield f"  from:     {loaded.origin(setting.key)}"
    yield f"  allowed:  {setting.allowed}"
    yield f"  default:  {show(setting.default)}"
    if setting.meaning:
        yield f"  meaning:  {setting.meaning}"


def _listing(settings: dict[str, Setting], loaded: LoadedConfig) -> Iterator[str]:
    """``key = value   meaning``, aligned; a section has no value."""
    assignments = {
        setting.key: setting.key if setting.is_section else f"{setting.key} = {_value(setting.key, loaded)}"
        for setting in settings.values()
    }
    width = max(map(len, assignments.values()), default=0)
    for setting in settings.values():
        yield f"  {assignments[setting.key]:<{width}}  {setting.meaning}".rstrip()
