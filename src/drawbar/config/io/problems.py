"""Translates pydantic's errors for users of a YAML file: one line per key."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from drawbar.config.io.fields import REQUIRED, Setting, catalogue, children, show, suggestions
from drawbar.config.io.source import Origin, Settings, ancestors
from drawbar.config.schema.guest_section import SECTIONS_GROUP
from drawbar.config.schema.task_sections import BUILT_IN_TASKS
from drawbar.errors import nearest
from drawbar.util.registry import left_out_folders


def report_errors(error: ValidationError, model: type[BaseModel], settings: Settings) -> None:
    """Add every error of ``error`` to ``settings.problems``.

    A value that matches no branch of a union gives one error per branch; they become one problem. If a branch looked
    inside the value (a list, a section), only the deeper problem is kept.
    """
    by_key: dict[str, list[Any]] = defaultdict(list)
    for found in error.errors(include_url=False):
        by_key[_dotted(found["loc"], settings.values, found["type"])].append(found)
    deepest = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    known = catalogue(model)
    for key in deepest:
        settings.report(
            key, _reason(key, by_key[key], known) + _quoting_hint(key, by_key[key], known, settings.origins)
        )


def report_missing_values(model: type[BaseModel], settings: Settings) -> None:
    """Add a problem for each argument without a value, suggesting ``KEY=null`` if allowed."""
    known = catalogue(model)
    for argument in settings.without_value:
        advice = _advice_for_no_value(argument.partition("=")[0], known)
        settings.problems.append(f"command line: {argument}: there is no value{advice}")


def _advice_for_no_value(key: str, known: dict[str, Setting]) -> str:
    setting = next((known[name] for name in ancestors(key) if name in known), None)
    if setting is None or setting.is_section:
        return ""
    if setting.key != key or "null" in setting.allowed.split(" | "):  # the key of a mapping may have any value
        return f"; write {key}=null for none"
    return f"; expected {setting.allowed}{_default_hint(None, setting)}"


def _dotted(location: Sequence[int | str], values: Any, kind: str) -> str:
    """The key of an error, without pydantic's names for the branches of a union."""
    parts: list[str] = []
    node = values
    for depth, part in enumerate(location):
        is_entry = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if is_entry:
            node = node[part]
            parts.append(str(part))
        elif kind == "missing" and depth == len(location) - 1 and isinstance(node, dict):
            parts.append(str(part))
    return ".".join(parts)


def _reason(key: str, errors: list[Any], known: dict[str, Setting]) -> str:
    kinds = {error["type"] for error in errors}
    for error in errors:
        if error["type"] in ("value_error", "assertion_error"):
            return str(error["ctx"]["error"])
    if "extra_forbidden" in kinds:
        return _unknown_key(key, known)
    value = errors[0]["input"]
    if kinds == {"string_pattern_mismatch"} and key not in known:
        holder = next((known[ancestor] for ancestor in ancestors(key) if ancestor in known), None)
        if holder is not None:  # pydantic would show the pattern
            return f"expected {holder.allowed}, with {_show(value)} among them"
    if key not in known:
        # An item of a list or mapping: pydantic describes the item, the catalogue the whole.
        return f"{errors[0]['msg'].replace('Input should be', 'expected')}, got {_show(value)}"
    setting = known[key]
    if setting.is_section:
        return f"expected a section of keys and values, got {_show(value)}{_section_hint(key, value, known)}"
    if kinds == {"missing"} and not isinstance(value, list):
        return f"missing; expected {setting.allowed}"
    return f"expected {setting.allowed}, got {_show(value)}{_hint(value, setting)}"


def _unknown_key(key: str, known: dict[str, Setting]) -> str:
    if key in (left_out := left_out_folders(SECTIONS_GROUP)):
        return f"unknown key: drawbar was installed without its folder {left_out[key]}, which brings this section"
    meant = suggestions(known, key)
    owners = _tasks_with(key)
    if owners:
        hint = f"did you mean {' or '.join(meant)}? Else " if meant else ""
        return f"unknown key: the task has no such option, which {owners} has; {hint}set task.type, or leave it out"
    if meant:
        return f"unknown key; did you mean {' or '.join(meant)}?"
    section = next((ancestor for ancestor in ancestors(key)[1:] if ancestor in known), "")
    return f"unknown key; allowed {f'in {section}' if section else 'here'}: {', '.join(children(known, section))}"


def _tasks_with(key: str) -> str:
    """The built-in tasks with this option, in words; empty if there are none, and for a key outside ``task``."""
    section, _, option = key.rpartition(".")
    names = [name for name, config in BUILT_IN_TASKS.items() if section == "task" and option in config.model_fields]
    return " or ".join(names)


def _section_hint(section: str, value: Any, known: dict[str, Setting]) -> str:
    if value is None:
        return "; indent its keys below it, or remove it"
    for name, setting in children(known, section).items() if isinstance(value, str) else ():
        if word := nearest(value, setting.words):
            return f"; did you mean {section}.{name}={word}?"
    return ""


def _quoting_hint(key: str, errors: list[Any], known: dict[str, Setting], origins: Mapping[str, Origin]) -> str:
    """How to quote a text with a colon, which YAML reads as a key and a value (``translate: ``); or empty."""
    if not isinstance(errors[0]["input"], dict) or key not in known or "text" not in known[key].allowed.split(" | "):
        return ""
    arguments = [origin.argument for place, origin in origins.items() if place == key or place.startswith(f"{key}.")]
    if arguments and arguments[0] and arguments[0].startswith(f"{key}="):
        text = arguments[0].partition("=")[2]
        return f"; a text with a colon needs its own quotes: '{key}=\"{text}\"'"
    return "; a text with a colon needs quotes"


def _hint(value: Any, setting: Setting) -> str:
    """The value that was probably meant, as a question; or empty."""
    if setting.holds_sections:
        given = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
        sections = ", ".join(f"{name}: {{}}" for name in given or ["NAME"])
        return f"; each name has a section of options: {setting.key}={{{sections}}}"
    if isinstance(value, int) and not isinstance(value, bool) and setting.allowed.startswith("text of"):
        return f'; did you mean the text "{value}", in quotes? On the command line: {setting.key}=\'"{value}"\''
    meant = _meant(value, setting)
    return f"; did you mean {meant}?" if meant else _default_hint(value, setting)


def _default_hint(value: Any, setting: Setting) -> str:
    """The default, for users who wrote null to restore it; or empty."""
    return "" if value is not None or setting.default == REQUIRED else f"; the default is {show(setting.default)}"


USUAL_WORDS = {"gpu": "cuda"}
"""Other programs' words for drawbar's values that are spelled too differently for a spelling suggestion."""


def _meant(value: Any, setting: Setting) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer() and "whole number" in setting.allowed:
        return str(int(value))
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if "true | false" in setting.allowed and text in {"yes", "on", "y", "no", "off", "n", "true", "false"}:
        return "true" if text in {"yes", "on", "y", "true"} else "false"
    if "null" in setting.allowed.split(" | ") and text in {"none", "null", "nil"}:
        return "null"
    if setting.takes_number and (number := _number(text)):
        return f"{number}, without quotes"
    usual = USUAL_WORDS.get(text)
    return usual if usual in setting.words else nearest(text, setting.words)


def _number(text: str) -> str | None:
    """``"1,000"`` → ``1000``; ``"5%"`` → ``0.05``; None if it is not a number."""
    text = text.replace(",", "").replace(" ", "")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return None
    if not math.isfinite(number):  # as `nan`, which no setting takes
        return None
    return f"{number / 100:g}" if text.endswith("%") else text


def _show(value: Any) -> str:
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
