"""``drawbar convert``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_run, complete_settings

if TYPE_CHECKING:
    from drawbar.errors import UserError
    from drawbar.tasks.task import Task


@click.command(
    short_help="Turn checkpoints into those of other programs, and back.",
    epilog="""\b
Examples:
  drawbar convert runs/demo --to dcp --output demo-dcp              for torch.distributed.checkpoint
  drawbar convert runs/demo --to parts --output runs/in-parts       a run whose checkpoint is in parts
  drawbar convert runs/demo --checkpoint 1000 --to deepspeed --output demo-zero
  drawbar convert out/checkpoint-500 --from trainer --to-run config.yaml
  drawbar convert demo-dcp --from dcp --to-run config.yaml run.name=back

\b
After --to-run, `drawbar train` with the same configuration goes on from there.
""",
)
@click.argument("source", type=click.Path(), shell_complete=complete_run)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option(
    "--to",
    type=click.Choice(["whole", "parts", "dcp", "deepspeed", "huggingface"]),
    help="What to make of a run's checkpoint. whole, parts: a run whose checkpoint holds whole tensors (format 1), or "
    "is in parts (format 2). dcp: a folder of torch.distributed.checkpoint. deepspeed: a universal checkpoint. "
    "huggingface: as `drawbar export`.",
)
@click.option("--output", type=click.Path(), metavar="DIR", help="With --to: the folder to write, a new one.")
@click.option(
    "--checkpoint",
    metavar="best|latest|STEP|PATH",
    help="With --to: which checkpoint. Default: the latest.",
)
@click.option(
    "--from",
    "form",
    type=click.Choice(["dcp", "deepspeed", "trainer"]),
    help="What SOURCE is, if no run: a checkpoint of torch.distributed.checkpoint, of DeepSpeed (ZeRO or universal), "
    "or of Hugging Face's Trainer.",
)
@click.option("--to-run", "config", metavar="CONFIG", help="With --from: the configuration of the run to make of it.")
@click.pass_obj
def convert(
    task: "type[Task] | None",
    source: str,
    settings: tuple[str, ...],
    to: str | None,
    output: str | None,
    checkpoint: str | None,
    form: str | None,
    config: str | None,
) -> None:
    """Write a checkpoint of SOURCE (a run directory) in another format, or make a run of another program's checkpoint.

    It takes one process and the CPU, and little more memory than the largest tensors; from a ZeRO checkpoint of
    DeepSpeed that of one rank's file, and to huggingface that of one file of weights (5 GB).
    """
    options = {"--output": output, "--checkpoint": checkpoint, "--to-run": config, "KEY=VALUE": settings or None}
    if form is not None and to is None:
        _check_options("--from", options, needed="--to-run", allowed="KEY=VALUE")
        _to_run(task, _folder(source, "SOURCE"), form, (str(config), *settings))
    elif to is not None and form is None:
        _check_options("--to", options, needed="--output", allowed="--checkpoint")
        _from_run(task, _folder(source, "SOURCE"), to, _folder(str(output), "--output"), checkpoint or "latest")
    else:
        raise _refused(
            "it takes either --to or --from" + (", not both" if to is not None else ": neither is given"),
            "the command line",
        )


def _check_options(of: str, options: Mapping[str, object], needed: str, allowed: str) -> None:
    """Refuse a command line that lacks the option ``needed``, or has one that is not for ``of``."""
    for name, value in options.items():
        if value is not None and name not in (needed, allowed):
            raise _refused(f"{name} does not go with {of}", name)
    if options[needed] is None:
        raise _refused(f"{of} needs {needed}, which is not given", needed)


def _refused(what: str, where: str) -> "UserError":
    from drawbar.errors import UserError

    remedy = (
        "give --to and --output for a run, or --from and --to-run for a checkpoint of another program: see "
        "`drawbar convert --help`"
    )
    return UserError(what, where=where, remedy=remedy)


def _folder(text: str, where: str) -> Path:
    from drawbar.errors import UserError

    if "://" in text:
        raise UserError(
            f"{text} is a URL, and no folder of this machine",
            where=where,
            remedy="copy it to a disk first, and name the folder there; a run in a store of checkpoint.remote comes "
            "back by `drawbar train`"
            if where == "SOURCE"
            else "name a folder, and copy it from there",
        )
    return Path(text)


def _from_run(task: "type[Task] | None", source: Path, to: str, output: Path, checkpoint: str) -> None:
    from drawbar.cli.arguments import load_run
    from drawbar.util.torch_imports import quick_imports

    overrides = ("launch.nproc=1", "device=cpu", "precision=fp32") if to == "huggingface" else ()
    loaded = load_run(str(source), overrides, task)
    with quick_imports():
        from drawbar.commands.conversion.convert_run import convert_run
        from drawbar.commands.export_run import ExportFormat, export_run

    if to == "huggingface":
        export_run(loaded.config, task, output, checkpoint, ExportFormat())
        return
    step = convert_run(loaded.config, task, checkpoint, to, output)
    print(f"{output}: step {step}")


def _to_run(task: "type[Task] | None", source: Path, form: str, arguments: tuple[str, ...]) -> None:
    from drawbar.cli.arguments import load
    from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
    from drawbar.util.torch_imports import quick_imports

    loaded = load(arguments, task)
    check_rules(loaded, RULES + TRAIN_RULES)
    with quick_imports():
        from drawbar.commands.conversion.import_run import import_run

    step = import_run(source, form, loaded.config, task)
    print(f"{loaded.config.run_dir}: step {step}; `drawbar train` goes on from there")
