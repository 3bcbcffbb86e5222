"""``drawbar prepare``."""

from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Encode the data before the run.",
    epilog="""\b
Examples:
  drawbar prepare config.yaml
  drawbar prepare config.yaml --show 3
  drawbar prepare config.yaml data.workers=16 data.cache=cache
  drawbar prepare config.yaml data.on_bad_record=skip data.sequence_length=256

\b
A later `drawbar train` with the same data and task settings reuses the encoded data, and starts at once.
""",
)
@click.option(
    "--show",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also print the first N training rows as text, with what is learned of them.",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.pass_obj
def prepare(task: "type[Task] | None", arguments: tuple[str, ...], show: int | None) -> int:
    """Encode the data of CONFIG ahead of training.

    Prints the number and lengths of the samples, and the padding that each way of batching would need.
    """
    from drawbar.cli.arguments import check_training, load
    from drawbar.util.torch_imports import quick_imports

    loaded = load(arguments, task)
    check_training(loaded)

    with quick_imports():
        from drawbar.commands.prepare_data import prepare_run

    prepare_run(loaded.config, task, show or 0)
    return 0
