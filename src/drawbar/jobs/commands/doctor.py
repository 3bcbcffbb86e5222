"""``drawbar doctor``."""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from drawbar.launch.findings import Finding
    from drawbar.tasks.task import Task

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(
    short_help="Find out what is wrong with this machine.",
    epilog="""\b
Examples:
  drawbar doctor                                     this machine
  drawbar doctor config.yaml launch.nproc=2          and what this run would use on it
  drawbar doctor config.yaml --json > doctor.json

\b
Levels: ok; warning: slow, or it may fail later; problem: a run fails.
Exit codes: 0 no problem, 1 a problem, 2 the request is wrong.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def doctor(task: "type[Task] | None", arguments: tuple[str, ...], as_json: bool) -> int:
    """Describe this machine, what a run would use on it, and what is wrong, with remedies.

    Multiplies two matrices on the device; leaves no files behind. Takes a few seconds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0":
        return 0  # the first process of each machine examines it for all
    from drawbar.cli.arguments import load
    from drawbar.jobs.doctor.examine import examine

    loaded = load(arguments, task)
    is_watched = sys.stderr.isatty()
    if is_watched:
        click.echo("looking around …", nl=False, err=True)
    sections = examine(loaded, bool(arguments))
    if is_watched:
        click.echo("\r\x1b[K", nl=False, err=True)
    healthy = all(finding.level != "problem" for found in sections.values() for finding in found)
    if as_json:
        named = [{"section": name, **asdict(finding)} for name, found in sections.items() for finding in found]
        click.echo(json.dumps({"healthy": healthy, "findings": named}))
    else:
        click.echo("\n".join(lines(sections)))
    return 0 if healthy else 1


def lines(sections: "Mapping[str, Sequence[Finding]]") -> "Iterator[str]":
    """``problem  run.dir: it is read-only``, and below it ``fix:``. ``click.echo`` drops colours in files."""
    for section, findings in sections.items():
        yield click.style(section, bold=True)
        for finding in findings:
            level = click.style(f"{finding.level:<8}", fg=COLOURS[finding.level])
            yield f"  {level} {finding.where}: {_one_line(finding.what)}"
            if finding.remedy:
                yield f"  {'':<8} fix: {_one_line(finding.remedy)}"
        yield ""
    yield summary([finding for findings in sections.values() for finding in findings])


def summary(findings: "Sequence[Finding]") -> str:
    """``1 problem (run.dir), 2 warnings (memory, GPU 0): …``"""
    counts = []
    for level in ("problem", "warning"):
        places = [finding.where for finding in findings if finding.level == level]
        if places:
            named = ", ".join(dict.fromkeys(places))
            counts.append(f"{len(places)} {level}{'s' * (len(places) > 1)} ({named})")
    if not counts:
        return "Nothing is wrong: a run can start here."
    has_problem = any(finding.level == "problem" for finding in findings)
    return f"{', '.join(counts)}: {'a run would fail here.' if has_problem else 'a run can start here.'}"


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
