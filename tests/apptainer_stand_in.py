"""A program that stands for Apptainer, which is no Debian package: it makes no container, but is as strict.

It reads ``apptainer exec`` as the real program does (options end at the image; binds are cut at commas and colons; what
is bound must exist), gives the command the environment that a container would have, and hands signals on to it as
Apptainer does where it has no terminal. An image is a JSON file of the variables that it sets. Each call is a line of
JSON in ``IMAGE.calls``: the options, the command, the variables.
"""

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

TAKE_A_VALUE = {"--bind": "--bind", "-B": "--bind", "--pwd": "--pwd", "--home": "--home", "-H": "--home"}
FLAGS = ("--nv",)
NOT_PASSED_ON = {"PATH", "LD_LIBRARY_PATH", "HOME"}
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def install(folder: Path, name: str = "apptainer") -> Path:
    """Put the program into ``folder``, which is for the front of PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -ES "{Path(__file__).absolute()}" "$@"\n')
    program.chmod(0o755)
    return folder


def make_image(path: Path) -> Path:
    """An image whose ``python3`` is this Python, by a name that exists nowhere else on PATH."""
    programs = path.parent / f"{path.name}.bin"
    programs.mkdir()
    # not a link: Python would look for its packages beside it
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python3").chmod(0o755)
    path.write_text(json.dumps({"PATH": f"{programs}:/usr/bin:/bin", "IMAGE": path.name}))
    return path


def calls(image: Path) -> list[dict[str, Any]]:
    """What was run in an image."""
    return [json.loads(line) for line in Path(f"{image}.calls").read_text().splitlines()]


def fail(message: str, code: int = 255) -> NoReturn:
    print(f"FATAL:   {message}", file=sys.stderr)
    sys.exit(code)


def parse(arguments: list[str]) -> tuple[dict[str, list[str]], Path, list[str]]:
    """Options, image and command."""
    if arguments[:1] != ["exec"]:
        fail(f"unknown command {arguments[:1]}", 1)
    rest = arguments[1:]
    options: dict[str, list[str]] = {}
    while rest and rest[0].startswith("-"):
        word, equals, value = rest.pop(0).partition("=")
        if word in FLAGS and not equals:
            options[word] = []
        elif word in TAKE_A_VALUE:
            options.setdefault(TAKE_A_VALUE[word], []).append(value if equals else rest.pop(0))
        else:
            fail(f"unknown flag: {word}", 1)
    if len(rest) < 2:
        fail("requires at least 2 arg(s)", 1)
    return options, Path(rest[0]), rest[1:]


def check(options: dict[str, list[str]], image: Path) -> list[str]:
    """Refuse what Apptainer would; the folders that are seen inside."""
    if not image.is_file():
        fail(f"could not open image {image}: no such file or directory")
    seen = []
    for bind in options.get("--bind", []):
        # cut as Apptainer does, which trims every piece
        pieces = [piece.strip().rstrip(":") for piece in re.findall(r"[^,^:]+:?", bind)]
        if len(pieces) not in (1, 2, 3) or "," in bind or (len(pieces) == 3 and pieces[2] not in ("ro", "rw")):
            fail(f"while parsing bind path: wrong bind syntax: {bind}")
        if not Path(pieces[0]).exists():
            fail(f"mount {pieces[0]}->{pieces[-1]} error: mount source {pieces[0]} doesn't exist")
        seen.append(pieces[min(1, len(pieces) - 1)])
    workdir = options["--pwd"][-1]
    if not any(Path(workdir).is_relative_to(folder) for folder in seen):
        fail(f"chdir {workdir}: no such file or directory")
    return seen


def environment(options: dict[str, list[str]], image: Path) -> dict[str, str]:
    """What the command gets: the variables outside, less those that a container has of its own."""
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_PASSED_ON
        and not re.match("(APPTAINER|SINGULARITY)", name)
        and re.fullmatch(r"[A-Za-z_]\w*", name)
    }
    home = options.get("--home", [os.environ["HOME"]])[-1].rpartition(":")[2]
    own = {"HOME": home, "APPTAINER_CONTAINER": str(image), "APPTAINER_NAME": image.name}
    return {**json.loads(image.read_text()), **outside, **own}


def main(arguments: list[str]) -> NoReturn:
    options, image, command = parse(arguments)
    seen = check(options, image)
    environ = environment(options, image)
    call = {"options": options, "seen": seen, "command": command, "environ": environ}
    with Path(f"{image}.calls").open("a") as record:
        record.write(json.dumps(call) + "\n")
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.chdir(options["--pwd"][-1])
        try:
            os.execvpe(command[0], command, environ)
        except OSError as error:
            fail(f"exec {command[0]} failed: {error}")
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
