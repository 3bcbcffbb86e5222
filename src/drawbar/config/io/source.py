"""Unchecked settings: a YAML file and ``key=value`` arguments, merged, each with its origin."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, RoundTripConstructor
from ruamel.yaml.comments import CommentedBase
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from drawbar.config.schema.section import without_passwords
from drawbar.errors import UserError, nearest
from drawbar.util.run_dir import is_run_dir


@dataclass(frozen=True)
class Origin:
    """The origin of a setting: ``config.yaml:12``, ``command line`` or ``default``."""

    source: str
    argument: str | None = field(default=None, compare=False)
    """The command-line argument, as typed."""

    def __str__(self) -> str:
        return self.source


DEFAULT = Origin("default")

_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which a UTF-8 file cannot contain."""


@dataclass
class Settings:
    """Plain JSON-like data, the origin of every dotted key in it, and the problems found so far, one line each."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes about alternatives that the command line has replaced."""
    without_value: list[str] = field(default_factory=list)
    """Arguments without a value, such as ``run.name=``; reported once the allowed values are known: see
    ``report_missing_values``."""

    def report(self, key: str, text: str) -> None:
        """Add a problem, as a line ``PLACE: KEY: TEXT``, where PLACE is the origin of the key."""
        inside = [known for known in self.origins if known.startswith(f"{key}.")]
        places = [key, *inside, *ancestors(key)]
        origin = next((self.origins[place] for place in places if place in self.origins), None)
        place = origin or self.path
        names = [str(place)] if place else []
        if origin and origin.argument:
            names.append(origin.argument)
        if not (origin and origin.argument and origin.argument.startswith(f"{key}=")):
            names.append(key)
        self.problems.append(without_passwords(": ".join([*names, text])))


def ancestors(key: str) -> list[str]:
    """``a.b.c`` → ``[a.b.c, a.b, a]``."""
    names = key.split(".")
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


_MOST_VALUES = 1_000_000
"""Maximum number of values in a file: a few lines of nested aliases could expand to more than fits into memory."""


