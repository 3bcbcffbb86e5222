"""The command line. Commands import their dependencies when they run, so that ``--help`` is fast."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn

import click

from drawbar.cli.arguments import explain_option
from drawbar.cli.chat import chat
from drawbar.cli.checkpoint import checkpoint
from drawbar.cli.completion import completion
from drawbar.cli.config import config
from drawbar.cli.evaluate import evaluate
from drawbar.cli.export import export
from drawbar.cli.generate import generate
from drawbar.cli.init import init
from drawbar.cli.predict import predict
from drawbar.cli.prepare import prepare
from drawbar.cli.runs import runs
from drawbar.cli.train import train
from drawbar.cli.watch import watch
from drawbar.errors import ExitCode, UserError, visible
from drawbar.util.registry import load_points

if TYPE_CHECKING:
    from drawbar.tasks.task import Task

_FIRST_RANK_SECONDS = 4.0
"""Seconds that other ranks wait before they print an error; DeepSpeed's launcher ends them earlier if rank 0 failed."""


CORE = (init, prepare, train, evaluate, predict, generate, chat, export, runs, watch, checkpoint, config, completion)
"""The commands that are always available. Entry points register the others, including those of other packages."""
COMMANDS_GROUP = "drawbar.commands"


@cache
def _commands() -> dict[str, click.Command]:
    """Every command by name, in the order of the help. Imported lazily, as the module of a command may itself import
    this module."""
    found = dict(load_points(COMMANDS_GROUP, "command")) | {str(command.name): command for command in CORE}
    known = [name for names in Commands.SECTIONS.values() for name in names]
    return {name: found[name] for name in (*known, *sorted(found.keys() - set(known))) if name in found}


class Commands(click.Group):
    """The commands, grouped by purpose. Other programs' command names get a hint."""

    SECTIONS = {
        "Train": ("init", "import", "prepare", "plan", "train"),
        "Use what was trained": ("eval", "predict", "generate", "chat", "export"),
        "Look at runs": ("runs", "watch", "report", "logs", "checkpoint"),
        "Jobs on clusters and hosts": ("submit", "jobs", "status", "cancel", "resume"),
        "Check and compare": ("doctor", "parity", "convert"),
        "Settings and the shell": ("config", "completion"),
    }
    """The order of commands in the help. Commands from other packages follow."""
    ELSEWHERE = {
        "generate": ("infer", "inference", "sample", "complete"),
        "train": ("sft", "finetune", "fit", "launch", "run", "pretrain", "lora"),
        "eval": ("evaluate", "test", "validate", "score"),
        "export": ("merge", "merge-lora", "save"),
        "prepare": ("preprocess", "tokenize"),
        "doctor": ("env", "check", "info"),
        "init": ("new", "create"),
    }
    """Command names of other trainers, by drawbar's name."""

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        return _commands()

    @commands.setter
    def commands(self, none_yet: MutableMapping[str, click.Command]) -> None:
        """Ignore click's own assignment, which is empty."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [command for commands in self._sections().values() for command in commands]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in self._sections().items():
            with formatter.section(title):
                # one width for all sections
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit=100)) for name in names]
                formatter.write_dl(rows)

    def _sections(self) -> dict[str, list[str]]:
        """The names of the available commands, by section."""
        found = {title: [name for name in names if name in self.commands] for title, names in self.SECTIONS.items()}
        known = {name for names in self.SECTIONS.values() for name in names}
        found["From other packages"] = sorted(self.commands.keys() - known)
        return {title: names for title, names in found.items() if names}

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        meant = next((name for name, others in self.ELSEWHERE.items() if args[0] in others), None)
        if meant is not None:
            context.fail(f"No such command '{args[0]}'; it is called `drawbar {meant}` here.")
        return super().resolve_command(context, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  drawbar init my-project                            a small project, ready to train
  drawbar import axolotl.yaml --out config.yaml      another trainer's configuration as drawbar's
  drawbar prepare config.yaml                        encode the data, and show the sample lengths
  drawbar train config.yaml                          train, or resume an interrupted run
  drawbar train config.yaml launch.nproc=2           the same run on two processes
  drawbar plan config.yaml --gpus 8 --gpu h100       will it fit, and how long will it take?
  drawbar submit config.yaml --to slurm --nodes 2    the same run on two nodes of a cluster
  drawbar submit config.yaml --hosts gpu1:8,gpu2:8   the same run on two machines, over ssh
  drawbar jobs                                       your jobs, and the progress of their runs
  drawbar logs runs/demo -f                          follow the log of a job
  drawbar watch runs/demo                            follow a run that trains elsewhere
  drawbar runs                                       your runs: states, steps and best scores
  drawbar report runs/demo                           a page with curves, scores and events
  drawbar eval runs/demo --checkpoint best           scores of the best checkpoint
  drawbar predict runs/demo --input new.tsv --output out.jsonl
  drawbar generate runs/demo --prompt "def main("    text from the model
  drawbar chat runs/demo                             talk to the model
  drawbar export runs/demo --to demo-model           a folder for transformers' from_pretrained
  drawbar convert runs/demo --to dcp --output dcp    a checkpoint for other programs
  drawbar checkpoint list runs/demo                  steps, sizes, and the best checkpoint
  drawbar parity config.yaml                         compare every strategy with one process
  drawbar doctor config.yaml                         check this machine, and report problems
  drawbar config explain optim.lr config.yaml        a setting: its value, origin and meaning
  drawbar completion --install                       install shell completion
""",
)
@click.version_option(package_name="drawbar", message="%(prog)s %(version)s")
@click.option("--local_rank", "--local-rank", hidden=True, help="DeepSpeed's launcher passes it besides LOCAL_RANK.")
def group(local_rank: str | None) -> None:
    """Train language models on one machine or many, and prove that it is the same run."""
    if local_rank is not None and local_rank != os.environ.get("LOCAL_RANK"):
        raise UserError(
            f"--local_rank is {local_rank}, but LOCAL_RANK is {os.environ.get('LOCAL_RANK', 'not set')}",
            where="the command line",
            remedy="leave --local_rank out: drawbar reads LOCAL_RANK, which every launcher sets",
        )


