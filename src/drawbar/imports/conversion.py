"""Walks the keys of a file by the table of its source: what each becomes here, and what has no counterpart.

A table is a YAML file in ``tables``: what a key is called here (``to``), which settings each of its values is
(``values``), and the keys that change nothing here (``no effect``), have no counterpart but do not change what is
trained (``aside``), or would change it (``absent``), each with the reason. What takes arithmetic is a function: a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from drawbar.config.io.source import parse_yaml
from drawbar.errors import nearest
from drawbar.imports.reading import KeyFile, plain

Outcome = Literal["converted", "no effect", "no counterpart"]
Rule = Callable[..., None]
"""Takes the conversion, and the value of each name of its entry in the table: None where nothing gives one."""
OFF: tuple[Any, ...] = (None, False, 0, "", "none", "disabled", [], {})
"""Values that say that something is not used."""
SOURCES = ("torchtitan", "axolotl", "llama_factory", "deepspeed", "huggingface")
"""The tables, in the order in which their marks are looked for."""


@dataclass(frozen=True)
class Source:
    """A trainer whose files are read."""

    title: str
    marks: frozenset[str]
    """Keys that its files have, and those of the sources behind it do not."""
    rules: Mapping[str, Rule]
    """By one or more names of keys, separated by spaces, which belong together; each with all keys below it."""
    defaults: Mapping[str, Any]
    """The trainer's values of keys that a file lacks, where they change what is trained."""
    defaults_beside: Mapping[str, Mapping[str, Any]]
    """By a key: further defaults of the files that have it, as of another script of the same trainer."""


@cache
def load_source(name: str) -> Source:
    """A table, with those of the table that it builds on (``base``), whose keys may have other ``names`` in it."""
    table = plain(parse_yaml(files("drawbar.imports").joinpath("tables", f"{name}.yaml").read_text("utf-8")))
    builders: dict[str, Rule] = {
        "to": to,
        "values": choice,
        "no effect": no_effect,
        "aside": aside,
        "absent": absent,
    }
    rules: dict[str, Rule] = dict(import_module(f"drawbar.imports.{name}").RULES)
    for section in ("to", "values"):
        rules |= {key: partial(builders[section], value) for key, value in table.get(section, {}).items()}
    for section in ("no effect", "aside", "absent"):
        for why, names in table.get(section, {}).items():
            rules |= dict.fromkeys(names.split(), partial(builders[section], why))
    if "base" in table:
        own, other = {key for entry in rules for key in entry.split()}, table.get("names", {})
        for entry, rule in load_source(table["base"]).rules.items():
            renamed = [other.get(key, key) for key in entry.split()]
            if not own & set(renamed):
                rules[" ".join(renamed)] = rule
    return Source(
        table.get("title", name),
        frozenset(table.get("marks", ())),
        rules,
        table.get("defaults", {}),
        table.get("defaults beside", {}),
    )


def detect(file: KeyFile) -> str | None:
    """The source whose marks the file has; None where there is none."""
    return next((name for name in SOURCES if load_source(name).marks & file.values.keys()), None)


@dataclass(frozen=True)
class Entry:
    """What has become of a key."""

    key: str
    line: int
    outcome: Outcome
    text: str
    """The settings that it became, or why it has no effect or no counterpart."""
    refused: bool = False
    """It has no counterpart, and would change what is trained."""


