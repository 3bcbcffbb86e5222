"""The page docs/reference/cli.md: every command with its arguments and options, as `--help` has them."""

import re
from collections.abc import Iterator

import click

from drawbar.cli import group

_INTRODUCTION = """\
# Commands

<!-- Generated from the commands by `make docs`. Do not edit. -->

`drawbar COMMAND --help` prints the same at the terminal. A script that ends with `drawbar.main(MyTask)` has all of
these commands, too. `KEY=VALUE` stands for any [setting](../configuration.md): it overrules the configuration file.
Exit codes are in [run_directory.md](../run_directory.md#exit-codes).

| Command | What it does |
| --- | --- |"""


def render() -> str:
    """The whole page, in Markdown."""
    commands = list(_walk(group, click.Context(group, info_name="drawbar", **group.context_settings)))
    lines = [_INTRODUCTION]
    for name, context in commands[1:]:
        summary = context.command.get_short_help_str(limit=200)
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(summary)} |")
    for name, context in commands[1:]:
        lines += ["", f"## {name}", "", *_command(context)]
    return "\n".join(lines) + "\n"


def _walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Every command by its words, with a context that knows them."""
    yield context.command_path, context
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from _walk(part, click.Context(part, parent=context, info_name=name, **part.context_settings))


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        yield from ["", re.sub(r"\s+", " ", paragraph)] if paragraph != command.help else [paragraph]
    yield from ["", "```text", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```"]
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    if records:
        yield from ["", "| Option | Meaning |", "| --- | --- |"]
        yield from (f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in records)
    epilog = (command.epilog or "").replace("\b\n", "").strip()
    if epilog:
        yield from ["", "```text", epilog, "```"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(render(), end="")
