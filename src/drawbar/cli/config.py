"""``drawbar config``: show, explain and describe a configuration. Imports only click until a command runs."""

import json
from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.complete_words import complete_config, complete_config_and_settings, complete_keys, complete_settings

if TYPE_CHECKING:
    from drawbar.config.io.load_config import LoadedConfig


@click.group(
    short_help="Show or explain the settings of a run.",
    epilog="""\b
Examples:
  drawbar config show config.yaml                    the whole, with every default
  drawbar config explain optim.lr config.yaml        one setting: value, origin, meaning
  drawbar config schema > config.schema.json                for an editor's completion
""",
)
def config() -> None:
    """Look at a configuration without running it."""


@config.command(
    epilog="""\b
Examples:
  drawbar config show config.yaml
  drawbar config show config.yaml optim.lr=1e-4 parallel.strategy=ddp --origins
  drawbar config show config.yaml deepspeed.preset=zero2 --deepspeed
"""
)
@click.argument("path", metavar="CONFIG", shell_complete=complete_config)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_settings)
@click.option("--origins", is_flag=True, help="Write the origin of each given setting in a comment behind it.")
@click.option("--deepspeed", is_flag=True, help="Print, instead, the JSON that DeepSpeed gets.")
@click.pass_obj
def show(task: Any, path: str, overrides: tuple[str, ...], origins: bool, deepspeed: bool) -> None:
    """Print what a run would use, every default included.

    The result is a configuration file itself; with --deepspeed it is DeepSpeed's, for as many processes as `drawbar
    train` would start.
    """
    if origins and deepspeed:
        raise click.UsageError("--origins and --deepspeed print different things; give one of them.")
    from drawbar.cli.arguments import noted
    from drawbar.config.io.load_config import dump_yaml, load_config

    loaded = noted(load_config(path, overrides, task.Config if task else None))
    if deepspeed:
        _show_deepspeed(loaded)
        return
    comments = {key: str(origin) for key, origin in loaded.origins.items()} if origins else {}
    click.echo(dump_yaml(loaded.config, comments), nl=False)


def _show_deepspeed(loaded: "LoadedConfig") -> None:
    from drawbar.cli.train import count_processes
    from drawbar.config.deepspeed.deepspeed_json import check_deepspeed, deepspeed_json
    from drawbar.config.deepspeed.zero_settings import is_deepspeed
    from drawbar.config.rules.rule_table import check_rules
    from drawbar.errors import UserError

    if not is_deepspeed(loaded.config):
        raise UserError(
            "DeepSpeed does not run this configuration",
            where=f"parallel.strategy={loaded.config.parallel.strategy}",
            remedy="add parallel.strategy=deepspeed, or a section deepspeed such as deepspeed.preset=zero2",
        )
    check_rules(loaded)
    processes = count_processes(loaded.config)
    check_deepspeed(loaded, processes)
    precision: str = loaded.config.precision
    if precision == "auto":
        from drawbar.distributed.rank_info import RankInfo, choose_device
        from drawbar.parallel.precision import choose_precision

        precision = choose_precision(precision, choose_device(loaded.config.device, RankInfo(world_size=processes)))
    found = deepspeed_json(loaded, processes, precision)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(json.dumps(found.values, indent=2))


@config.command(
    epilog="""\b
Examples:
  drawbar config schema > config.schema.json
  drawbar config schema config.yaml > config.schema.json    with the options of your own task

\b
With this as the first line of a YAML file, many editors check and complete it, without a network:
  # yaml-language-server: $schema=config.schema.json
"""
)
@click.argument("path", metavar="[CONFIG]", required=False, shell_complete=complete_config)
@click.pass_obj
def schema(task: Any, path: str | None) -> None:
    """Print the JSON schema of a configuration file.

    With CONFIG, `task` is described as the task that this file names; otherwise as every built-in task.
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
    """Show a setting's value, its meaning, and where the value came from.

    A section lists its settings.
    """
    from drawbar.config.io import explain as explanation
    from drawbar.config.io.load_config import load_config

    has_path = bool(settings) and "=" not in settings[0]
    path, overrides = (settings[0], settings[1:]) if has_path else (None, settings)
    loaded = load_config(path, overrides, task.Config if task else None)
    click.echo(explanation.explain(key, loaded))
