"""Pydantic's errors, put into words that a user of the YAML file can act on: one line for each key."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from drawbar.config.io.fields import Setting, catalogue, children, suggestions
from drawbar.config.io.source import Settings, ancestors
from drawbar.errors import nearest


def report_errors(error: ValidationError, model: type[BaseModel], settings: Settings) -> None:
    """Add every error of ``error`` to ``settings.problems``.

    A value that fits no branch of a union makes one error for each branch; they become one problem. Where a branch
    looked inside the value (a list, a section), only the deeper problem is kept.
    """
    by_key: dict[str, list[Any]] = defaultdict(list)
    for found in error.errors(include_url=False):
        by_key[_dotted(found["loc"], settings.values, found["type"])].append(found)
    deepest = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    known = catalogue(model)
    for key in deepest:
        settings.report(key, _reason(key, by_key[key], known))


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
        # An item of a list or of a mapping: pydantic's words are about the item, the catalogue's about the whole.
        return f"{errors[0]['msg'].replace('Input should be', 'expected')}, got {_show(value)}"
    setting = known[key]
    if setting.is_section:
        return f"expected a section of keys and values, got {_show(value)}{_section_hint(key, value, known)}"
    if kinds == {"missing"} and not isinstance(value, list):
        return f"missing; expected {setting.allowed}"
    return f"expected {setting.allowed}, got {_show(value)}{_hint(value, setting)}"


def _unknown_key(key: str, known: dict[str, Setting]) -> str:
    meant = suggestions(known, key)
    if meant:
        return f"unknown key; did you mean {' or '.join(meant)}?"
    section = next((ancestor for ancestor in ancestors(key)[1:] if ancestor in known), "")
    return f"unknown key; allowed {f'in {section}' if section else 'here'}: {', '.join(children(known, section))}"


def _section_hint(section: str, value: Any, known: dict[str, Setting]) -> str:
    if value is None:
        return "; indent its keys below it, or remove it"
    for name, setting in children(known, section).items() if isinstance(value, str) else ():
        if word := nearest(value, setting.words):
            return f"; did you mean {section}.{name}={word}?"
    return ""


def _hint(value: Any, setting: Setting) -> str:
    """The value that was probably meant, as a question; or nothing."""
    if isinstance(value, int) and not isinstance(value, bool) and setting.allowed.startswith("text of"):
        return f'; did you mean the text "{value}", in quotes? On the command line: {setting.key}=\'"{value}"\''
    meant = _meant(value, setting)
    return f"; did you mean {meant}?" if meant else ""


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
    return nearest(text, setting.words)


def _number(text: str) -> str | None:
    """``"1,000"`` → ``1000``; ``"5%"`` → ``0.05``; None for what is no number."""
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
