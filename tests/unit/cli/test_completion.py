"""Shell completion: what is offered, that it is light, and that real shells complete after one command."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from drawbar.cli.completion import completion_files
from drawbar.util.run_dir import LOCK_FILE
from exhaustive import some
from harness import run_cli
from programs import need_programs

PRINT_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("MODULES", *sys.modules))
runpy.run_module("drawbar", run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and two runs."""
    (tmp_path / "config.yaml").touch()
    for name, steps in (("roads", (20, 100)), ("slower", ())):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        (run / LOCK_FILE).touch()
        for step in steps:
            (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "runs" / ".cache").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*words: str) -> tuple[list[str], set[str]]:
    """What bash is told to offer for the last word, and the modules that were imported."""
    variables = {"COMP_WORDS": "\n".join(("drawbar", *words)), "COMP_CWORD": str(len(words))}
    environment = {**os.environ, **variables, "_DRAWBAR_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", PRINT_MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES ")
    return text.splitlines(), set(modules.split())


def offered(*words: str) -> list[str]:
    return [line.removeprefix("plain,") for line in ask(*words)[0]]


def test_commands_and_options(folder: Path) -> None:
    assert offered("pre") == ["prepare", "predict"]  # in the order of --help
    assert "--fork" in offered("train", "--")
    assert offered("init", "x", "--template", "cl") == ["classification"]


@pytest.mark.exhaustive
def test_settings_and_their_values(folder: Path) -> None:
    assert offered("train", "") == ["config.yaml", "runs/"]
    assert {"optim.lr=", "optim.name="} <= set(offered("train", "config.yaml", "optim."))
    assert offered("train", "config.yaml", "task.label_c") == ["task.label_column="]  # of a task that is not causal_lm
    assert offered("train", "config.yaml", "parallel.strategy=d") == [
        *(f"parallel.strategy={name}" for name in ("dp", "ddp", "deepspeed"))
    ]
    # as bash splits the line
    assert offered("train", "config.yaml", "parallel.strategy", "=", "fs") == ["fsdp"]
    assert offered("train", "config.yaml", "parallel.compile", "=") == ["true", "false"]
    assert offered("config", "explain", "lora.m") == ["lora.modules"]


def test_runs_and_their_checkpoints(folder: Path) -> None:
    assert offered("eval", "") == ["runs/roads", "runs/slower"]
    assert offered("logs", "runs/s") == ["runs/slower"]
    assert offered("eval", "runs/roads", "--checkpoint", "") == ["best", "latest", "20", "100"]


def test_files_where_there_is_nothing_to_say(folder: Path) -> None:
    assert ask("predict", "runs/roads", "--input", "da")[0] == ["file,da"]
    assert ask("train", "config.yaml", "data.train", "=", "da")[0] == ["file,da"]


def test_it_is_light(folder: Path) -> None:
    assert not {"torch", "transformers", "numpy"} & ask("train", "config.yaml", "optim.")[1]
    assert not {"torch", "pydantic"} & ask("eval", "")[1]


class Terminal:
    """A shell of a user who has installed the completion."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process, self._end = pty.fork()
        if self._process == 0:
            os.execvpe(command[0], command, environment)
        termios.tcsetwinsize(self._end, (24, 250))  # no line is broken
        self.text = ""

    def until(self, pattern: str) -> None:
        """Read until the pattern is on the screen."""
        end = time.monotonic() + 30
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text!r}"
            if select.select([self._end], [], [], 0.2)[0]:
                shown = os.read(self._end, 4096).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x00-\x08]", "", shown)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def close(self) -> None:
        os.close(self._end)  # a hangup, by which a shell ends
        os.waitpid(self._process, 0)


SHELLS = {
    "bash": ["bash", "--noprofile", "-i"],
    "zsh": ["zsh", "-d", "-i"],  # -d: without the machine's own settings
    "fish": ["fish", "-i"],
}


@pytest.mark.parametrize("shell", some(SHELLS, 1))
def test_a_shell_completes_after_one_command(shell: str, folder: Path) -> None:
    if shell != "bash":  # drawbar's own jobs need that
        need_programs(shell)
    home = folder / "home"
    home.mkdir()
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    program = bin_folder / "drawbar"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m drawbar "$@"\n')
    program.chmod(0o755)
    own = {"HOME": str(home), "SHELL": shutil.which(shell) or "", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    environment = {**os.environ, **own, "TERM": "dumb", "PS1": "ready> "}
    for name in ("ZDOTDIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)
    for _ in range(2):  # the second time changes nothing
        subprocess.run([program, "completion", "--install"], env=environment, check=True, capture_output=True)
    _, start_file = completion_files(shell, {"HOME": str(home)})
    if start_file is not None:
        assert (home / start_file.name).read_text().count("added by") == 1

    terminal = Terminal(SHELLS[shell], environment)
    try:
        time.sleep(1)
        terminal.type("drawbar eva\t")
        terminal.until("drawbar eval ")
        terminal.type("runs/ro\t")
        terminal.until("runs/roads ")
        terminal.type("parallel.strat\t")
        terminal.until("parallel.strategy=")
        terminal.type("fsd\t")
        terminal.until(r"parallel\.strategy=fsdp")
    finally:
        terminal.close()


def test_what_is_said_is_no_output_for_a_shell_to_run(folder: Path) -> None:
    done = run_cli("completion", "bash", "--install", cwd=folder, env={"HOME": str(folder / "home")})
    assert done.out == ""
    assert f"wrote {folder / 'home'}" in done.err


def test_a_shell_that_is_not_known(folder: Path) -> None:
    done = run_cli("completion", cwd=folder, env={"SHELL": "/bin/tcsh"})
    assert done.code == 2
    assert "drawbar completion bash, zsh or fish" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_that_may_not_be_written(folder: Path) -> None:
    (folder / "home").mkdir(mode=0o555)
    done = run_cli("completion", "bash", "--install", cwd=folder, env={"HOME": str(folder / "home")})
    assert done.code == 2
    assert "drawbar completion bash > FILE" in done.err


@pytest.mark.parametrize("arguments", [("bash",), ("zsh",), ("fish",)])
def test_the_script_is_printed_and_nothing_is_written(folder: Path, arguments: tuple[str, ...]) -> None:
    home = folder / "home"
    home.mkdir()
    (home / ".bashrc").write_text("mine\n")
    done = run_cli("completion", *arguments, cwd=folder, env={"HOME": str(home)})
    assert (done.code, done.err) == (0, "")
    assert {"bash": "complete -o", "zsh": "compdef", "fish": "complete --"}[arguments[0]] in done.out
    assert [path.name for path in home.rglob("*")] == [".bashrc"]
    assert (home / ".bashrc").read_text() == "mine\n"
