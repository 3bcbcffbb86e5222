"""Runs beside the launcher of a node: imports what ranks need, and forks them.

    python -u -P -m drawbar.launch.warm_ranks DESCRIPTOR [ARGUMENT]...

DESCRIPTOR is a connection to the launcher, which sends the names of modules; then, for each rank, the arguments of
``drawbar``, the environment of the rank, and the variables that the launcher has changed since it started this process.
The answer is the process id of the rank. If there is none, because this process has ended, no rank was forked.
See :mod:`drawbar.launch.warm_process`.
"""

import os
import runpy
import signal
import sys
import time
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from drawbar.util.torch_imports import hidden, quick_imports


def main(descriptor: int) -> None:
    channel = Connection(descriptor)
    try:
        with quick_imports(), hidden("torchao"):
            for name in channel.recv():
                import_module(name)
    except Exception:  # noqa: BLE001 - a rank will meet the same error, and report it
        return
    if not _is_as_new(descriptor):
        return
    arguments = _fork_ranks(channel)
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module("drawbar", run_name="__main__", alter_sys=True)


def _is_as_new(descriptor: int) -> bool:
    """Whether a fork of this process is as good as a new process: no other thread may run, as it may hold a lock that
    nothing would release in the fork; and no library may hold anything open, above all a GPU.

    Threads that end at a fork and start again when needed do not count, such as those of OpenBLAS in numpy.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        return False  # nobody can wait for a child
    rehearsal = os.fork()  # ends the threads that end at any fork
    if not rehearsal:
        os._exit(_lost_cuda())
    _, lost_cuda = os.waitpid(rehearsal, 0)
    alone = len(list(Path("/proc/self/task").iterdir())) == 1
    opened = {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}
    return not lost_cuda and alone and opened <= {"0", "1", "2", str(descriptor)}


def _lost_cuda() -> bool:
    """Whether this fork cannot use CUDA, because the process that forked it has asked CUDA for devices."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _fork_ranks(channel: Connection) -> list[str] | None:
    """Fork a rank for each request. Returns its arguments in the new rank; None in this process, which then ends."""
    launcher = os.getppid()
    while True:
        try:
            arguments, environment, changed = channel.recv()
        except EOFError:
            return None
        if any(os.environ.get(name) != value for name, value in changed.items()):
            return None  # what is imported here may have read another value
        if _fork(channel, launcher):
            channel.close()
            os.environ.update(environment)
            return arguments


def _fork(channel: Connection, launcher: int) -> bool:
    """Fork a rank and send its process id. The launcher becomes its parent, as it adopts orphans. True in the rank."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()  # before the launcher knows this process: it sends signals to its session
        os.write(writer, str(os.getpid()).encode())
        os.close(reader)
        os.close(writer)
        while os.getppid() == between:
            time.sleep(0.001)
        if os.getppid() != launcher:
            os._exit(1)  # the launcher is gone, or could not adopt this process
        return True
    os.close(writer)
    os.waitpid(between, 0)  # from here on the launcher is the rank's parent
    channel.send(int(os.read(reader, 32)))
    os.close(reader)
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
