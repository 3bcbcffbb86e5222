"""Processes below this one: adopting, signalling and killing them (Linux)."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> bool:
    """Make this process a subreaper: descendants whose parent ends become its children, and can be found. Returns
    False if that fails."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop_adopting_orphans() -> None:
    """Stop being a subreaper; this process keeps its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent() -> None:
    """preexec_fn: kill the child when its parent dies (PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """The process ids of all descendants of ``root`` that have not ended."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            pid = int(path.parent.name)
            state, parent = state_and_parent(pid)
            if state != "Z":
                children.setdefault(parent, []).append(pid)
    found, level = [], [root]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """The letter of a process's state, and its parent. Raises OSError if there is no such process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    state, parent = text.rpartition(")")[2].split()[:2]  # its name, in parentheses before, may hold anything
    return state, int(parent)


def end_tree() -> list[int]:
    """Kill all descendants of this process, trying for five seconds. Returns those that remain."""
    end = time.monotonic() + 5
    while True:
        left = descendants(os.getpid())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)  # one that was just killed may have been starting a child


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, which handles it before anything else, even after a stop. To the
    process itself where the C library has no ``tgkill`` (new in glibc 2.30)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).tgkill(pid, pid, number)
        return
    os.kill(pid, number)


def _prctl(option: int, value: int) -> bool:
    """Call ``prctl``, which only Linux has. Returns whether that worked."""
    with contextlib.suppress(AttributeError):
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False
