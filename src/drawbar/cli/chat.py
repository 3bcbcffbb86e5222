"""``drawbar chat``."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.arguments import checkpoint_option
from drawbar.cli.complete_words import complete_run
from drawbar.cli.generate import sampling_options
from drawbar.errors import UserError, visible

if TYPE_CHECKING:
    from drawbar.commands.trained_run import TrainedRun
    from drawbar.tasks.task import Task

NEW, END = "/new", "/exit"


@click.command(
    short_help="Talk to a run's model.",
    epilog="""\b
Examples:
  drawbar chat runs/chat
  drawbar chat runs/chat --system "Be brief." --temperature 0
  drawbar chat runs/chat --checkpoint latest

\b
/new begins another chat; /exit or Ctrl-D ends the command, and Ctrl-C the answer that is being written.
""",
)
@click.argument("run", shell_complete=complete_run)
@click.option("--system", metavar="TEXT", help="The system message that each chat begins with.")
@checkpoint_option
@sampling_options
@click.pass_obj
def chat(
    task: "type[Task] | None", run: str, system: str | None, checkpoint: str | None, seed: int, **sampling: Any
) -> int:
    """Talk to the model of RUN, line by line; answers appear as they are written.

    A chat model (trained on messages) knows what was said before. Any other model continues each line by itself, as a
    prompt.
    """
    from drawbar.cli.arguments import load_run
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.trained_run import TrainedRun
        from drawbar.runtime.seed import seed_everything
        from drawbar.tasks.causal_lm import DecoderTask

    loaded = load_run(run, ("launch.nproc=1",), task)
    trained = TrainedRun(loaded.config, task, checkpoint)
    keeps_messages = getattr(trained.task, "reads_chats", False)
    if system is not None and not keeps_messages:
        raise UserError(
            "this run has learned no chats, so there is no system message",
            where="--system",
            remedy="leave it out: each line is a prompt of its own",
        )
    seed_everything(seed)
    if keeps_messages:
        _talk(trained, [{"role": "system", "content": system}] if system is not None else [], sampling)
    else:
        click.echo("this run has learned no chats: each line is a prompt of its own", err=True)
        for line in _lines():
            _answer(trained, trained.task.question(line) if isinstance(trained.task, DecoderTask) else line, sampling)
    return 0


def _talk(trained: "TrainedRun", begin: list[dict[str, str]], sampling: dict[str, Any]) -> None:
    messages = list(begin)
    for line in _lines():
        if line == NEW:
            messages = list(begin)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        answer = _answer(trained, asked, sampling)
        if answer is not None:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """What the user writes, without empty lines, until the end."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - lets ``input`` edit lines and remember them
    while True:
        try:
            line = (input("> ") if is_terminal else input()).strip()
        except EOFError:
            if is_terminal:
                click.echo()
            return
        if line == END:
            return
        if line:
            yield line


def _answer(trained: "TrainedRun", prompt: Any, sampling: dict[str, Any]) -> str | None:
    """Print the answer while it is written. Returns None without one: it was interrupted, or the chat is too long."""
    as_shown = visible if sys.stdout.isatty() else str

    def write(text: str) -> None:
        click.echo(as_shown(text), nl=False)

    try:
        (answer,) = trained.generate(prompt, write, **sampling)
    except KeyboardInterrupt:
        click.echo()
        return None
    except UserError as error:
        if not sys.stdin.isatty():
            raise
        click.echo(f"{error.what} ({NEW} begins another chat)", err=True)
        return None
    click.echo()
    return answer
