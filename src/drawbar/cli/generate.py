"""``drawbar generate``."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    epilog="""\b
Examples:
  drawbar generate runs/demo --prompt "def main("
  drawbar generate runs/demo --prompt "import " --prompt "class " --max-new-tokens 64
  drawbar generate runs/demo --prompt "def " --temperature 0        greedy
  drawbar generate runs/demo --input prompts.txt                    a prompt a line
"""
)
@click.argument("run")
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; may be given several times.")
@click.option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False),
    help="A .txt file with a prompt on each line, or .jsonl.",
)
@click.option(
    "--checkpoint",
    metavar="best|latest|STEP",
    help="Which checkpoint to use. Default: the best, or the latest where no evaluation chose one.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most tokens to add."
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=50, show_default=True, help="0 for all tokens.")
@click.option(
    "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True, help="1 for all."
)
@click.option("--beams", type=click.IntRange(min=1), default=1, show_default=True, help="1 is no beam search.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed, the same text.")
@click.pass_obj
def generate(
    task: "type[Task] | None",
    run: str,
    prompts: tuple[str, ...],
    input_file: str | None,
    checkpoint: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    beams: int,
    seed: int,
) -> int:
    """Print what the model of RUN goes on with after each prompt (by default: the beginning of a document)."""
    from drawbar.cli.arguments import load_run
    from drawbar.evaluation.generate import Sampling
    from drawbar.train.inference import generate_from_run

    loaded = load_run(run, ("launch.nproc=1",), task)
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, beams)
    all_prompts = [*prompts, *(_read_prompts(input_file) if input_file else [])] or [""]
    texts = generate_from_run(loaded.config, task, all_prompts, sampling, checkpoint, seed)
    for number, (prompt, text) in enumerate(zip(all_prompts, texts, strict=True)):
        if number:
            click.echo("-" * 40)
        click.echo(click.style(prompt, bold=True) + text)
    return 0


def _read_prompts(path: str) -> list[str]:
    from drawbar.data.sources import open_records
    from drawbar.errors import UserError

    records = open_records(path, "test", "line")
    for number, record in enumerate(records):
        if not isinstance(record.get("text"), str):
            raise UserError("the record has no text", where=records.where(number), remedy='write {"text": "a prompt"}')
    return [record["text"] for record in records]
