"""Arguments shared by the commands: configuration, run directory and checkpoint; and the error for an unknown option,
which is often meant as a setting. Cheap to import, for ``--help``."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_checkpoint
from drawbar.distributed.rank_info import has_rank
from drawbar.util.torch_imports import quick_imports

if TYPE_CHECKING:
    from drawbar.config.io.load_config import LoadedConfig
    from drawbar.config.io.source import Settings
    from drawbar.config.rules.rule import Rule
    from drawbar.tasks.task import Task

USUAL_CONFIG = "config.yaml"
"""The name that `drawbar init` gives a project's configuration."""

checkpoint_option = click.option(
    "--checkpoint",
    metavar="best|latest|STEP|PATH",
    shell_complete=complete_checkpoint,
    help="Checkpoint to use. Default: the best, or the latest if no evaluation chose a best one.",
)


def load(arguments: tuple[str, ...], task: "type[Task] | None", profile: "Settings | None" = None) -> "LoadedConfig":
    """Load ``[CONFIG] [KEY=VALUE]...``: a file (unless the first argument is an override) and overrides. Both take
    precedence over ``profile``."""
    return noted(check(read(arguments, profile), task))


def noted(loaded: "LoadedConfig") -> "LoadedConfig":
    """Print what the command line has replaced, but not again on each rank."""
    for note in loaded.notes if not has_rank() else ():
        click.echo(f"note: {note}", err=True)
    return loaded


def read(arguments: tuple[str, ...], profile: "Settings | None" = None) -> "Settings":
    """The first part of ``load``: the settings, not yet checked."""
    from drawbar.config.io.load_config import read_settings

    path, overrides = None, list(arguments)
    if overrides and "=" not in overrides[0]:
        path = overrides.pop(0)
    return read_settings(path, overrides, profile)


def user_program(task: "type[Task] | None") -> str | None:
    """The absolute path of the user's own script; None if the user called ``drawbar``.

    Raises:
        UserError: other processes cannot run it, as it is not, or no longer, a file.
    """
    from drawbar.errors import UserError

    if task is None:
        return None
    program = Path(sys.argv[0])
    typed = {"": "a prompt", "-": "standard input", "-c": "the command line (-c)"}.get(sys.argv[0])
    if typed is None and not hasattr(sys.modules["__main__"], "__file__"):
        typed = "a notebook"
    if typed is None and program.is_file():
        return str(program.absolute())
    raise UserError(
        "the processes of the run cannot run this program again: it came from "
        + (typed or f"{program}, which is not, or no longer, a file"),
        where=f"the task {task.__name__}",
        remedy="save it to a file, and start it with `python FILE`",
    )


def check(settings: "Settings", task: "type[Task] | None") -> "LoadedConfig":
    """The second part of ``load``; the task's module may import torch."""
    from drawbar.config.io.load_config import check_settings

    with quick_imports():
        return check_settings(settings, task.Config if task else None)


def check_training(loaded: "LoadedConfig", more: "Sequence[Rule]" = ()) -> None:
    """Check the rules of training, and ``more``. If no configuration was given but the current folder has one, the
    error suggests it.

    Raises:
        UserError: as ``check_rules``.
    """
    from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
    from drawbar.errors import UserError

    try:
        check_rules(loaded, [*RULES, *TRAIN_RULES, *more])
    except UserError as error:
        if loaded.path is None and Path(USUAL_CONFIG).is_file():
            context = click.get_current_context(silent=True)
            command = f"drawbar {context.info_name if context else 'train'} {USUAL_CONFIG}"
            error.remedy = f"use the configuration in this folder: `{command}`; or\n         {error.remedy}"
        raise


def load_run(run: str, overrides: tuple[str, ...], task: "type[Task] | None") -> "LoadedConfig":
    """See ``load_run_config``."""
    from drawbar.config.io.load_config import load_run_config

    with quick_imports():
        return noted(load_run_config(run, overrides, task.Config if task else None))


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
    from drawbar.config.io.fields import catalogue, namesakes, suggestions
    from drawbar.config.io.other_names import our_names
    from drawbar.config.schema.run_config import RunConfig, run_config_type

    known = catalogue(run_config_type(task.Config) if task else RunConfig)
    key = error.option_name.lstrip("-").replace("-", "_")
    own = [key] if key in known else namesakes(known, key)
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
