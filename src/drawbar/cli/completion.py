"""``drawbar completion``: print or install the shell completion of commands, settings and runs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from drawbar.errors import UserError

PROGRAM = "drawbar"
VARIABLE = "_DRAWBAR_COMPLETE"
"""The environment variable with which a shell requests completions: click then prints them, and runs no command."""


class _OrFiles(ShellComplete):
    """Offers files if drawbar has no completions of its own, as for ``--input`` and ``data.train=``."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return super().get_completions(args, incomplete) or [CompletionItem(incomplete, type="file")]


@add_completion_class
class BashCompletion(_OrFiles, BashComplete):
    """click's completion for bash, changed to add no space after an incomplete word such as ``optim.lr=`` or
    ``runs/``."""

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' line
    COMPREPLY=()
    for line in $(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1"); do
        case $line in
            file,*) compopt -o default ;;
            plain,*)
                COMPREPLY+=("${line#plain,}")
                case $line in *[=/]) compopt -o nospace ;; esac
                ;;
        esac
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class ZshCompletion(_OrFiles, ZshComplete):
    """click's completion for zsh with the same change. Its script also initializes zsh's completion system
    (``compinit``) if the user's settings have not."""

    source_template = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }

%(complete_func)s() {
    local -a response described plain open
    local type key description
    response=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) %(complete_var)s=zsh_complete $words[1])}")
    for type key description in ${response}; do
        if [[ $type == file ]]; then
            [[ ${words[CURRENT]} == [^-]*=* ]] && compset -P '*='
            _path_files -f
        elif [[ $key == *[=/] ]]; then
            open+=("${key//\\\\:/:}")
        elif [[ $description == _ ]]; then
            plain+=("$key")
        else
            described+=("$key:$description")
        fi
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
    (( $#open )) && compadd -U -S '' -V unsorted -a open
}
compdef %(complete_func)s %(prog_name)s
"""


@add_completion_class
class FishCompletion(_OrFiles, FishComplete):
    """click's completion for fish, with click's own script: fish itself adds no space after ``=`` and ``/``."""


_SHELLS = {"bash": BashCompletion, "zsh": ZshCompletion, "fish": FishCompletion}


@click.command(
    short_help="Let the shell complete commands, settings and runs.",
    epilog="""\b
Examples:
  drawbar completion --install               for the shell in $SHELL
  drawbar completion zsh --install
  drawbar completion bash                    only print the script
""",
)
@click.argument("shell", type=click.Choice(list(_SHELLS)), metavar="[bash|zsh|fish]", required=False)
@click.option("--install", is_flag=True, help="Install the script in your home directory, where your shell reads it.")
@click.pass_context
def completion(context: click.Context, shell: str | None, install: bool) -> None:
    """Print a completion script for your shell: TAB then completes commands, options, settings and their values, and
    runs.

    With --install, the script is written to your home directory; for bash and zsh, a line that reads it is added to
    ~/.bashrc or ~/.zshrc. For the current shell only: eval "$(drawbar completion bash)".
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise click.UsageError("name the shell: drawbar completion bash, zsh or fish")
    text = completion_script(shell, context.find_root().command)
    if not install:
        click.echo(text, nl=False)
        if sys.stdout.isatty():
            click.echo(f"# not installed; to install it: drawbar completion {shell} --install", err=True)
        return
    script, start_file = completion_files(shell, os.environ)
    try:
        _write(script, text)
        has_changed = start_file is not None and _add_line(start_file, script)
    except OSError as error:
        raise UserError(
            f"the completion cannot be installed: {error.strerror}",
            where=str(error.filename or script),
            remedy=f"write it to a file that your shell reads: drawbar completion {shell} > FILE",
        ) from error
    click.echo(f"wrote {script}" + (f", and a line that reads it to {start_file}" if has_changed else ""), err=True)
    click.echo(f"It works in every new {shell}.", err=True)


def completion_script(shell: str, command: click.Command) -> str:
    """The script with which a shell requests completions from ``command``, drawbar's own."""
    return _SHELLS[shell](command, {}, PROGRAM, VARIABLE).source()


def completion_files(shell: str, environment: Mapping[str, str]) -> tuple[Path, Path | None]:
    """The path of a shell's completion script, and the startup file that must read it; None in place of the latter if
    the shell finds the script by itself."""
    home = Path.home()
    if shell == "fish":
        folder = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
        return folder / "fish" / "completions" / f"{PROGRAM}.fish", None
    folder = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share") / PROGRAM
    start_file = home / ".bashrc" if shell == "bash" else Path(environment.get("ZDOTDIR") or home) / ".zshrc"
    return folder / f"completion.{shell}", start_file


def _write(script: Path, text: str) -> None:
    from drawbar.util.atomic_files import write_durably

    script.parent.mkdir(parents=True, exist_ok=True)
    write_durably(script, text)


def _add_line(start_file: Path, script: Path) -> bool:
    """Make a shell's startup file read the script; False if it already does."""
    import shlex

    path = shlex.quote(str(script))
    line = f"[ ! -f {path} ] || . {path}  # added by `drawbar completion`"
    text = start_file.read_text("utf-8", "surrogateescape") if start_file.exists() else ""
    if line in text.splitlines():
        return False
    with start_file.open("a", encoding="utf-8") as file:  # in place: it is often a link into a folder under git
        file.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
    return True
