"""``drawbar generate``."""

import json
import sys
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import checkpoint_option
from drawbar.cli.complete_words import complete_run
from drawbar.errors import visible

if TYPE_CHECKING:
    from drawbar.evaluation.text_generation import Prompt
    from drawbar.tasks.task import Task

SAMPLING = (
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Maximum number of tokens to generate.",
    ),
    click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=click.IntRange(min=0), default=50, show_default=True, help="0 for all tokens."),
    click.option(
        "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True, help="1 for all."
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampling."),
)


def sampling_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options of how a text is sampled."""
    return reduce(lambda decorated, option: option(decorated), reversed(SAMPLING), command)


@click.command(
    short_help="Continue prompts with a run's model.",
    epilog="""\b
Examples:
  drawbar generate runs/demo --prompt "def main("
  drawbar generate runs/demo --prompt "import " --prompt "class " --max-new-tokens 64
  drawbar generate runs/demo --prompt "def " --temperature 0        greedy
  drawbar generate runs/demo --input prompts.txt                    one prompt per line
  drawbar generate runs/demo --input prompts.jsonl --output out.jsonl
  drawbar generate runs/chat --prompt "Who are you?"                a chat model answers
  drawbar generate runs/chat --prompt '[{"role": "system", "content": "Be brief."}, {"role": "user", …}]'
""",
)
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Text to continue; may be repeated. For a chat model: a question, or a JSON list of messages.",
)
@click.option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False),
    help='A .txt file with a prompt per line, or .jsonl with {"prompt": …} or {"text": …} per line; for a chat model, '
    "also messages as in training.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="A .jsonl file for prompts and texts, instead of printing them.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output file.")
@checkpoint_option
@sampling_options
@click.option("--beams", type=click.IntRange(min=1), default=1, show_default=True, help="1 disables beam search.")
@click.option("--raw", is_flag=True, help="Continue the text verbatim, without a chat template or Alpaca prompt.")
@click.pass_obj
def generate(
    task: "type[Task] | None",
    run: str,
    prompts: tuple[str, ...],
    input_file: str | None,
    output: str | None,
    overwrite: bool,
    checkpoint: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    beams: int,
    raw: bool,
    seed: int,
) -> int:
    """Continue each prompt with the model of RUN (by default, generate from the beginning of a document).

    A chat model (trained on messages) answers the prompt as a user message. A model trained on Alpaca records follows
    the prompt as an instruction.
    """
    from drawbar.cli.arguments import load_run
    from drawbar.cli.prompts import as_instruction, as_messages, read_prompts
    from drawbar.errors import UserError
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.output_files import TEXTS, check_output, write_lines
        from drawbar.commands.trained_run import TrainedRun
        from drawbar.runtime.seed import seed_everything
        from drawbar.tasks.messages import reads_alpaca

    loaded = load_run(run, ("launch.nproc=1",), task)
    path = None if output is None else check_output(output, overwrite, TEXTS)
    trained = TrainedRun(loaded.config, task, checkpoint)
    is_chat = not raw and getattr(trained.task, "reads_chats", False)
    messages_column = (getattr(loaded.config.task, "messages_column", None) or "messages") if is_chat else None
    rename = loaded.config.data.rename or {}
    is_alpaca = not raw and reads_alpaca(loaded.config.task)
    ask = as_messages if is_chat else as_instruction if is_alpaca else None
    all_prompts = [*prompts, *(read_prompts(input_file, messages_column, rename, is_alpaca) if input_file else [])]
    if not all_prompts and ask is not None:
        raise UserError(
            "this run's model answers prompts, but there is no prompt",
            where="--prompt",
            remedy='ask it something, as in --prompt "Who are you?", or give --raw',
        )
    all_prompts = all_prompts or [""]  # the beginning of a document
    asked = all_prompts if ask is None else [ask(prompt) for prompt in all_prompts]
    seed_everything(seed)
    texts = trained.generate(
        asked, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, beams=beams
    )
    if path is None:
        _print_texts(all_prompts, texts, are_answers=ask is not None)
    else:
        write_lines(path, ({"prompt": prompt, "text": text} for prompt, text in zip(all_prompts, texts, strict=True)))
    return 0


def _print_texts(prompts: "list[Prompt]", texts: list[str], are_answers: bool) -> None:
    as_shown = visible if sys.stdout.isatty() else str
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            click.echo("-" * 40)
        asked = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        click.echo(click.style(as_shown(asked), bold=True) + ("\n" if are_answers else "") + as_shown(text))
