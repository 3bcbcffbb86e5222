"""``drawbar eval``."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Score a checkpoint on a split of the data.",
    name="eval",
    epilog="""\b
Examples:
  drawbar eval runs/demo
  drawbar eval runs/demo --split test --checkpoint latest
  drawbar eval runs/demo --checkpoint 500 eval.micro_batch=64 launch.nproc=2

\b
Scores are printed and written to RUN/eval/<split>/scores.json; those of other records
than the run's, as with data.limit.test=100, to RUN/eval/<split>-other.
""",
)
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--split",
    type=click.Choice(["train", "validation", "test"]),
    default="validation",
    show_default=True,
    help="Which part of the data.",
)
@click.option(
    "--checkpoint",
    metavar="best|latest|STEP",
    help="Which checkpoint to evaluate. Default: the best, or the latest where no evaluation chose one.",
)
@click.pass_obj
def evaluate(
    task: "type[Task] | None", run: str, overrides: tuple[str, ...], split: str, checkpoint: str | None
) -> int:
    """Evaluate a checkpoint of RUN (a run directory), every sample exactly once."""
    from drawbar.cli.arguments import load_run
    from drawbar.cli.train import count_processes, own_command
    from drawbar.config.rules.rule_table import RULES, check_rules
    from drawbar.util.torch_imports import quick_imports

    loaded = load_run(run, overrides, task)
    check_rules(loaded, RULES)
    processes = count_processes(loaded.config)
    if processes > 1:
        from drawbar.launch.node.agent import run_processes

        return run_processes(own_command(task), processes)

    with quick_imports():
        from drawbar.commands.score_run import evaluate_run

    evaluate_run(loaded.config, task, split, checkpoint)
    return 0
