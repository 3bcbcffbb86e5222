"""Writes a conversion as YAML: the settings with the keys that they come from, and a report as comments."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drawbar.config.io.fields import catalogue
from drawbar.config.io.load_config import check_settings, dump_settings
from drawbar.config.io.source import Origin, Settings, ancestors
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError, visible
from drawbar.imports.conversion import Conversion, Entry

NEEDED = {
    "task.model": "task.model: NAME",
    "data.train": "data.train: FILE",
    "train.steps": "train.steps: N, or train.epochs",
}
"""What a run needs, and some files say nothing about; how to write it."""


def missing(conversion: Conversion) -> list[str]:
    """What is still to be set before the configuration can train."""
    given = conversion.settings.keys() | ({"train.steps"} if "train.epochs" in conversion.settings else set())
    return [how for setting, how in NEEDED.items() if setting not in given]


def check(conversion: Conversion) -> None:
    """Check the settings as every command does.

    Raises:
        UserError: they do not fit together, or keys have no counterpart: one error with all that is wrong, each with
            its file and line.
    """
    path = conversion.file.path
    lines = []
    for why, (first, *more) in _by_reason(conversion.refusals).items():
        keys = [first.key, *(f"{one.key} (line {one.line})" for one in more)]
        lines.append(f"{path}:{first.line}: {_one_line(', '.join(keys))}: {why}")
    if lines:
        raise UserError(
            "\n".join(["these keys have no counterpart, and would change what is trained:", *lines]),
            where=str(path),
            remedy="change or remove these keys in a copy of the file, and import that",
        )
    settings = Settings(path, _tree(conversion))
    for setting, keys in conversion.origins.items():
        place = (
            f"{path}:{conversion.line(keys[0])}: {', '.join(keys)}" if keys else f"{conversion.source.title}'s default"
        )
        settings.origins[setting] = Origin(place)
    loaded = check_settings(settings)
    check_rules(loaded, [*RULES, *([] if missing(conversion) else TRAIN_RULES)])
    if "deepspeed.config" in conversion.settings:
        from drawbar.deepspeed.config_json import check_start  # a guest, which may not be there

        check_start(loaded, conversion.processes)


def _tree(conversion: Conversion) -> dict[str, Any]:
    """The settings as nested sections, in the order of the documentation."""
    order = list(catalogue(RunConfig))
    tree: dict[str, Any] = {}
    for key in sorted(conversion.settings, key=lambda key: order.index(next(k for k in ancestors(key) if k in order))):
        section = tree
        *parents, name = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = conversion.settings[key]
    return tree


def write(conversion: Conversion) -> str:
    """The configuration as YAML, with what has become of every key of the file."""
    comments = {}
    for setting, keys in conversion.origins.items():
        more = ", …" if len(keys) > 3 else ""
        said = f"{', '.join(keys[:3])}{more} (line {conversion.line(keys[0])})" if keys else ""
        comments[setting] = _one_line(said or f"default of {conversion.source.title}")
    entries = conversion.entries.values()
    parts = {
        "Still to be set:": missing(conversion),
        "Not the same here:": conversion.notes,
        "No counterpart, and not part of what is trained:": _lines(entries, "no counterpart"),
        "No effect here:": _lines(entries, "no effect"),
    }
    header = [f"Imported by drawbar from {Path(conversion.file.path).name}, a file of {conversion.source.title}."]
    for title, lines in parts.items():
        if lines:
            header += ["", title, *(f"  {_one_line(line)}" for line in lines)]
    return "".join(f"# {line}".rstrip() + "\n" for line in header) + "\n" + dump_settings(_tree(conversion), comments)


def _one_line(text: str) -> str:
    """The text as a comment may hold it: what is quoted of the file must not end it."""
    return " ".join(visible(text).split())


def _by_reason(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.line):
        found.setdefault(entry.text, []).append(entry)
    return found


def _lines(entries: Iterable[Entry], outcome: str) -> list[str]:
    """A line for each reason, with its keys and their lines."""
    chosen = _by_reason(entry for entry in entries if entry.outcome == outcome)
    return [f"{', '.join(f'{one.key} ({one.line})' for one in found)}: {reason}" for reason, found in chosen.items()]
