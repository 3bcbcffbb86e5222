"""``drawbar predict``."""

import json
from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import checkpoint_option
from drawbar.cli.complete_words import complete_run, complete_settings

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Predict for records without labels.",
    epilog="""\b
Examples:
  drawbar predict runs/demo --input reviews.jsonl --output out.jsonl
  drawbar predict runs/demo --input unlabelled.tsv --output out.jsonl data.columns=[sentence]
  drawbar predict runs/demo --input reviews.txt --output out.jsonl --checkpoint 500 launch.nproc=2
  drawbar predict runs/demo --input reviews.csv --output out.jsonl --overwrite data.on_bad_record=skip
  drawbar predict runs/demo --input reviews.jsonl --output out.jsonl --probabilities
  drawbar predict runs/demo --output out.jsonl "data.test={parallel: {source: new.en}}"     parallel files

\b
Each output line is an input record, in order, with its "prediction" (null if there is none). An unreadable
record (with data.on_bad_record=skip) becomes {"error": ..., "prediction": null}. --probabilities adds
"probabilities": a mapping from label to probability, or a list of one per word.
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option("--input", "source", metavar="FILE", help="A file of records, or a glob. Default: data.test.")
@click.option("--output", required=True, metavar="FILE", help="The .jsonl file to write.")
@click.option("--probabilities", is_flag=True, help="Classifiers: also write the probability of each label.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output file.")
@checkpoint_option
@click.pass_obj
def predict(
    task: "type[Task] | None",
    run: str,
    overrides: tuple[str, ...],
    source: str | None,
    output: str,
    probabilities: bool,
    overwrite: bool,
    checkpoint: str | None,
) -> int:
    """Predict for records without labels, with the model of RUN (a run directory)."""
    from drawbar.cli.arguments import load_run
    from drawbar.cli.train import rerun_as_ranks
    from drawbar.commands.output_files import PREDICTIONS, check_output
    from drawbar.config.rules.rule_table import RULES, check_rules
    from drawbar.util.torch_imports import quick_imports

    given = (f"data.test={json.dumps(source)}", "data.limit.test=null") if source is not None else ()
    loaded = load_run(run, (*given, *overrides), task)
    check_rules(loaded, RULES)
    path = check_output(output, overwrite, PREDICTIONS)
    if (code := rerun_as_ranks(loaded.config, task)) is not None:
        return code

    with quick_imports():
        from drawbar.commands.score_run import predict_from_run

    predict_from_run(loaded.config, task, path, checkpoint, probabilities)
    return 0
