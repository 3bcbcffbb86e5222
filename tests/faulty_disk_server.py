"""Forks the commands of :class:`faulty_disk.FaultyDisk`, which starts it with the library preloaded.

``python faulty_disk_server.py NAME`` imports everything, then answers one request a connection, several at a time, on
the abstract socket NAME: JSON in, the exit code out.
"""

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import preloaded  # noqa: F401 - first: what the commands need, torch as drawbar imports it

# isort: split
import torch.distributed as dist

import harness


def main(name: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(64)
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # closed: whoever has started this process is gone
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
            os._exit(0)
        connection.close()


def answer(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    ranks = request["ranks"]
    pipes = [os.pipe() for _ in range(ranks)]
    children = [start(request, rank, pipes[rank][0] if ranks > 1 else None) for rank in range(ranks)]
    if ranks > 1:  # only now: its threads must not be there when the ranks are forked
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _, sender in pipes:
            os.write(sender, str(store.port).encode())
    code = wait_for(children, request["timeout"], request["together"])
    connection.sendall(f"{code}\n".encode())


def start(request: dict[str, Any], rank: int, port: int | None) -> int:
    """Fork ``drawbar ARGUMENTS``.

    Args:
        port: descriptor that tells at which port the ranks meet; None for one process, which has no rank.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    place = {} if port is None else harness._place(rank, request["ranks"], int(os.read(port, 16)))
    os.closerange(3, 256)
    output = os.path.join(request["output"], str(rank))
    os.mkdir(output)
    code: Any = 1
    try:
        harness.run_here(["-m", "drawbar", *request["arguments"]], request["cwd"], request["env"] | place, output)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(children: list[int], timeout: int, together: bool) -> int:
    """The exit code of the first child that failed, or 0. It ends the others, as a launcher does: by SIGTERM, or, where
    they are to die ``together``, at once."""
    running = set(children)

    def kill(*_: object) -> None:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(timeout)
    first = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and first == 0:
            first = code
            for other in running:
                os.kill(other, signal.SIGKILL if together else signal.SIGTERM)
    return first


if __name__ == "__main__":
    main(sys.argv[1])
