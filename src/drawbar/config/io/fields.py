"""The catalogue of settings, read from the pydantic models: the type in words, the default and the meaning of each."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema, to_jsonable_python

from drawbar.config.io.other_names import our_names
from drawbar.errors import nearest

REQUIRED = "(required)"
"""Shown as the default of a required setting."""


@dataclass(frozen=True)
class Setting:
    """One setting, or one section of settings (``default`` is then None)."""

    key: str
    allowed: str
    """The type in words, such as ``whole number >= 1 | auto``."""
    words: tuple[str, ...]
    """The literal words among the allowed values, such as ``auto``."""
    default: Any
    meaning: str
    is_section: bool
    is_mapping: bool
    """Whether it is a mapping with arbitrary keys, such as ``task.from_scratch``."""
    holds_sections: bool
    """Whether it is such a mapping in which each key has a section of options, such as ``tracking.trackers``."""

    @property
    def takes_number(self) -> bool:
        return "number" in self.allowed


class TolerantJsonSchema(GenerateJsonSchema):
    """JSON schemas for models with fields of any type: types unknown to JSON Schema allow any value."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}


@cache
def catalogue(model: type[BaseModel]) -> dict[str, Setting]:
    """Every setting and section of a configuration model by its dotted key, in the order of the file."""
    return _collect(model, "")


def children(settings: dict[str, Setting], section: str) -> dict[str, Setting]:
    """The settings directly inside a section, by name; ``""`` is the top level."""
    prefix = f"{section}." if section else ""
    inside = {key.removeprefix(prefix): found for key, found in settings.items() if key.startswith(prefix)}
    return {name: found for name, found in inside.items() if "." not in name}


def suggestions(settings: dict[str, Setting], key: str) -> list[str]:
    """Settings that a user who wrote ``key`` may have meant: drawbar's setting for another trainer's name; else the
    nearest spelling in the same section, and settings with the same name in others."""
    ours = [setting for setting in our_names(key) if setting.partition("=")[0] in settings]
    if ours:
        return ours
    section, _, name = key.rpartition(".")
    same = namesakes(settings, name)
    if same and not section:  # a setting without its section
        return same
    near = nearest(name, children(settings, section))
    beside = [f"{section}.{near}" if section else near] if near else []
    names = [known.rpartition(".")[2] for known in settings]
    if not near and name not in names:
        name = nearest(name, names) or name
    return list(dict.fromkeys(beside + namesakes(settings, name)))


def namesakes(settings: Iterable[str], name: str) -> list[str]:
    """The settings with this last name, of those in the outermost sections: ``optim.lr``, not ``optim.groups.lr``."""
    same = [known for known in settings if known.rpartition(".")[2] == name]
    return [known for known in same if known.count(".") == min(one.count(".") for one in same)]


def lookup(config: BaseModel, key: str) -> Any:
    """The value at a dotted key; None if a section above it is not set, or is not a section."""
    value: Any = config
    for name in key.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, name, None)
        else:  # on a string, getattr would find methods
            value = value.get(name) if isinstance(value, dict) else None
    return value


def show(value: Any) -> str:
    """A value as typed on the command line."""
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


def _collect(model: type[BaseModel], prefix: str) -> dict[str, Setting]:
    schema = model.model_json_schema(schema_generator=TolerantJsonSchema)
    found: dict[str, Setting] = {}
    for name, info in model.model_fields.items():
        key = prefix + name
        part = schema["properties"][name]
        mappings = [option for option in part.get("anyOf", [part]) if option.get("type") == "object"]
        nested = _models(info.annotation)
        is_section = nested == [info.annotation]
        found[key] = Setting(
            key=key,
            allowed=_describe(part, schema.get("$defs", {})),
            words=tuple(_words(part)),
            default=None if is_section else _default(info),
            meaning=" ".join((info.description or _first_line(info.annotation)).split()),
            is_section=is_section,
            is_mapping=bool(mappings),
            holds_sections=any(_takes_object(option.get("additionalProperties")) for option in mappings),
        )
        for inner in nested:
            found |= _collect(inner, f"{key}.")
    return found


def _takes_object(values: Any) -> bool:
    """Whether the JSON schema of a mapping's values allows mappings."""
    options = values.get("anyOf", [values]) if isinstance(values, dict) else []
    return any(option.get("type") == "object" for option in options)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may contain: its type, or members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]


def _default(info: FieldInfo) -> Any:
    return REQUIRED if info.is_required() else info.get_default(call_default_factory=True)


def _first_line(annotation: Any) -> str:
    """The first line of a section's docstring, for a field without its own docstring."""
    is_own_class = isinstance(annotation, type) and annotation.__module__ != "builtins"
    doc = annotation.__doc__ if is_own_class else None
    return doc.strip().splitlines()[0] if doc else ""


def _words(part: dict[str, Any]) -> list[str]:
    words = [str(word) for word in part.get("enum", [])]
    if isinstance(part.get("const"), str):
        words.append(part["const"])
    for option in part.get("anyOf", []):
        words += _words(option)
    return words


def _describe(part: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    match part:
        case {"anyOf": options}:
            return " | ".join(_describe(option, definitions) for option in options)
        case {"allOf": [only]}:
            return _describe(only, definitions)
        case {"enum": words}:
            return " | ".join(str(word) for word in words)
        case {"const": word}:
            return str(word)
        case {"$ref": reference}:
            target = definitions[reference.rpartition("/")[2]]
            return _describe(target, definitions)
        case {"type": "object", "properties": properties}:
            return f"section ({', '.join(properties)})"
        case {"type": "array", "prefixItems": items}:
            return f"list of {len(items)}: {', '.join(_describe(item, definitions) for item in items)}"
        case {"type": "array", "items": items}:
            return f"list of {_describe(items, definitions)}"
    return _describe_simple(part)


_NAMES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true | false",
    "null": "null",
    "string": "text",
    "array": "list",
    "object": "mapping",
}

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _describe_simple(part: dict[str, Any]) -> str:
    name = _NAMES.get(part.get("type", ""), "any value")
    bounds = " and ".join(f"{sign} {_number(part[bound])}" for bound, sign in _BOUNDS.items() if bound in part)
    if "$comment" in part:
        name += f" of {part['$comment']}"
    if "maxLength" in part:
        name += f", at most {part['maxLength']} characters"
    return f"{name} {bounds}".strip()


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
