"""``drawbar plan``."""

from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.complete_words import complete_config_and_settings

if TYPE_CHECKING:
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.plan.forecast_tables import Compared
    from drawbar.plan.run_forecast import Forecaster
    from drawbar.tasks.task import Task

NO_STRATEGIES = "none"
"""Value of ``--strategies``: compare none."""


class _Size(click.ParamType):
    """A number of bytes, such as ``80GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from drawbar.util.byte_sizes import parse_size

        try:
            return parse_size(value) if isinstance(value, str) else int(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    short_help="Forecast memory, traffic and time of a run.",
    epilog="""\b
Examples:
  drawbar plan config.yaml
  drawbar plan config.yaml --gpus 8 --gpu-memory 80GiB --nodes 2
  drawbar plan config.yaml --gpus 8 --gpu h100 --mfu 0.35 parallel.strategy=fsdp
  drawbar plan config.yaml --strategies "ddp, fsdp, fsdp tensor=2" --json plan.json

\b
Neither a GPU nor weights are needed, and no run directory is touched. All samples count as the longest that the
settings allow.
Exit codes: 0 it fits, 1 it does not fit, 2 the request is wrong.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option(
    "--gpus", type=click.IntRange(min=1), help="GPUs of each machine. Default: cluster, launch, or those here."
)
@click.option("--gpu-memory", type=_Size(), metavar="80GiB", help="Memory of each GPU.")
@click.option("--gpu", metavar="NAME", help="Its name, such as h100 or a100: for its speed, and for its memory.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines. Default: cluster.nodes, or 1.")
@click.option(
    "--mfu", type=click.FloatRange(0, 1, min_open=True), default=0.4, show_default=True,
    help="Share of the GPUs' peak FLOP/s at which they compute; what is computed again counts, too.",
)  # fmt: skip
@click.option(
    "--strategies",
    metavar="A,B,...",
    help="What to show side by side: strategies, with settings of parallel after a space; or none. Default: all that "
    "CONFIG allows on these machines, whether they fit or not.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write it as JSON, too; FILE is replaced.",
)
@click.pass_obj
def plan(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    gpus: int | None,
    gpu_memory: int | None,
    gpu: str | None,
    nodes: int | None,
    mfu: float,
    strategies: str | None,
    json_file: str | None,
) -> int:
    """Say what a run will take before it runs: memory of each rank, bytes sent, time and disk, and whether it fits.

    Builds the engine of the run for one rank of each kind, on tensors without memory, and makes two steps. If the run
    does not fit, looks for changes with which it does.
    """
    from drawbar.cli.arguments import check_training, load
    from drawbar.commands.output_files import FORECAST, check_output
    from drawbar.errors import ExitCode
    from drawbar.util.torch_imports import quick_imports

    loaded = load(arguments, task)
    check_training(loaded)
    json_path = None if json_file is None else check_output(json_file, True, FORECAST, "--json")
    with quick_imports():
        from rich.console import Console

        from drawbar.plan.forecast_tables import print_forecast, write_json
        from drawbar.plan.machine import make_machine
        from drawbar.plan.run_forecast import Forecaster
        from drawbar.plan.suggestions import suggest
        from drawbar.tasks.task_registry import task_class
        from drawbar.train.initial_model import temporary_initial_model

    config = loaded.config
    machine = make_machine(config, nodes, gpus, gpu_memory, gpu, mfu)
    with temporary_initial_model(config) as initial_model:
        forecaster = Forecaster(config, task or task_class(config.task.type), machine, initial_model)
        found = forecaster.forecast(config, forecaster.name_of(config))
        compared = _compare(forecaster, config, strategies)
        suggestions = None if found.fits else suggest(forecaster, config, found)
    print_forecast(Console(), found, compared, suggestions)
    if json_path is not None:
        write_json(json_path, found, compared, suggestions)
    return ExitCode.DONE if found.fits else ExitCode.FAILED


def _compare(forecaster: "Forecaster", config: "RunConfig", strategies: str | None) -> "Compared":
    from drawbar.errors import UserError
    from drawbar.parity.cases import default_cases, parse_cases

    if strategies == NO_STRATEGIES:
        return []
    resolved = forecaster.resolve(config)
    if strategies is None:
        ranks = forecaster.machine.ranks
        # parity's list also has the strategies of one process; a plan for several devices leaves them out
        cases = [case for case in default_cases(resolved, ranks, resolved.precision) if ranks == 1 or not case.alone]
    else:
        cases = parse_cases(strategies, config)
    compared: list[Any] = []
    for case in cases:
        try:
            compared.append((case.name, forecaster.forecast(case.apply_to(config, resolved.precision), case.name)))
        except UserError as error:
            compared.append((case.name, error))
    return compared
