"""Reads a file of another trainer as keys with lines: YAML, JSON and TOML."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from drawbar.config.io.source import parse_yaml, read_text
from drawbar.errors import UserError

_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False, "~": None}
"""What other trainers' YAML 1.1 reads as true, false and null, and YAML 1.2 as text."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
_TOML_TABLE = re.compile(r"\[+\s*([\w.\"'-]+)\s*\]+")
_TOML_KEY = re.compile(r"([\w.\"'-]+)\s*=")


@dataclass(frozen=True)
class KeyFile:
    """The content of a file, and where each key is."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]
    """By key: ``lora_r``, ``training.steps``, ``datasets[0].path``. A key whose value is a list of plain values has
    one line."""

    def leaves(self) -> dict[str, Any]:
        """The value of every key that has no keys below it. Raises UserError if two have the same dotted name."""
        found = list(_leaves(self.values, ""))
        if len(found) > len(dict(found)):
            raise UserError("two of its keys have one name", where=str(self.path), remedy="write no dots in keys")
        return dict(found)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]")
    else:
        yield key, value


def read_keys(path: Path) -> KeyFile:
    """The keys of a file, by what its extension says it is.

    Raises:
        UserError: there is no such file, it cannot be parsed, or it holds no keys.
    """
    readers = {".toml": _read_toml, ".json": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml}
    if path.suffix not in readers:
        raise UserError(
            f"it is no file of a kind that is read here: {', '.join(readers)}",
            where=str(path),
            remedy="of a configuration that is a Python program, write its values to a YAML file and import that",
        )
    text = read_text(path)
    try:
        found = readers[path.suffix](path, text)
    except (YAMLError, ValueError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f":{mark.line + 1}" if mark else ""
        what = (error.problem if isinstance(error, MarkedYAMLError) else str(error)) or "it cannot be parsed"
        raise UserError(what.splitlines()[0], where=f"{path}{line}", remedy="correct the file first") from error
    if not isinstance(found.values, dict) or not found.values:
        raise UserError("the file has no keys", where=str(path), remedy="name a configuration of another trainer")
    return found


def _read_yaml(path: Path, text: str) -> KeyFile:
    tree = parse_yaml(text)
    return KeyFile(path, plain(tree), dict(_yaml_lines(tree, "")))


def _read_json(path: Path, text: str) -> KeyFile:
    values = json.loads(text)  # strict; YAML, of which JSON is a part, knows the lines
    return KeyFile(path, values, dict(_yaml_lines(parse_yaml(text.replace("\t", " ")), "")))


def _yaml_lines(tree: Any, key: str) -> Iterator[tuple[str, int]]:
    if isinstance(tree, CommentedMap):
        for name, inner in tree.items():
            below = f"{key}.{name}" if key else str(name)
            # keys that come by `<<` have no place of their own
            yield below, (tree.lc.key(name)[0] if name in tree.lc.data else tree.lc.line) + 1
            yield from _yaml_lines(inner, below)
    elif isinstance(tree, CommentedSeq):
        for number, inner in enumerate(tree):
            # entries of a list with a tag have no place of their own
            yield f"{key}[{number}]", (tree.lc.data or {}).get(number, [tree.lc.line])[0] + 1
            yield from _yaml_lines(inner, f"{key}[{number}]")


def plain(value: Any) -> Any:
    """The value without ruamel's types, and as YAML 1.1 and the trainers read it."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        text = str(value)
        return _YAML_1_1.get(text.lower(), _number(text) if _NUMBER.match(text) else text)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value if value is None else bool(value)  # a boolean with an anchor is of a class of its own


def _number(text: str) -> int | float:
    return int(text.replace("_", "")) if re.fullmatch(r"[-+]?[\d_]+", text) else float(text.replace("_", ""))


def _read_toml(path: Path, text: str) -> KeyFile:
    """tomllib knows no lines: a key's line is the one that begins with it, below the header of its table."""
    values = tomllib.loads(text)
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TOML_TABLE.match(line.strip()):
            table = header[1].replace('"', "").replace("'", "")
            lines.setdefault(table, number)
        elif found := _TOML_KEY.match(line.strip()):
            key = found[1].replace('"', "").replace("'", "")
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return KeyFile(path, values, lines)
