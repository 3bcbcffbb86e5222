"""Arguments shared by the commands: configuration, run directory and checkpoint. Cheap to import, for ``--help``."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_checkpoint
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
    for note in loaded.notes if "RANK" not in os.environ else ():
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
