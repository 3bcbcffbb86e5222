"""``drawbar convert``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_run
from drawbar.util.registry import has_folder

if TYPE_CHECKING:
    from drawbar.tasks.task import Task

_FORMATS = ["dcp", *(["deepspeed"] if has_folder("deepspeed") else [])]


@click.command(
    short_help="Write checkpoints for other programs; take weights from theirs.",
    epilog="""\b
Examples:
  drawbar convert runs/demo --to dcp --output demo-dcp              for torch.distributed.checkpoint
  drawbar convert runs/demo --checkpoint 1000 --to deepspeed --output demo-zero
  drawbar convert out/global_step500 --from deepspeed --model meta-llama/Llama-3.2-1B --output trained
  drawbar convert dcp-folder --from dcp --model FOLDER --output trained

\b
Start a run from the folder that --from writes by task.model=trained.
A checkpoint folder of Hugging Face's Trainer is a model as it is: task.model=out/checkpoint-500.
""",
)
@click.argument("source", type=click.Path(), shell_complete=complete_run)
@click.option(
    "--to",
    type=click.Choice([*_FORMATS, "huggingface"]),
    help="What to make of a run's checkpoint. dcp: a folder of torch.distributed.checkpoint. deepspeed: a universal "
    "checkpoint. huggingface: as `drawbar export`.",
)
@click.option(
    "--from",
    "form",
    type=click.Choice(_FORMATS),
    help="What SOURCE is, if no run: a checkpoint of torch.distributed.checkpoint, or of DeepSpeed (ZeRO or "
    "universal). Its weights become a folder for task.model; its optimizer state is not taken.",
)
@click.option("--output", type=click.Path(), metavar="DIR", required=True, help="The folder to write, a new one.")
@click.option(
    "--checkpoint",
    metavar="best|latest|STEP|PATH",
    help="With --to: which checkpoint. Default: the latest.",
)
@click.option(
    "--model",
    metavar="NAME|FOLDER",
    help="With --from: the model that was trained, for its config.json and tokenizer. Its weights are not read.",
)
@click.pass_obj
def convert(
    task: "type[Task] | None",
    source: str,
    to: str | None,
    form: str | None,
    output: str,
    checkpoint: str | None,
    model: str | None,
) -> None:
    """Write a checkpoint of SOURCE (a run directory) in another format, or the weights of another trainer's
    checkpoint as a model.

    It takes one process and the CPU, and little more memory than the largest tensors; to huggingface and with
    --from that of one file of weights (5 GB), and from a checkpoint of ZeRO stage 1 or 2 that of all weights.
    """
    _check_options(to, form, checkpoint, model)
    if to is not None:
        _from_run(task, _folder(source, "SOURCE"), to, _folder(output, "--output"), checkpoint or "latest")
    else:
        _to_model(_folder(source, "SOURCE"), str(form), str(model), _folder(output, "--output"))


def _check_options(to: str | None, form: str | None, checkpoint: str | None, model: str | None) -> None:
    from drawbar.errors import UserError

    what = None
    if (to is None) == (form is None):
        where = "the command line"
        what = "it takes either --to or --from" + (", not both" if to is not None else ": neither is given")
    elif to is not None and model is not None:
        what, where = "--model does not go with --to", "--model"
    elif form is not None and checkpoint is not None:
        what, where = "--checkpoint does not go with --from", "--checkpoint"
    elif form is not None and model is None:
        what, where = "--from needs --model, which is not given", "--model"
    if what is not None:
        remedy = (
            "give --to for a run, or --from and --model for a checkpoint of another program: see "
            "`drawbar convert --help`"
        )
        raise UserError(what, where=where, remedy=remedy)


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
        from drawbar.commands.export_run import ExportFormat, export_run
        from drawbar.convert.convert_run import convert_run

    if to == "huggingface":
        export_run(loaded.config, task, output, checkpoint, ExportFormat())
        return
    step = convert_run(loaded.config, checkpoint, to, output)
    print(f"{output}: step {step}")


def _to_model(source: Path, form: str, model: str, output: Path) -> None:
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.convert.convert_run import import_weights

    import_weights(source, form, model, output)
    print(f"{output}: a model for task.model; its optimizer state is not taken: training begins with a fresh one")
