"""``drawbar parity``."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings
from drawbar.distributed.rank_info import has_rank

if TYPE_CHECKING:
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.parity.cases import Case
    from drawbar.parity.result import ResultsDir
    from drawbar.parity.run import ParityRequest
    from drawbar.tasks.task import Task

FOLDER = "DRAWBAR_PARITY_FOLDER"
"""Environment variable: where the processes leave their results for the command that started them."""


@click.command(
    short_help="Compare every strategy with one process.",
    epilog="""\b
Examples:
  drawbar parity config.yaml
  drawbar parity config.yaml --ranks 4 --strategies "ddp, fsdp reshard=false, fsdp tensor=2"
  drawbar parity config.yaml --layers 2 --steps 5 train.global_batch=8
  drawbar parity config.yaml --precision bf16 --json
  drawbar parity config.yaml --html parity.html     the same as a page, with curves

\b
The data, batches, optimizer and schedule are those of CONFIG; dropout is off. No run directory is touched.
Exit codes: 0 all that could run are equal, 1 a strategy diverges or crashes, 2 the request is wrong, or none can run.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option(
    "--strategies",
    metavar="A,B,...",
    help="What to compare: strategies, with settings of parallel after a space. Default: all that fit CONFIG.",
)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Optimizer steps to make.")
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: launch.nproc, or 2.")
@click.option("--layers", type=click.IntRange(min=1), help="Keep this many of the model's blocks.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Of the strategies; the one process they are compared with is fp32.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a page: verdicts, differences beside their bounds, curves, modules.",
)
@click.pass_obj
def parity(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    strategies: str | None,
    steps: int,
    ranks: int | None,
    layers: int | None,
    precision: str,
    as_json: bool,
    target: Path | None,
) -> int:
    """Train a few steps of CONFIG under each strategy, and compare each with one process.

    Compares losses, gradient norms, each parameter's gradient and the weights after the last step; and where a strategy
    differs, names the first module that does.
    """
    from drawbar.cli.arguments import check_training, load
    from drawbar.parity.parity_page import render_parity
    from drawbar.report.page import check_plotly, check_target, write_page
    from drawbar.util.torch_imports import quick_imports

    loaded = load(arguments, task)
    check_training(loaded)
    if target is not None:
        check_plotly("drawbar parity --html")
        check_target(target, "--html")
    started = has_rank()
    nproc = loaded.config.launch.nproc
    count = int(os.environ.get("WORLD_SIZE", "1")) if started else ranks or (2 if nproc == "auto" else nproc)

    with quick_imports():
        from drawbar.models.folder import INITIAL_MODEL
        from drawbar.parity.cases import default_cases, parse_cases
        from drawbar.parity.result import ParityReport, ResultsDir
        from drawbar.parity.run import ParityRequest, refused_cases
        from drawbar.train.initial_model import write_initial_model

    if strategies is None:
        request = ParityRequest(default_cases(loaded.config, count, precision), precision, asked_for=False)
    else:
        request = ParityRequest(parse_cases(strategies, loaded.config), precision)
    with tempfile.TemporaryDirectory(prefix="drawbar-") as own:
        folder = ResultsDir(Path(os.environ.get(FOLDER, own)))
        if not started:
            for refused in refused_cases(request, loaded.config, count):
                folder.add(refused)
        rest = [case for case in request.cases if case.name not in folder.names()]
        if rest and not started:
            write_initial_model(loaded.config, folder.path / INITIAL_MODEL)
        if started or (rest and count == 1):
            _compare(loaded.config, task, request, folder, steps, layers, as_json)
        elif rest and (code := _start(task, request, rest, folder, count)):
            return code
        if started and (FOLDER in os.environ or os.environ.get("RANK", "0") != "0"):
            return 0  # the command that started this process, or rank 0, reports
        names = (loaded.config.run.name, str(getattr(loaded.config.task, "model", "") or ""))
        report = ParityReport(folder.results(request.cases), steps, count, precision, layers, *names)
        if as_json:
            click.echo(report.as_json())
        else:
            report.print()
        if target is not None:
            write_page(render_parity(report.values()), target, "--html")
            click.echo(f"page: {target}", err=as_json)
        return report.exit_code


def _compare(
    config: "RunConfig",
    task: "type[Task] | None",
    request: "ParityRequest",
    folder: "ResultsDir",
    steps: int,
    layers: int | None,
    as_json: bool,
) -> None:
    """What each process does: see ``run_process``."""
    from drawbar.models.folder import INITIAL_MODEL
    from drawbar.parity.run import run_process
    from drawbar.parity.workload import Workload
    from drawbar.tasks.task_registry import task_class
    from drawbar.tracking.console import Console, make_console

    console = Console() if as_json else make_console(os.environ.get("RANK", "0") == "0")
    copied = folder.path / INITIAL_MODEL
    initial_model = copied if copied.is_dir() else None
    workload = Workload(config, task or task_class(config.task.type), steps, layers, initial_model=initial_model)
    try:
        run_process(workload, request, folder, lambda line: print(line, file=sys.stderr, flush=True), console)
    finally:
        console.stop()


def _start(
    task: "type[Task] | None", request: "ParityRequest", rest: "list[Case]", folder: "ResultsDir", ranks: int
) -> int:
    """Start the processes for the cases of ``rest``, and restart them after a case that crashed them. 0 if there are
    results, else an exit code."""
    from drawbar.cli.train import rerun_command
    from drawbar.errors import ExitCode
    from drawbar.launch.agent import run_processes
    from drawbar.parity.result import Result

    os.environ[FOLDER] = str(folder.path)
    while rest:
        code = run_processes(rerun_command(task), ranks)
        done = folder.names()
        rest = [case for case in rest if case.name not in done]
        if code != ExitCode.DONE and (code > ExitCode.WRONG_REQUEST or not folder.has_reference):
            return code  # a signal, or nothing to compare with
        if rest and code != ExitCode.DONE:
            folder.add(Result(rest.pop(0).name, "crashed", request.asked_for, [folder.pop_crash()]))
    return 0
