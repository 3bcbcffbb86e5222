"""``drawbar config``: show, explain and describe a configuration. Imports only click until a command runs."""

from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.complete_words import complete_config, complete_config_and_settings, complete_keys, complete_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from drawbar.config.io.load_config import LoadedConfig

    Form = Callable[[LoadedConfig, int], str]

FORMS_GROUP = "drawbar.config_forms"
"""Entry points of functions that take a ``LoadedConfig`` and a number of processes; ``drawbar config show --NAME``
prints what the function NAME returns. The first line of its docstring is the option's help. Its module must be cheap to
import.
"""


class _Show(click.Command):
    """The command, with an option for each form of a configuration that a guest registers."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        from drawbar.util.registry import load_points

        *own, help_option = super().get_params(context)
        return [*own, *(_option(name, form) for name, form in load_points(FORMS_GROUP, "form")), help_option]


def _option(name: str, form: "Form") -> click.Option:
    assert form.__doc__, "it is the option's help"
    return click.Option([f"--{name}", "form"], flag_value=name, help=form.__doc__.partition("\n")[0])


@click.group(
    short_help="Show or explain the settings of a run.",
    epilog="""\b
Examples:
  drawbar config show config.yaml                    the full configuration, with every default
  drawbar config explain optim.lr config.yaml        one setting: value, origin, meaning
  drawbar config schema > config.schema.json         for completion in an editor
""",
)
def config() -> None:
    """Inspect a configuration without running it."""


@config.command(
    cls=_Show,
    epilog="""\b
Examples:
  drawbar config show config.yaml
  drawbar config show config.yaml optim.lr=1e-4 parallel.strategy=ddp --origins
""",
)
@click.argument("path", metavar="CONFIG", shell_complete=complete_config)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_settings)
@click.option("--origins", is_flag=True, help="Add the origin of each given setting as a comment.")
@click.pass_obj
def show(task: Any, path: str, overrides: tuple[str, ...], origins: bool, form: str | None = None) -> None:
    """Print the configuration that a run would use, including every default.

    The output is itself a valid configuration file.
    """
    if origins and form:
        raise click.UsageError(f"--origins and --{form} print different things; give one of them.")
    from drawbar.cli.arguments import noted
    from drawbar.config.io.load_config import dump_yaml, load_config

    loaded = noted(load_config(path, overrides, task.Config if task else None))
    if form:
        click.echo(_in_form(form, loaded))
        return
    comments = {key: str(origin) for key, origin in loaded.origins.items()} if origins else {}
    click.echo(dump_yaml(loaded.config, comments), nl=False)


def _in_form(name: str, loaded: "LoadedConfig") -> str:
    from drawbar.cli.train import count_processes
    from drawbar.config.rules.rule_table import check_guests, check_rules
    from drawbar.util.registry import load_points

    check_rules(loaded)
    processes = count_processes(loaded.config)
    check_guests(loaded, processes)
    form: Form = dict(load_points(FORMS_GROUP, "form"))[name]
    return form(loaded, processes)


@config.command(
    epilog="""\b
Examples:
  drawbar config schema > config.schema.json
  drawbar config schema config.yaml > config.schema.json    with the options of your own task

\b
With this as the first line of a YAML file, many editors validate and complete it offline:
  # yaml-language-server: $schema=config.schema.json
"""
)
@click.argument("path", metavar="[CONFIG]", required=False, shell_complete=complete_config)
@click.pass_obj
def schema(task: Any, path: str | None) -> None:
    """Print the JSON schema of a configuration file.

    The section `task` describes the task in CONFIG; without CONFIG, every built-in task.
    """
    from drawbar.config.io.explain import schema_json, schema_text
    from drawbar.config.io.load_config import load_config

    task_config = task.Config if task else None
    if path is not None:
        task_config = type(load_config(path, task=task_config).config.task)
    click.echo(schema_text(schema_json(task_config)), nl=False)


@config.command(
    epilog="""\b
Examples:
  drawbar config explain optim
  drawbar config explain optim.lr
  drawbar config explain optim.lr config.yaml optim.lr=1e-4
"""
)
@click.argument("key", shell_complete=complete_keys)
@click.argument("settings", metavar="[CONFIG] [KEY=VALUE]...", nargs=-1, shell_complete=complete_config_and_settings)
@click.pass_obj
def explain(task: Any, key: str, settings: tuple[str, ...]) -> None:
    """Show a setting's value, its origin and its meaning.

    For a section, list its settings.
    """
    from drawbar.config.io import explain as explanation
    from drawbar.config.io.load_config import load_config

    has_path = bool(settings) and "=" not in settings[0]
    path, overrides = (settings[0], settings[1:]) if has_path else (None, settings)
    loaded = load_config(path, overrides, task.Config if task else None)
    click.echo(explanation.explain(key, loaded))
