"""``WarmProcess``: imports torch and transformers once for all ranks of a node, and forks the ranks.

These imports take most of the time to a first step. So the process does them while the launcher is still reading the
configuration, and each rank starts with them done. It forks only if a fork is as good as a new interpreter, which it
checks itself (:mod:`drawbar.launch.warm_ranks`). Otherwise, the launcher starts ranks as torch does.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Self

from drawbar.distributed.watchdog import LAUNCHER, NODE
from drawbar.launch.process_tree import adopt_orphans, die_with_parent, stop_adopting_orphans
from drawbar.threads import usable_cores
from drawbar.util.torch_imports import silence_ranks

STATUS_VARIABLE = "DRAWBAR_STATUS_FILE"
"""Environment variable: where a node's first rank leaves its exit code for the launcher."""
RANK_PROGRAM = ["-P", "-m", "drawbar"]
"""Beginning of the command of a rank that can be forked. One that runs a user's script is never forked, as the script
may do other things before its imports."""
_OF_LAUNCHERS = ("TORCHELASTIC_", STATUS_VARIABLE, NODE)
"""Prefixes of the environment variables that a launcher sets after the process has started; no import reads them."""
_POLL = 0.05


def become_launcher(nproc: int) -> None:
    """Tell the ranks that this process is their launcher, and how many threads each uses if the user sets no number:
    the ranks share the cores that this process may use."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    silence_ranks()
    os.environ[LAUNCHER] = str(os.getpid())


class WarmProcess:
    """Context manager: the process, which lives until it has forked its last rank or the context ends. Linux only.

    Args:
        modules: what it imports.
        nproc: how many ranks it will fork.
    """

    def __init__(self, modules: Sequence[str], nproc: int) -> None:
        self._environment = dict(os.environ)
        self._left = nproc
        self._channel, theirs = Pipe()
        command = [sys.executable, "-u", "-P", "-m", "drawbar.launch.warm_ranks", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, *sys.argv[1:]],  # not read, but shown by `ps` as the arguments of the forked ranks
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        theirs.close()
        self._channel.send(list(modules))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the warm process, but not the ranks, which are children of the launcher."""
        self._left = 0
        self._channel.close()
        self._process.kill()
        self._process.wait()
        stop_adopting_orphans()

    def fork(self, arguments: Sequence[str], environment: dict[str, str]) -> "ForkedRank | None":
        """Run ``python -u ARGUMENTS`` as a child of this process, in its own session, with this process's standard
        streams; None if a new interpreter is needed."""
        if not self._left or list(arguments[: len(RANK_PROGRAM)]) != RANK_PROGRAM or not adopt_orphans():
            return None
        try:
            self._channel.send((list(arguments[len(RANK_PROGRAM) :]), environment, self._changed_variables()))
            rank = ForkedRank(self._channel.recv())
        except (EOFError, OSError):  # for example, an import failed there, or a fork would differ from a new process
            self.close()
            return None
        self._left -= 1
        if not self._left:
            self.close()
        return rank

    def _changed_variables(self) -> dict[str, str | None]:
        """The variables that have changed since the warm process was started; the user's code may have set them."""
        names = {name for name in self._environment.keys() | os.environ.keys() if not name.startswith(_OF_LAUNCHERS)}
        return {name: os.environ.get(name) for name in names if os.environ.get(name) != self._environment.get(name)}


class ForkedRank:
    """A child that this process did not start itself, with the methods of ``Popen`` that torch's launcher uses.

    Raises:
        ChildProcessError: it is not a child of this process.
    """

    def __init__(self, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the rank; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped, but a signal handler raised: the code is lost; Popen says 0, too
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same as ``poll``, once the rank has ended. Raises ``subprocess.TimeoutExpired`` if that takes longer."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            time.sleep(_POLL)
        return code
