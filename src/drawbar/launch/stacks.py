"""Reads the stacks that ``faulthandler`` has written for a rank."""

import os
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

_MAIN = re.compile(r"^main thread: (0x[0-9a-f]+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Frame(NamedTuple):
    """A function call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}"

    @property
    def may_wait(self) -> bool:
        """Whether it is code of drawbar or torch, which may be waiting for another rank."""
        return self.file.startswith((_OWN, _TORCH))

    @property
    def is_users(self) -> bool:
        """Whether it is neither drawbar's nor an installed library's."""
        return not self.file.startswith((_OWN, *_INSTALLED, "<"))


def thread_stacks(text: str) -> list[list[Frame]]:
    """The stack of each thread in the last dump of a file, innermost call first. The main thread comes first; the list
    is empty if that is not there."""
    _, *parts = _THREAD.split(text)
    found = dict(zip(parts[::2], parts[1::2], strict=True))  # of each thread, the last one
    named = _MAIN.search(text)
    main = found.pop(named[1], None) if named is not None else None
    return [] if main is None else [_frames(calls) for calls in (main, *found.values())]


def _frames(calls: str) -> list[Frame]:
    return [Frame(file, int(line), name) for file, line, name in _FRAME.findall(calls)]


def place(stacks: list[list[Frame]]) -> Frame | None:
    """The line to look at: the innermost of the user's own code, of the main thread if it has one; or else the
    innermost of the main thread."""
    frames = [frame for stack in stacks for frame in stack]
    return next((frame for frame in frames if frame.is_users), frames[0] if frames else None)