class _Constructor(RoundTripConstructor):
    """YAML 1.2 has no dates: ``2024-01-31`` is text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", RoundTripConstructor.construct_yaml_str)


@lru_cache(maxsize=64)  # a run reads its config.yaml several times, and ruamel takes a millisecond a line
def parse_yaml(text: str) -> Any:
    """One YAML 1.2 document, with line numbers; callers must not change it. Raises ruamel's YAMLError."""
    yaml = YAML()
    yaml.Constructor = _Constructor
    try:
        value = yaml.load(text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        # Errors that ruamel does not catch: a tag does not match its value (`!!int x`), or a number is far too long.
        raise YAMLError(f"a value cannot be read: {error}") from error
    if _count_values(value, {}) > _MOST_VALUES:
        raise YAMLError(f"its aliases expand to more than {_MOST_VALUES:,} values")
    return value


def _count_values(value: Any, known: dict[int, int]) -> int:
    """Number of values after expanding all aliases."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if id(value) not in known:
        known[id(value)] = 1 + sum(_count_values(one, known) for one in inner)
    return known[id(value)]


def run_folder(run: str | Path) -> Path:
    """The absolute path of a run directory. Raises UserError if the folder is not one."""
    folder = Path(run).absolute()
    if is_run_dir(folder):
        return folder
    if (folder / "config.yaml").is_file():
        raise UserError(
            f"{run} is not a run directory: it has a config.yaml, but none of a run's other files",
            where="RUN",
            remedy="give the directory of a run: it is RUN.DIR/RUN.NAME of that configuration",
        )
    guess = nearest_run(folder)
    raise UserError(
        f"{run} is not a run directory: it has no config.yaml",
        where="RUN",
        remedy=f"did you mean {guess}?" if guess else "give the folder that training wrote",
    )


def nearest_run(folder: Path) -> Path | None:
    """The run in the same parent folder with the most similar name, if any."""
    runs = [path.parent.name for path in folder.parent.glob("*/config.yaml") if is_run_dir(path.parent)]
    guess = nearest(folder.name, sorted(runs))
    return folder.parent / guess if guess else None


class NoSettings(UserError):
    """A file cannot be read as keys and values, so none of its settings was checked."""


@contextmanager
def config_of_run(folder: Path) -> Iterator[Path]:
    """Context manager for reading a run's own ``config.yaml``, which drawbar wrote: if it cannot be parsed, it is
    reported as damaged rather than as a user's mistake."""
    path = folder / "config.yaml"
    try:
        if not read_text(path).endswith("\n"):
            raise NoSettings("it is empty or truncated")
        yield path
    except NoSettings as error:
        raise UserError(
            f"this run's own config.yaml is damaged: {error.what}",
            where=str(path),
            remedy="restore it from a copy, or recreate it from the settings of the run: "
            f"`drawbar config show CONFIG [KEY=VALUE]... > {path}`",
        ) from error


def read_file(path: Path) -> Settings:
    """The settings of a YAML file.

    Raises:
        NoSettings: it is not a YAML mapping.
        UserError: the file cannot be read.
    """
    text = read_text(path)
    try:
        tree = parse_yaml(text)
        settings = Settings(path)
        if isinstance(tree, Mapping):
            settings.values = _plain(tree, "", settings, lambda line: Origin(f"{path}:{line + 1}"))
    except YAMLError as error:
        raise _syntax_error(error, path, text) from error
    except RecursionError as error:
        raise NoSettings(
            "the YAML is nested too deeply, or refers to itself", where=str(path), remedy="write it out flat"
        ) from error
    if tree is None:
        raise NoSettings(
            "the file is empty", where=str(path), remedy="write settings such as `data: {train: text.jsonl}`"
        )
    if not isinstance(tree, Mapping):
        raise NoSettings(
            "the file has no keys and values at its top level",
            where=str(path),
            remedy="write sections such as `train: {steps: 100}`",
        )
    return settings


def apply_override(settings: Settings, argument: str) -> None:
    """Merge ``a.b.c=VALUE`` into ``settings``; add any problem to ``settings.problems``."""

    def refuse(reason: str) -> None:
        settings.problems.append(f"command line: {argument}: {reason}")

    key, equals, text = argument.partition("=")
    names = key.split(".")
    if not equals:
        return refuse("expected KEY=VALUE, such as optim.lr=1e-4")
    if not all(name and not name.isspace() for name in names):
        return refuse("the key is not complete; write it with its section, such as optim.lr=1e-4")
    try:
        value = parse_yaml(text)
    except (YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        return refuse(f"the value is not YAML ({reason}); quote text with special characters: {key}='\"{text}\"'")
    if value is None and text.strip().lower() not in ("null", "~"):
        settings.without_value.append(argument)
        return None
    section, leaf = _section(settings.values, names)
    if leaf is not None:
        return refuse(f"{leaf} has a value already ({settings.origins[leaf]}) and no keys; replace it whole: {leaf}=…")
    own = Settings()
    plain = _plain(value, key, own, lambda line: Origin("command line", argument))
    settings.problems += own.problems
    _merge(section, {names[-1]: plain}, settings.origins, key.rpartition(".")[0])
    settings.origins |= own.origins
    return None


def merge_over(base: Settings, top: Settings) -> Settings:
    """``top`` merged over ``base``: sections are merged; values and lists are replaced."""
    merged = Settings(top.path, base.values, base.origins, base.problems + top.problems)
    _merge(merged.values, top.values, merged.origins, "")
    merged.origins |= top.origins
    return merged


def nearest_file(path: Path) -> Path | None:
    """The file in the same folder whose name is most similar to ``path``."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return None
    matches = difflib.get_close_matches(path.name, names, n=1)
    return path.with_name(matches[0]) if matches else None


def read_text(path: Path, kind: str = "YAML") -> str:
    """The text of a file that a user names. Raises UserError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise NoSettings(
            "the file is not UTF-8 text", where=f"{path}:{line}", remedy="save it again with the encoding UTF-8"
        ) from error
    except FileNotFoundError as error:
        near = nearest_file(path)
        remedy = f"did you mean {near}?" if near else f"give the path of a {kind} file"
        if not path.parent.is_dir():
            remedy = f"the folder {path.parent} does not exist either"
        raise UserError("there is no such file", where=str(path), remedy=remedy) from error
    except IsADirectoryError as error:
        raise UserError(
            f"this is a folder, not a {kind} file",
            where=str(path),
            remedy=f"give the path of the {kind} file in it",
        ) from error
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror}", where=str(path), remedy="check its permissions"
        ) from error


