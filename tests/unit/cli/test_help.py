"""Acceptance: every ``--help`` answers in under 0.4 s of CPU time, without torch; its examples parse."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import click
import pytest

import drawbar
from drawbar.cli import Commands, group
from drawbar.config.io.load_config import load_config

CPU_SECONDS = 0.4
EXAMPLES = re.compile(r"^ *Examples:\n((?: +\S.*\n)+)", re.MULTILINE)
PRINT_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("MODULES", *sys.modules))
sys.argv[0] = "drawbar"
runpy.run_module("drawbar", run_name="__main__")
"""


def walk(command: click.Command, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command by its words: () is ``drawbar`` itself."""
    found = {path: command}
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            found |= walk(part, (*path, name))
    return found


COMMANDS = walk(group)
HELPS = [[*path, "--help"] for path in COMMANDS]


@cache
def answer(*arguments: str) -> tuple[str, set[str]]:
    """What a real process prints, and the modules that it imported."""
    command = [sys.executable, "-c", PRINT_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES ")
    return text, set(modules.split())


def examples(path: tuple[str, ...]) -> list[list[str]]:
    """The arguments of each example, after the word ``drawbar``."""
    found = EXAMPLES.search(answer(*path, "--help")[0])
    assert found is not None, f"no examples in drawbar {' '.join(path)} --help"
    lines = [re.split(r" {3,}", line.strip())[0] for line in found.group(1).splitlines()]  # the rest is a remark
    commands = [
        re.split(r" > ", line)[0].removeprefix("torchrun --standalone --nproc_per_node=2 -m ") for line in lines
    ]
    assert all(command.startswith("drawbar ") for command in commands), commands
    return [shlex.split(command)[1:] for command in commands]


def parse(arguments: list[str]) -> click.Context:
    """Parse as the command line does, and run nothing."""
    context = group.make_context("drawbar", list(arguments))
    rest = [*context._protected_args, *context.args]
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args]
    return context


def test_the_commands() -> None:
    names = {" ".join(path) for path in COMMANDS}
    assert {"", "prepare", "train", "eval", "predict", "generate", "export"} <= names
    assert {"config", "config show", "config schema", "config explain"} <= names


def cpu_seconds(command: list[str], folder: Path) -> float:
    """User and system time of a process, all its imports included."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("arguments", [["--version"], *HELPS], ids=" ".join)
def test_answers_at_once(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drawbar", *arguments]
    assert any(cpu_seconds(command, tmp_path) < CPU_SECONDS for _ in range(3))


def test_the_installed_script_is_the_same_program(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("drawbar")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == answer("--help")[0]
    assert any(cpu_seconds([str(script), "--help"], tmp_path) < CPU_SECONDS for _ in range(3))


@pytest.mark.parametrize("arguments", [["--version"], *HELPS], ids=" ".join)
def test_answers_without_torch(arguments: list[str]) -> None:
    text, modules = answer(*arguments)
    assert text.startswith("drawbar " if arguments == ["--version"] else "Usage: drawbar ")
    assert "drawbar.cli" in modules
    assert not {"torch", "transformers", "numpy", "pydantic"} & modules


def test_the_list_of_commands_cuts_no_description() -> None:
    first = next(iter(Commands.SECTIONS))
    *sections, _ = answer("--help")[0].partition(f"{first}:")[2].partition("Examples:")[0].split("\n\n")
    listed = [line for section in sections for line in section.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == list(group.commands)  # a line each, in 80 columns
    assert "..." not in "".join(listed)


def test_a_command_that_is_called_otherwise_elsewhere_is_named() -> None:
    for name, others in Commands.ELSEWHERE.items():
        assert name in group.commands
        assert not set(others) & group.commands.keys()
    done = subprocess.run([sys.executable, "-m", "drawbar", "infer", "runs/demo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such command 'infer'; it is called `drawbar generate` here." in done.stderr


def test_the_version_is_told_once() -> None:
    assert drawbar.__version__ == version("drawbar")
    assert answer("--version")[0] == f"drawbar {drawbar.__version__}\n"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("drawbar", *path)))
def test_teaches_by_examples_that_parse(path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.txt", "prompts.jsonl"):
        Path(name).touch()
    for arguments in examples(path):
        assert tuple(arguments[: len(path)]) == path
        context = parse(arguments)
        assert context.command in COMMANDS.values()
        words = [word for before, word in pairwise(["", *arguments]) if before != "--sweep"]  # that has several values
        overrides = [word for word in words if re.match(r"[a-z]+\.[a-z_.]+=", word)]
        load_config(None, overrides)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--frok", "x"],
        ["trian"],
        ["eval"],
        ["generate", "runs/a", "--beams=0"],
        ["predict", "runs/a", "--input", "a.txt"],
        ["export", "runs/a"],
    ],
)
def test_the_parser_of_these_tests_can_refuse(arguments: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse(arguments)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("drawbar", *path)))
def test_every_option_and_command_says_what_it_does(path: tuple[str, ...]) -> None:
    assert COMMANDS[path].get_short_help_str()
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