@dataclass
class Conversion:
    """The settings that a file becomes, and what has become of each key."""

    file: KeyFile
    source: Source
    processes: int = 1
    """How many data-parallel processes the file was meant for."""
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    """By setting: the keys that it comes from; none if it is a default of the trainer."""
    entries: dict[str, Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What is not the same here, with the keys that say it."""
    names: tuple[str, ...] = ()
    """The names of the entry whose rule is at work."""

    def convert(self) -> "Conversion":
        """Give every key of the file its outcome."""
        self.leaves = self.file.leaves()
        self.defaults = dict(self.source.defaults)
        for key, further in self.source.defaults_beside.items():
            self.defaults |= further if self.given(key) else {}
        for names, rule in self.source.rules.items():
            self._apply(tuple(names.split()), rule)
        known = [name for names in self.source.rules for name in names.split()]
        for key in [key for key in self.leaves if key not in self.entries]:
            if self.leaves[key] in (None, ""):
                self.no_effect("it has no value", key)
                continue
            guess = nearest(key, known, 0.85)
            hint = f"; did you mean {guess}?" if guess else ""
            self.refuse(f"drawbar does not know this key of {self.source.title}{hint}", key)
        if not any(key.startswith("data.validation") for key in self.settings):
            for setting in [key for key in self.settings if key in ("eval.every", "eval.at_start", "eval.patience")]:
                del self.settings[setting]
                for key in self.origins.pop(setting):
                    self.entries[key] = Entry(key, self.line(key), "no effect", "the file names no validation data")
        return self

    def _apply(self, names: tuple[str, ...], rule: Rule) -> None:
        values = [self.value(name) for name in names]
        self.names = names
        if any(value is not None for value in values):
            try:
                rule(self, *values)
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                self.refuse(f"its value is not one that {self.source.title} takes: {error}")
        own = [key for name in names for key in self._below(name)]
        refused = next((key for key in own if key in self.entries and self.entries[key].refused), None)
        for key in [key for key in own if key not in self.entries]:
            made = [setting for setting, keys in self.origins.items() if key in keys]
            if self.leaves[key] in (None, ""):
                self.no_effect("it has no value", key)
            elif made:
                self._settle("converted", ", ".join(made), (key,))
            elif is_off(self.leaves[key]):
                self.no_effect("it is off", key)
            elif refused:
                self.aside(f"it belongs to {refused}", key)
            else:
                self.refuse("its value says nothing that has a counterpart", key)

    def _below(self, name: str) -> list[str]:
        if name == "*":  # what no other entry has
            return [key for key in self.leaves if key not in self.entries]
        return [key for key in self.leaves if key == name or key.startswith((f"{name}.", f"{name}["))]

    def value(self, name: str) -> Any:
        """The value that a key has in the file, or else by default."""
        found: Any = self.file.values
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return self.defaults.get(name) if found is None else found

    def line(self, key: str) -> int:
        """The line of a key; if it has none of its own, that of what it is in."""
        while key and key not in self.file.lines:
            key = key.rpartition(".")[0]
        return self.file.lines.get(key, 1)

    def given(self, name: str) -> bool:
        """Whether the file has a value for this key."""
        return any(self.leaves[key] is not None for key in self._below(name))

    def set(self, setting: str, value: Any, *names: str) -> None:
        """Give a setting a value, which the keys ``names`` say (default: all of the entry)."""
        if self.settings.setdefault(setting, value) != value:
            said = ", ".join(self.origins[setting]) or "default"
            self.refuse(f"{setting} is {self.settings[setting]} by {said}, and {value} by this", *names)
            return
        keys = [key for name in names or self.names for key in self._below(name) if self.leaves[key] is not None]
        self.origins.setdefault(setting, []).extend(keys)

    def note(self, text: str, *names: str) -> None:
        """Say in what the run here differs from the one there."""
        keys = [key for name in names or self.names for key in self._below(name)]
        places = (
            ", ".join(f"{key} (line {self.line(key)})" for key in keys[:2]) or f"{(names or self.names)[0]} (default)"
        )
        self.notes.append(f"{places}: {text}")

    def no_effect(self, why: str, *names: str) -> None:
        """The keys change nothing here."""
        self._settle("no effect", why, names)

    def aside(self, why: str, *names: str) -> None:
        """The keys have no counterpart, and do not change what is trained."""
        self._settle("no counterpart", why, names)

    def refuse(self, why: str, *names: str) -> None:
        """The keys have no counterpart, and would change what is trained."""
        keys = [key for name in names or self.names for key in self._below(name)]
        self._settle("no counterpart", why, names if keys else (), refused=True)
        if not keys and not any(self._below(name) for name in self.names):  # it is a default of the trainer
            self.entries[self.names[0]] = Entry(self.names[0], 1, "no counterpart", why, True)

    def _settle(self, outcome: Outcome, text: str, names: tuple[str, ...], refused: bool = False) -> None:
        made = {key for keys in self.origins.values() for key in keys}  # settings, which a refusal alone takes back
        for key in [key for name in names or self.names for key in self._below(name)]:
            if refused or (key not in self.entries and (key not in made or outcome == "converted")):
                self.entries[key] = Entry(key, self.line(key), outcome, text, refused)

    @property
    def refusals(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.refused]


def whole(value: Any) -> Any:
    """3.0 as 3: other programs' parsers take a whole number in either form."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to(setting: str, c: Conversion, value: Any) -> None:
    """The key has another name here."""
    c.set(setting, whole(value))


def choice(values: Mapping[Any, Mapping[str, Any]], c: Conversion, value: Any) -> None:
    """Each value is these settings; there are no others."""
    known = {str(key).lower(): settings for key, settings in values.items()}
    if str(value).lower() not in known:
        c.refuse(f"{value} has no counterpart; only {', '.join(known)}")
        return
    for setting, ours in known[str(value).lower()].items():
        c.set(setting, ours)
    c.no_effect("it is so by default") if not known[str(value).lower()] else None


def no_effect(why: str, c: Conversion, value: Any) -> None:
    c.no_effect(why)


def aside(why: str, c: Conversion, value: Any) -> None:
    c.no_effect("it is off") if is_off(value) else c.aside(why)


def absent(why: str, c: Conversion, value: Any) -> None:
    c.no_effect("it is off") if is_off(value) else c.refuse(why)


def is_off(value: Any) -> bool:
    """Whether a value only says that something is not used."""
    return value in OFF or (isinstance(value, dict) and all(map(is_off, value.values())))
