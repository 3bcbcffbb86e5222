"""The doctor's findings, and how they are printed."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drawbar.errors import ExitCode, UserError


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Good to know; nothing is to be done."""
    WARNING = "warning"
    """A run may be slow, or fail later."""
    PROBLEM = "problem"
    """A run fails."""


STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
NAME_COLUMNS = len("GLOO_SOCKET_IFNAME")
INDENT = 2 + max(map(len, Level)) + 1 + NAME_COLUMNS + 1
WIDEST = 110
"""Columns: longer lines are hard to read."""


@dataclass(frozen=True)
class Fix:
    """What puts trouble right."""

    command: str
    """For a shell; empty where no command does it."""
    words: str = ""
    """What to do besides, or instead."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Raises:
        ValueError: trouble without a way out of it.
    """

    section: str
    name: str
    level: Level
    what: str
    """What it is; of trouble, what is the matter."""
    why: str = ""
    """Why a run would use this, or what comes of the trouble."""
    fix: Fix | None = None
    """Never missing where there is trouble."""

    def __post_init__(self) -> None:
        if self.is_trouble and self.fix is None:
            raise ValueError(f"{self.name}: {self.what}, but no fix")

    @property
    def is_trouble(self) -> bool:
        return self.level in (Level.WARNING, Level.PROBLEM)


def problem_of(section: str, name: str, error: UserError) -> Finding:
    """The finding that a run would be refused with this error."""
    where = f"where: {error.where}" if error.where else ""
    return Finding(
        section, name, Level.PROBLEM, error.what, where, Fix("", error.remedy or "see docs/configuration.md")
    )


@dataclass(frozen=True)
class Findings:
    """All findings, those of a section one after another."""

    findings: Sequence[Finding]

    @property
    def exit_code(self) -> ExitCode:
        """1 where a run would fail."""
        return ExitCode.FAILED if self._of(Level.PROBLEM) else ExitCode.DONE

    def as_json(self) -> str:
        counts = {str(level): len(self._of(level)) for level in Level}
        found = [asdict(finding) for finding in self.findings]
        return json.dumps({"healthy": not self._of(Level.PROBLEM), "counts": counts, "findings": found})

    def print(self) -> None:
        """Sections of a table on a terminal, and plain lines elsewhere."""
        if sys.stdout.isatty():
            self.draw(Console(highlight=False))
        else:
            print("\n".join(self.lines()), flush=True)

    def lines(self) -> Iterator[str]:
        """``problem  run.dir: it is read-only (…)``, and below it ``fix:``."""
        for section, findings in self._sections():
            yield section
            for finding in findings:
                why = f" ({_one_line(finding.why)})" if finding.why else ""
                yield f"  {finding.level:<8} {finding.name}: {_one_line(finding.what)}{why}"
                if finding.fix:
                    parts = filter(None, (finding.fix.command, _one_line(finding.fix.words)))
                    yield f"  {'':<8} fix: {'   # '.join(parts)}"
        yield ""
        yield self.summary()

    def draw(self, console: Console) -> None:
        console.width = min(console.width, WIDEST)
        for section, findings in self._sections():
            console.print(Text(section, style="bold"))
            for finding in findings:
                _draw(console, finding)
            console.print()
        console.print(Text(self.summary(), style=STYLES[self._worst]))

    def summary(self) -> str:
        """``1 problem (run.dir), 2 warnings (memory, GPU): …``"""
        counts = []
        for level in (Level.PROBLEM, Level.WARNING):
            names = list(dict.fromkeys(finding.name for finding in self._of(level)))
            if number := len(self._of(level)):
                counts.append(f"{number} {level}{'s' * (number > 1)} ({', '.join(names)})")
        if not counts:
            return "Nothing is wrong: a run can start here."
        end = "a run would fail here." if self._of(Level.PROBLEM) else "a run can start here."
        return f"{', '.join(counts)}: {end}"

    @property
    def _worst(self) -> Level:
        return max((finding.level for finding in self.findings), key=list(Level).index, default=Level.OK)

    def _of(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is level]

    def _sections(self) -> Iterator[tuple[str, list[Finding]]]:
        for section, findings in groupby(self.findings, key=lambda finding: finding.section):
            yield section, list(findings)


def _draw(console: Console, finding: Finding) -> None:
    body = Text(finding.what)
    if finding.why:
        body.append(f"\n{finding.why}" if finding.is_trouble else f"  {finding.why}", style="dim")
    _row(console, Text(finding.level, style=STYLES[finding.level]), Text(finding.name), body)
    if finding.fix is None:
        return
    command, words = finding.fix.command, finding.fix.words
    if command:
        # not broken into lines: a command is there to be copied
        console.print(Text.assemble(" " * INDENT, ("fix: ", "dim"), (command, "bold")), soft_wrap=True)
    if words:
        label = ("", "") if command else ("fix: ", "dim")
        _row(console, Text(), Text(), Text.assemble(label, (words, "dim" if command else "")))


def _row(console: Console, *cells: Text) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=max(map(len, Level)))
    table.add_column(width=NAME_COLUMNS, overflow="fold")
    table.add_column(ratio=1)
    table.add_row(*cells)
    console.print(Padding(table, (0, 0, 0, 2)))


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def size(amount: float) -> str:
    """``1.5 GiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if amount >= 10 or unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
