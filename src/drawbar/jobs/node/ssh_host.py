"""Runs on each host of an ssh job: starts the host's ranks, and ends them with the connection.

    python -P -m drawbar.jobs.node.ssh_host

Reads messages of :mod:`drawbar.jobs.ssh.protocol` from its standard input: what to run, the endpoint of the
rendezvous, signals to pass on. The end of that input, or a long silence, means that the submitting process is
gone.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from drawbar.errors import ExitCode
from drawbar.jobs.node.network import address_towards, choose_address, choose_port, describe, find_route
from drawbar.jobs.ssh.protocol import GRACE, HostJob, submitter_message
from drawbar.launch.process_tree import adopt_orphans, die_with_parent, end_tree
from drawbar.launch.rendezvous import Rendezvous

LOST_EXIT_CODE = 255
"""The exit code if the worker was killed: the same code that ssh has if its connection is lost."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class _Ended(Exception):
    """There is nothing more to do here."""

    def __init__(self, code: int = ExitCode.FAILED) -> None:
        super().__init__()
        self.code = code


class SubmitterChannel:
    """Messages from the submitting process. The channel is closed when their stream ends, or when the process
    ``parent`` does."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._incomplete = b""
        self._unread: list[dict[str, Any]] = []
        self._last_message = time.monotonic()
        self.closed = False

    def put(self, **message: Any) -> None:
        """Add a message as if the submitting process had sent it."""
        self._unread.append(message)

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """New messages; waits at most this many seconds for one."""
        if not self.closed and select.select([0], [], [], seconds)[0]:
            text = os.read(0, 2**16)
            self._last_message, self.closed = time.monotonic(), not text
            *lines, self._incomplete = (self._incomplete + text).split(b"\n")
            self._unread += [json.loads(line) for line in lines]
        self.closed |= os.getppid() != self._parent  # parent gone: nobody cleans up after this process
        found, self._unread = self._unread, []
        return found

    def silence(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._last_message

    def wait_for(self, key: str, patience: float) -> Any:
        """The value of the next message with this key. Raises _Ended where the submitting process is gone, or wants an
        end."""
        while not self.closed and self.silence() < patience:
            messages = self.messages(0.5)
            for number, message in enumerate(messages, start=1):
                if key in message:
                    self._unread = messages[number:] + self._unread
                    return message[key]
                if "end" in message or "signal" in message:
                    raise _Ended
        raise _Ended


def main() -> int:
    """Run as two processes: one works, its parent waits. If either is killed, the other ends everything."""
    adopt_orphans()
    parent = os.getpid()
    worker = os.fork()
    if not worker:
        adopt_orphans()
        return work(parent)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are for the worker
    _, status = os.waitpid(worker, 0)
    end_tree()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else LOST_EXIT_CODE


def work(parent: int) -> int:
    """Run what the submitting process sends; end when the process ``parent`` ends."""
    channel = SubmitterChannel(parent)

    def pass_on(number: int, frame: FrameType | None) -> None:
        channel.put(signal=number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    try:
        values = channel.wait_for("job", HostJob.patience)
        _write(1, submitter_message(hello={"address": _connection_addresses()[1]}))
        job = _read_job(values)
        _change_directory(job)
        return _run(job, _find_endpoint(job, channel), channel)
    except _Ended as end:
        return end.code
    finally:
        end_tree()


def _connection_addresses() -> tuple[str, str]:
    """The addresses of the submitting process's machine and of this host, as sshd sees them."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return (words[0], words[2]) if len(words) == 4 else ("127.0.0.1", "127.0.0.1")


def _read_job(values: Mapping[str, Any]) -> HostJob:
    try:
        return HostJob.from_json(values)
    except (KeyError, TypeError) as error:
        raise _fail(
            f"the submitting machine and this host have different versions of drawbar: {error}",
            "install the same version on every host",
        ) from error