def main(task: "type[Task]") -> None:
    """Run the command line with a user's task, from their script (``python my_task.py train c.yaml optim.lr=1e-4``)."""
    run(task)


def run(task: "type[Task] | None" = None) -> None:
    """Run the command line and exit the process with its exit code."""
    try:
        code = _invoke(task)
        _end_quietly_on_interrupt()
        if _is_one_of_several():
            _leave_rank(code)
        _flush()
    except BrokenPipeError:  # the reader of the output is gone, as with `| head`: exit without a message
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # for output that is still to be flushed
        code = ExitCode.FAILED
    sys.exit(code)


def _end_quietly_on_interrupt() -> None:
    """From here on, let Ctrl-C end the process at once: nothing is left to save, and a KeyboardInterrupt in the exit
    handlers of the interpreter and libraries would only print tracebacks."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup's
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_one_of_several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"  # compared as text: int() would raise while errors are reported


def _leave_rank(code: int) -> NoReturn:
    """Exit a rank without shutting down the interpreter. During a shutdown, threads of a process group could abort the
    process (pytorch/pytorch#190489) or wait forever for ranks that have exited."""
    from drawbar.launch.failures import report_status

    report_status(code)
    if code == ExitCode.DONE:
        atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the shell has closed it: `>&-`
            stream.flush()


def _invoke(task: "type[Task] | None") -> int:
    from drawbar.distributed import pulse
    from drawbar.distributed.interrupt import exit_now, handle

    pulse.begin()
    if threading.current_thread() is threading.main_thread():
        handle(signal.default_int_handler, signal.SIGINT, deaf=partial(exit_now, trains=False))
    try:
        return _run_command(task)
    except (KeyboardInterrupt, click.Abort) as error:  # also while an error is reported
        _report_error(error.__cause__ or error, "interrupted")  # click's Abort is raised from a KeyboardInterrupt
        return ExitCode.INTERRUPTED


def _run_command(task: "type[Task] | None") -> int:
    """Run the command and report its error; return the exit code."""
    try:
        return int(group.main(prog_name="drawbar", standalone_mode=False, obj=task) or ExitCode.DONE)
    except click.ClickException as error:
        _wait_for_first_local_rank()
        explain_option(error, sys.argv[1:], task).show()
        return ExitCode.WRONG_REQUEST
    except UserError as error:
        _report_error(error, f"error: {error}")
        return error.exit_code
    except click.Abort:
        raise
    except Exception as error:  # noqa: BLE001 - top level: the launcher must be notified
        _report_error(error, traceback.format_exc())
        return ExitCode.FAILED


def _report_error(error: BaseException, text: str) -> None:
    """Report an error to the launcher, which prints it once for all ranks, or else on stderr."""
    if _is_one_of_several():
        from drawbar.launch.failures import report_failure
        from drawbar.launch.warm_process import STATUS_VARIABLE

        if report_failure(error) and STATUS_VARIABLE in os.environ:
            return  # drawbar's launcher started this rank, and prints the error
        if isinstance(error, UserError) and error.origin:
            text = f"error: {error.origin}: {error}"
    if isinstance(error, UserError) and error.exit_code == ExitCode.WRONG_REQUEST:
        _wait_for_first_local_rank()
    click.echo(visible(text), err=True)


def _wait_for_first_local_rank() -> None:
    """Every local rank but 0 waits, so that an error common to all ranks is printed once: torchrun, for one, shows each
    rank's output and ends all ranks when one exits. A rank that outlives the wait has an error that rank 0 lacks."""
    if _is_one_of_several() and os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FIRST_RANK_SECONDS)
