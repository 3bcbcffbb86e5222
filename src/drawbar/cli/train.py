"""``drawbar train``."""

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings
from drawbar.distributed.rank_info import has_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from drawbar.config.io.source import Settings
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.launch.warm_process import WarmProcess
    from drawbar.tasks.task import Task

RANK_MODULES = (
    *("drawbar.cli", "drawbar.train.trainer", "drawbar.engines.torch_strategies", "drawbar.launch.agent"),
    "transformers.generation.utils",
)
"""Modules that nearly every rank imports, including torch and transformers, but not the classes of models and tasks."""


@click.command(
    short_help="Train a run, or resume it.",
    epilog="""\b
Examples:
  drawbar train config.yaml
  drawbar train config.yaml optim.lr=1e-4 train.steps=500 run.name=low-lr
  drawbar train config.yaml launch.nproc=2
  torchrun --standalone --nproc_per_node=2 -m drawbar train config.yaml
  drawbar train config.yaml optim.lr=1e-5 --fork low-lr     a new run from this run's checkpoint
  drawbar train config.yaml --fork anew --weights-only      the same, with a new optimizer state
  drawbar train tune.yaml task.model=runs/demo@best         a separate run from that run's best model

\b
Run the same command again to resume.
Exit codes: 0 done, 1 failed, 2 the request is wrong, 75 saved after SIGTERM, 130 saved after Ctrl-C
(or interrupted before there was anything to save).
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option(
    "--resume",
    default="auto",
    metavar="never|auto|latest|best|STEP|PATH",
    help="auto: resume the run if it exists (default). never: refuse a run that exists, unless its checkpoints are all "
    "unusable; then start over, and set them aside. latest, best, STEP: with --fork, the checkpoint of this run to "
    "start from. PATH: start from this checkpoint, of any run.",
)
@click.option("--fork", metavar="NEWNAME", help="Start a new run from this run's checkpoint; settings may differ.")
@click.option(
    "--weights-only",
    is_flag=True,
    help="With --fork or --resume PATH: load only the weights, and start with a new optimizer state.",
)
@click.pass_obj
def train(
    task: "type[Task] | None", arguments: tuple[str, ...], resume: str, fork: str | None, weights_only: bool
) -> int:
    """Train the run described by CONFIG (a YAML file), with settings overridden by KEY=VALUE."""
    from drawbar.distributed.interrupt import exit_on_signal
    from drawbar.runtime.log import ignore_output_errors

    ignore_output_errors()
    with exit_on_signal():
        return start(task, arguments, resume, fork, weights_only)


def start(
    task: "type[Task] | None", arguments: tuple[str, ...], resume: str, fork: str | None, weights_only: bool = False
) -> int:
    """Train in this process, or start the processes that do and wait for them. Returns the run's exit code."""
    from drawbar.cli.arguments import check, check_training, read
    from drawbar.config.rules.rule_table import PACKAGE_RULES, check_guests, check_world
    from drawbar.distributed.foreign_launcher import refuse_unconnected_processes
    from drawbar.launch.rendezvous import Rendezvous
    from drawbar.launch.warm_process import STATUS_VARIABLE
    from drawbar.util.torch_imports import quick_imports

    rendezvous = Rendezvous.from_environment()
    if rendezvous is None:
        refuse_unconnected_processes()
    settings = read(arguments)
    with start_early(task, settings) as warm_process:
        loaded = check(settings, task)
        check_training(loaded, PACKAGE_RULES)
        if os.environ.get("RANK", "0") == "0" and STATUS_VARIABLE not in os.environ:  # else the launcher printed it
            click.echo(f"{loaded.config.run_dir}: starting", err=True)
        processes = count_processes(loaded.config)
        if processes > 1 or (rendezvous and rendezvous.nodes > 1):
            from drawbar.launch.agent import run_processes
            from drawbar.launch.node_check import NodeCheck

            config, total = loaded.config, processes * (rendezvous.nodes if rendezvous else 1)
            check_world(config, total)
            check_guests(loaded, total)
            seconds = config.launch.roll_call_seconds
            node_check = NodeCheck(config.model_dump_json(), config.device, config.run_dir, seconds)
            command, launch = rerun_command(task), config.launch
            again = [*command, "--resume", "auto"] if resume == "never" else command  # the run exists then
            return run_processes(
                command, processes, rendezvous, launch, node_check, warm_process, config.run_dir, again
            )

    with quick_imports():
        from drawbar.distributed.rank_info import RankInfo
        from drawbar.train.trainer import Trainer

    check_guests(loaded, RankInfo.from_environment().world_size)
    trainer = Trainer(loaded.config, task, resume=resume, fork=fork, weights_only=weights_only, notes=loaded.notes)
    return trainer.fit().exit_code


def start_early(
    task: "type[Task] | None", settings: "Settings"
) -> "AbstractContextManager[WarmProcess] | AbstractContextManager[None]":
    """Start the process that will fork the ranks; it imports their modules while the settings are checked. None if the
    settings do not give the number of ranks or ranks are not forked: see :mod:`drawbar.launch.warm_process`."""
    from drawbar.launch.warm_process import WarmProcess, become_launcher

    section = settings.values.get("launch")
    nproc = section.get("nproc") if isinstance(section, dict) else None
    if not isinstance(nproc, int) or nproc < 2 or has_rank():
        return nullcontext()
    # drawbar has not imported torch yet: if it is loaded, a user's script did so, and each rank must run that script
    is_script = task is not None or "torch" in sys.modules
    if is_script or sys.platform != "linux":
        return nullcontext()
    become_launcher(nproc)
    return WarmProcess(RANK_MODULES, nproc)


def count_processes(config: "RunConfig") -> int:
    """Number of processes that this command runs: 1, itself, if a launcher such as torchrun started it."""

    def count_gpus() -> int:
        import torch

        return torch.cuda.device_count()

    return processes_to_start(config, count_gpus)


def processes_to_start(config: "RunConfig", count_gpus: "Callable[[], int]") -> int:
    """See ``count_processes``; ``count_gpus`` is only called if the number of GPUs matters."""
    if has_rank():
        return 1
    if config.launch.nproc != "auto":
        return config.launch.nproc
    return max(1, count_gpus()) if config.has_process_per_gpu else 1


def rerun_command(task: "type[Task] | None") -> list[str]:
    """The arguments of ``python`` that run this command again. Raises UserError if that is impossible."""
    from drawbar.cli.arguments import user_program
    from drawbar.launch.warm_process import RANK_PROGRAM

    program = user_program(task)
    if program is None:
        return [*RANK_PROGRAM, *sys.argv[1:]]
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m package.module`
    if spec is not None and os.path.realpath(spec.origin or "") == os.path.realpath(program):
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return sys.argv[:]


def rerun_as_ranks(config: "RunConfig", task: "type[Task] | None") -> int | None:
    """Run this command again on the configured number of processes; the exit code, or None if that number is 1."""
    processes = count_processes(config)
    if processes == 1:
        return None
    from drawbar.launch.agent import run_processes

    return run_processes(rerun_command(task), processes, launch=config.launch)