def _change_directory(job: HostJob) -> None:
    """Go to the working directory (``cluster.workdir``), which a host with its own disk may lack."""
    try:
        Path(job.workdir).mkdir(parents=True, exist_ok=True)
        os.chdir(job.workdir)
    except OSError as error:
        raise _fail(
            f"cannot use the working directory of the job: {error}",
            "make it on this host, or set cluster.workdir to a folder that every host can have",
        ) from error
    if job.program is not None and not Path(job.program).is_file():
        raise _fail(
            f"this host has no file {job.program}",
            "copy your program to every host, to the same path; only the configuration travels by itself",
        )


def _find_endpoint(job: HostJob, channel: SubmitterChannel) -> str:
    """The endpoint of the rendezvous: the first node chooses it, and the submitting process sends it to all."""
    if job.nodes > 1 and job.node == 0:
        peers = channel.wait_for("peers", job.patience)
        try:
            address = choose_address(
                "" if job.interface else address_for(peers, *_connection_addresses()), job.interface
            )
            endpoint = f"{address}:{choose_port(job.launch_id)}"
        except OSError as error:
            raise _fail(
                f"the first host has no address for the rendezvous: {error}",
                "set cluster.interface to one that the hosts share (`ip address` lists them)",
            ) from error
        _write(1, submitter_message(endpoint=endpoint))
    return str(channel.wait_for("start", job.patience))


def address_for(peers: Sequence[str], submitter: str, own: str) -> str:
    """The address under which ``peers`` reach this host: that of the route from here to one of them.

    A peer that the submitting process reaches by a loopback address is that process's own machine. Raises OSError.

    Args:
        peers: as the submitting process reaches them.
        submitter, own: the submitting process's machine, and this host, as :func:`_connection_addresses` gives them.
    """
    for peer in peers:
        if not ipaddress.ip_address(peer).is_loopback:
            return address_towards(peer)
    return own if ipaddress.ip_address(own).is_loopback else address_towards(submitter)


def _run(job: HostJob, endpoint: str, channel: SubmitterChannel) -> int:
    environ = {**os.environ, **job.environment}
    if job.nodes > 1:
        head = endpoint.rpartition(":")[0]
        try:
            route = find_route(head, environ)
        except OSError as error:
            fix = "set cluster.interface to a network that all hosts are on"
            raise _fail(f"no route to the first host, {head}: {error}", fix, ExitCode.FAILED) from error
        rendezvous = Rendezvous(job.launch_id, endpoint, job.nodes, job.node, route.address, job.names)
        _write(1, f"{describe(route, rendezvous, environ)}\n".encode())
        environ.update(route.variables)
        rendezvous.to_environment(environ)
    with tempfile.TemporaryDirectory(prefix="drawbar-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(job.config, encoding="utf-8")
        try:
            child = subprocess.Popen(
                [*job.argv, str(config)],
                stdin=subprocess.DEVNULL,
                env=environ,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise _fail(f"cannot run {job.argv[0]}: {error}", "set cluster.python to a Python of this host") from error
        code = _watch(child, channel, job.patience)
        end_tree()  # before the folder goes: something may still read it
        return code


def _watch(child: "subprocess.Popen[bytes]", channel: SubmitterChannel, patience: float) -> int:
    """Wait for the command, and pass signals on. Returns its exit code."""
    passed_on: set[int] = set()
    while (code := child.poll()) is None:
        for message in channel.messages(0.1):
            if "signal" in message:
                passed_on.add(message["signal"])
                child.send_signal(message["signal"])
            if "end" in message:
                return _stop(child, message["end"])
        if channel.closed or channel.silence() > patience:
            return _stop(child, GRACE)
    if code >= 0:
        return code
    if -code in passed_on:  # the signal came before the command could handle it: nothing is lost
        return ExitCode.INTERRUPTED if -code == signal.SIGINT else ExitCode.REQUEUE
    _write(2, f"error: drawbar train was killed by {signal.Signals(-code).name}\n".encode())
    return ExitCode.FAILED


def _stop(child: "subprocess.Popen[bytes]", grace: float) -> int:
    """Ask the command to end, and kill it after this many seconds; the caller kills what the command has started."""
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
    with contextlib.suppress(OSError):  # the submitting process may be gone
        os.write(descriptor, text)


if __name__ == "__main__":
    sys.exit(main())
