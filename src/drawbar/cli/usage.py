"""The error for an unknown command-line option: often a setting, written in the style of other trainers."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


def explain_option(
    error: click.ClickException, words: Sequence[str], task: "type[Task] | None"
) -> click.ClickException:
    """The error; if the option is named like a setting, of drawbar or another trainer, it also says which one to use.

    Args:
        words: the command line.
    """
    if not isinstance(error, click.NoSuchOption) or not _takes_settings(error.ctx):
        return error
    hint = _hint(error, words, task) if error.option_name.startswith("--") else None
    return click.UsageError(f"No such option '{error.option_name}'. {hint}", ctx=error.ctx) if hint else error


def _takes_settings(context: click.Context | None) -> bool:
    return context is not None and any("KEY=VALUE" in (found.metavar or "") for found in context.command.params)


def _hint(error: click.NoSuchOption, words: Sequence[str], task: "type[Task] | None") -> str | None:
    from drawbar.config.io.fields import catalogue, suggestions
    from drawbar.config.io.other_names import our_names
    from drawbar.config.schema.run_config import RunConfig, run_config_type

    known = catalogue(run_config_type(task.Config) if task else RunConfig)
    key = error.option_name.lstrip("-").replace("-", "_")
    own = [key] if key in known else [name for name in known if name.rpartition(".")[2] == key]
    if len(own) == 1 and not known[own[0]].is_section:
        value = _value(error.option_name, words)
        example = f"{own[0]}=VALUE" if value is None else shlex.quote(f"{own[0]}={value}")
        return f"Settings are written KEY=VALUE: {example}"
    if error.possibilities and not own and not our_names(key):
        return None  # a misspelled option: click's own error suggests the right one
    meant = suggestions(known, key)
    return f"Did you mean {' or '.join(meant)}? Settings are written KEY=VALUE, without dashes" if meant else None


def _value(option: str, words: Sequence[str]) -> str | None:
    """The value after an option on the command line, separated by a space or an equals sign."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and following is not None and not following.startswith("--"):
            return None if "=" in following else following
    return None