def _syntax_error(error: YAMLError, path: Path, text: str) -> NoSettings:
    """The parser's message, with the line, and remedies for common mistakes."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        remedy = "correct that value; `drawbar config show` prints a configuration as it should look"
        return NoSettings(f"not valid YAML: {str(error).splitlines()[0]}", where=str(path), remedy=remedy)
    line = error.problem_mark.line
    # For a duplicate key, ruamel's message also contains the values, and lines of advice for programmers.
    reason = (error.problem or "syntax error").splitlines()[0].split(" with value")[0]
    source = f": {text.splitlines()[line].strip()}" if line < len(text.splitlines()) else ""
    remedy = "check the indentation, and put text with special characters in quotes"
    if "\\t" in reason:
        remedy = "indent with spaces, not with tabs"
    elif "duplicate key" in reason:
        remedy = "keep one of them"
    elif "alias" in reason:
        remedy = "put text that starts with * or & in quotes"
    return NoSettings(f"{path}:{line + 1}: not valid YAML: {reason}{source}", remedy=remedy)


def _plain(tree: Any, top: str, settings: Settings, origin: Callable[[int], Origin]) -> Any:
    """Convert a YAML tree to plain data. Adds the origins of its keys, below ``top``, and its problems to
    ``settings``."""

    def plain(node: Any, key: str, line: int) -> Any:
        if key:
            settings.origins[key] = origin(line)
        match node:
            case Mapping():
                return {
                    _name(name): plain(child, _join(key, _name(name)), _line(node, name, line))
                    for name, child in node.items()
                }
            case list():
                return [plain(child, f"{key}.{i}", _line(node, i, line)) for i, child in enumerate(node)]
            case None:
                return None
            case bool() | ScalarBoolean():
                return bool(node)
            case int():
                return int(node)
            case float():
                return float(node)
            case str() if not _SURROGATE.search(node):
                return str(node)
        settings.report(key, "not a plain value: YAML tags (!…) and broken Unicode are not accepted")
        return None

    return plain(tree, top, 0)


def _name(key: Any) -> str:
    """JSON's spelling of a key, so that ``id2label: {0: bad}`` works."""
    match key:
        case None:
            return "null"
        case bool():
            return str(key).lower()
    return str(key)


def _line(node: Any, child: Any, otherwise: int) -> int:
    """Line number of an entry, from 0; None for entries merged from elsewhere (``<<``)."""
    if not isinstance(node, CommentedBase):
        return otherwise
    position = node.lc.data.get(child) if node.lc.data else None
    return position[0] if position else otherwise


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _section(values: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The mapping that contains ``names[-1]``, created if missing; or the key of a leaf that is in the way."""
    section = values
    for depth, name in enumerate(names[:-1], start=1):
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            return {}, ".".join(names[:depth])
        section = section[name]
    return section, None


def _merge(old: dict[str, Any], new: dict[str, Any], origins: dict[str, Origin], prefix: str) -> None:
    """Merge mappings; anything else replaces the old value, and the origins of keys below it are removed."""
    for name, value in new.items():
        key = _join(prefix, name)
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            _merge(old[name], value, origins, key)
            continue
        old[name] = value
        for stale in [known for known in origins if known.startswith(f"{key}.")]:
            del origins[stale]
