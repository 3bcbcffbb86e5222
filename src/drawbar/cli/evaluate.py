"""``drawbar eval``."""

from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import checkpoint_option
from drawbar.cli.complete_words import complete_run, complete_settings

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
  drawbar eval runs/demo --harness arc_easy,hellaswag --fewshot 5

\b
Scores are printed and written to RUN/eval/<split>/scores.json, or to RUN/eval/<split>-other
if the records differ from the run's, as with data.limit.test=100; those of --harness to
RUN/eval/harness/scores.json.
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option(
    "--split",
    type=click.Choice(["train", "validation", "test"]),
    default="validation",
    show_default=True,
    help="Split of the data to evaluate on.",
)
@checkpoint_option
@click.option(
    "--harness",
    metavar="TASKS",
    help="Instead of a split, tasks of lm-eval, with commas between them: names, or YAML files. One process.",
)
@click.option("--fewshot", type=click.IntRange(min=0), help="With --harness: examples in each prompt.")
@click.option("--limit", type=click.IntRange(min=1), help="With --harness: questions of each task.")
@click.pass_obj
def evaluate(
    task: "type[Task] | None",
    run: str,
    overrides: tuple[str, ...],
    split: str,
    checkpoint: str | None,
    harness: str | None,
    fewshot: int | None,
    limit: int | None,
) -> int:
    """Evaluate a checkpoint of RUN (a run directory), every sample exactly once."""
    if harness is not None:
        return _ask_harness(task, run, overrides, checkpoint, harness, fewshot, limit)
    if fewshot is not None or limit is not None:
        raise click.UsageError("--fewshot and --limit are for --harness; data.limit.validation=100 limits a split")
    from drawbar.cli.arguments import load_run
    from drawbar.cli.train import rerun_as_ranks
    from drawbar.config.rules.rule_table import RULES, check_rules
    from drawbar.util.torch_imports import quick_imports

    loaded = load_run(run, overrides, task)
    check_rules(loaded, RULES)
    if (code := rerun_as_ranks(loaded.config, task)) is not None:
        return code

    with quick_imports():
        from drawbar.commands.score_run import evaluate_run

    evaluate_run(loaded.config, task, split, checkpoint)
    return 0


def _ask_harness(
    task: "type[Task] | None",
    run: str,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    harness: str,
    fewshot: int | None,
    limit: int | None,
) -> int:
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.harness import print_scores, score_on_harness
        from drawbar.commands.trained_run import load_run
        from drawbar.tracking.console import make_console

    opened = load_run(run, *overrides, checkpoint=checkpoint, task=task)
    scores = score_on_harness(opened, harness.split(","), fewshot, limit)
    print_scores(make_console(is_rank_zero=True), opened.step, scores)
    return 0
