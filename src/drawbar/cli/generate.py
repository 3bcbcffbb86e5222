"""``drawbar generate``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Continue prompts with a run's model.",
    epilog="""\b
Examples:
  drawbar generate runs/demo --prompt "def main("
  drawbar generate runs/demo --prompt "import " --prompt "class " --max-new-tokens 64
  drawbar generate runs/demo --prompt "def " --temperature 0        greedy
  drawbar generate runs/demo --input prompts.txt                    a prompt a line
  drawbar generate runs/demo --input prompts.jsonl --output out.jsonl
""",
)
@click.argument("run")
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; may be given several times.")
@click.option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False),
    help='A .txt file with a prompt on each line, or .jsonl with {"prompt": …} or {"text": …} on each.',
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .jsonl file to write prompts and texts to, instead of printing them.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output, if it is there.")
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
    output: Path | None,
    overwrite: bool,
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
    from drawbar.cli.imports import quick_imports

    with quick_imports():
        from drawbar.evaluation.generate import Sampling
        from drawbar.train.inference import generate_from_run
        from drawbar.train.output import check_output, write_lines

    loaded = load_run(run, ("launch.nproc=1",), task)
    if output is not None:
        check_output(output, overwrite)
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, beams)
    all_prompts = [*prompts, *(_read_prompts(input_file) if input_file else [])] or [""]
    texts = generate_from_run(loaded.config, task, all_prompts, sampling, checkpoint, seed)
    if output is None:
        _print_texts(all_prompts, texts)
    else:
        write_lines(output, ({"prompt": prompt, "text": text} for prompt, text in zip(all_prompts, texts, strict=True)))
    return 0


def _print_texts(prompts: list[str], texts: list[str]) -> None:
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            click.echo("-" * 40)
        click.echo(click.style(prompt, bold=True) + text)


def _read_prompts(path: str) -> list[str]:
    from drawbar.config.data import DataSection
    from drawbar.data.sources import open_records
    from drawbar.errors import UserError

    records = open_records(DataSection(test=path), "test")
    prompts = []
    for number, record in enumerate(records):
        prompt = record.get("prompt", record.get("text"))
        if not isinstance(prompt, str):
            raise UserError(
                "the record has no prompt", where=records.where(number), remedy='write {"prompt": "what to go on from"}'
            )
        prompts.append(prompt)
    return prompts
