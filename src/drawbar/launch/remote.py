"""Runs on each host of a launch over ssh: starts the host's part of the run, and ends it with the connection.

    python -P -m drawbar.launch.remote

Reads lines of :mod:`drawbar.launch.protocol` from its standard input: the order, where to meet, signals to pass on. Its
end, or a long silence, means that the launcher is gone.
"""

import contextlib
import ipaddress
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from drawbar.errors import ExitCode
from drawbar.launch.head import choose_address, choose_port
from drawbar.launch.network import address_towards
from drawbar.launch.node import describe, find_way
from drawbar.launch.process_tree import adopt_orphans, die_with_parent, end_tree
from drawbar.launch.protocol import Order, answer, read_order
from drawbar.launch.rendezvous import Rendezvous

GRACE = 5.0
"""Seconds that the command has to end by itself before it is killed."""
LOST = 255
"""The exit code where the worker was killed; that of ssh itself where a connection was lost."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class _Ended(Exception):
    """There is nothing more to do here."""

    def __init__(self, code: int = ExitCode.FAILED) -> None:
        super().__init__()
        self.code = code


class LauncherChannel:
    """The lines from the launcher; they end with the process ``keeper``, too."""

    def __init__(self, keeper: int, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._keeper = keeper
        self._rest = b""
        self._waiting: list[dict[str, Any]] = []
        self._heard = time.monotonic()
        self.closed = False

    def put(self, **words: Any) -> None:
        """As if the launcher had said it."""
        self._waiting.append(words)

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """What came; waits at most so many seconds for something."""
        if not self.closed and select.select([self._descriptor], [], [], seconds)[0]:
            text = os.read(self._descriptor, 2**16)
            self._heard, self.closed = time.monotonic(), not text
            *lines, self._rest = (self._rest + text).split(b"\n")
            self._waiting += [json.loads(line) for line in lines]
        self.closed |= os.getppid() != self._keeper  # nobody would find what this process leaves
        found, self._waiting = self._waiting, []
        return found

    def silence(self) -> float:
        """Seconds since the last word."""
        return time.monotonic() - self._heard

    def wait_for(self, word: str, patience: float) -> Any:
        """What the launcher says under ``word``. Raises _Ended where it is gone, or wants an end."""
        while not self.closed and self.silence() < patience:
            messages = self.messages(0.5)
            for number, message in enumerate(messages, start=1):
                if word in message:
                    self._waiting = messages[number:] + self._waiting
                    return message[word]
                if "end" in message or "signal" in message:
                    raise _Ended
        raise _Ended


def main() -> int:
    """Two processes, of which either ends everything when the other is killed: one works, and its parent waits."""
    adopt_orphans()
    keeper = os.getpid()
    worker = os.fork()
    if not worker:
        adopt_orphans()
        return work(keeper)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are for the worker
    _, status = os.waitpid(worker, 0)
    end_tree()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else LOST


def work(keeper: int) -> int:
    """Do what the launcher orders. ``keeper`` is the parent, and its end means an end."""
    wire = LauncherChannel(keeper=keeper)

    def pass_on(number: int, frame: FrameType | None) -> None:
        wire.put(signal=number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    try:
        order = read_order(wire.wait_for("order", Order.patience))
        _write(1, answer(hello={"address": _own_connection()[1]}))
        _enter(order)
        endpoint = _meet(order, wire)
        return _run(order, endpoint, wire)
    except _Ended as end:
        return end.code
    finally:
        end_tree()


def _own_connection() -> tuple[str, str]:
    """The addresses of the launcher and of this host, as sshd sees them."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return (words[0], words[2]) if len(words) == 4 else ("127.0.0.1", "127.0.0.1")


def _enter(order: Order) -> None:
    """Go to the folder of the run, which a host with a disk of its own may not have yet."""
    try:
        Path(order.workdir).mkdir(parents=True, exist_ok=True)
        os.chdir(order.workdir)
    except OSError as error:
        raise _fail(
            f"cannot work in the folder of the run: {error}",
            "make it on this host, or set cluster.workdir to a folder that every host can have",
        ) from error
    if order.script is not None and not Path(order.script).is_file():
        raise _fail(
            f"this host has no file {order.script}",
            "copy your program to every host, to the same path; only the configuration travels by itself",
        )


def _meet(order: Order, wire: LauncherChannel) -> str:
    """Where the nodes meet: the first one chooses, and the launcher tells all."""
    if order.nodes > 1 and order.node == 0:
        peers = wire.wait_for("meet", order.patience)
        try:
            address = choose_address("" if order.interface else address_for(peers, *_own_connection()), order.interface)
            endpoint = f"{address}:{choose_port(order.job)}"
        except OSError as error:
            raise _fail(
                f"the first host has no place to meet at: {error}",
                "set cluster.interface to one that the hosts share (`ip address` lists them)",
            ) from error
        _write(1, answer(endpoint=endpoint))
    return str(wire.wait_for("start", order.patience))


def address_for(peers: Sequence[str], launcher: str, own: str) -> str:
    """The address under which ``peers`` reach this host: that of the way from here to one of them.

    A peer that the launcher reaches by a loopback address is the launcher's own machine. Raises OSError.
    """
    for peer in peers:
        if not ipaddress.ip_address(peer).is_loopback:
            return address_towards(peer)
    return own if ipaddress.ip_address(own).is_loopback else address_towards(launcher)


def _run(order: Order, endpoint: str, wire: LauncherChannel) -> int:
    environ = {**os.environ, **order.environment}
    if order.nodes > 1:
        head = endpoint.rpartition(":")[0]
        try:
            way = find_way(head, environ)
        except OSError as error:
            fix = "set cluster.interface to a network that all hosts are on"
            raise _fail(f"no way to the first host, {head}: {error}", fix, ExitCode.FAILED) from error
        meeting = Rendezvous(order.job, endpoint, order.nodes, order.node, way.address, order.names)
        _write(1, f"{describe(way, meeting, environ)}\n".encode())
        environ.update(way.variables)
        meeting.announce(environ)
    with tempfile.TemporaryDirectory(prefix="drawbar-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(order.config, encoding="utf-8")
        try:
            child = subprocess.Popen(
                [*order.argv, str(config)],
                stdin=subprocess.DEVNULL,
                env=environ,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise _fail(
                f"cannot run {order.argv[0]}: {error}", "set cluster.python to a Python of this host"
            ) from error
        code = _watch(child, wire, order.patience)
        end_tree()  # before the folder goes: something may still read it
        return code


def _watch(child: "subprocess.Popen[bytes]", wire: LauncherChannel, patience: float) -> int:
    """Wait for the command, and pass signals on; its exit code."""
    told: set[int] = set()
    while (code := child.poll()) is None:
        for message in wire.messages(0.1):
            if "signal" in message:
                told.add(message["signal"])
                child.send_signal(message["signal"])
            if "end" in message:
                return _stop(child, message["end"])
        if wire.closed or wire.silence() > patience:
            return _stop(child, GRACE)
    if code >= 0:
        return code
    if -code in told:  # before it could listen to signals: nothing is lost
        return ExitCode.INTERRUPTED if -code == signal.SIGINT else ExitCode.REQUEUE
    _write(2, f"error: drawbar train was killed by {signal.Signals(-code).name}\n".encode())
    return ExitCode.FAILED


def _stop(child: "subprocess.Popen[bytes]", grace: float) -> int:
    """Ask the command to end; what is left after so many seconds is killed by who called."""
    if grace:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    child.kill()
    return ExitCode.FAILED


def _fail(what: str, remedy: str, code: ExitCode = ExitCode.WRONG_REQUEST) -> _Ended:
    _write(2, f"error: {what}\n  fix:   {remedy}\n".encode(errors="surrogateescape"))
    return _Ended(code)


def _write(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(descriptor, text)


if __name__ == "__main__":
    sys.exit(main())
