"""``supervise``: runs a job on ssh hosts: starts all, sends all the rendezvous endpoint, shows what they print, and
ends all when one fails, or stays long after another has ended.

The submitting process stays in the foreground. It holds one connection for each host, and a host ends what it runs when
its connection ends: so nothing is left anywhere, however the submitting process goes.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from drawbar.errors import ExitCode, UserError
from drawbar.jobs.ssh.protocol import ANSWER, GRACE, HEARTBEAT_SECONDS, host_message
from drawbar.jobs.ssh.ssh_command import SSH_FAILED, RemoteStart, no_answer, no_start


class HostOutput:
    """One for all hosts of a job."""

    def __init__(self) -> None:
        self._log: BinaryIO | None = None

    def open_log(self, path: Path) -> None:
        """Also write to this file from now on. Raises OSError if it cannot be written."""
        self._log = path.open("ab")

    def close(self) -> None:
        with suppress(OSError):
            if self._log is not None:
                self._log.close()

    async def write(self, descriptor: int, host: str, line: bytes) -> None:
        """Write in a thread: a terminal or a pager may block, and the hosts must not wait for it."""
        await asyncio.to_thread(self._write, descriptor, host.encode() + b": " + line + b"\n")

    def _write(self, descriptor: int, text: bytes) -> None:
        stream = (sys.stdout if descriptor == 1 else sys.stderr).buffer
        stream.write(text)  # a buffered stream has a lock: lines stay whole
        stream.flush()
        if self._log is not None:
            with suppress(OSError):  # a full disk on this machine must not end the run on the hosts
                self._log.write(text)
                self._log.flush()


_LONGEST_LINE = 2**16


class RemoteHost:
    """A host of the job, over a running ssh. It is sent its ``HostJob`` at once; that begins when all hosts have
    answered."""

    def __init__(self, start: RemoteStart, process: asyncio.subprocess.Process, output: HostOutput) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        self.name = start.host.name
        self.greeting: asyncio.Future[dict[str, str]] = loop.create_future()
        """What it says first: it runs, and knows its job."""
        self.endpoint: asyncio.Future[str] = loop.create_future()
        """Of the rendezvous, from the first host."""
        self.held: list[bytes] = []
        """Errors of ssh and of the shell, until there is a greeting."""
        self._process = process
        self._stdin = process.stdin
        self._output = output
        self._stdin.write(start.script + start.host_job.message())
        self.ended = asyncio.create_task(self._follow(process.stdout, process.stderr))
        """The exit code, once all output is written."""

    @staticmethod
    async def connect(start: RemoteStart, output: HostOutput) -> "RemoteHost":
        """Start the ssh of a host."""
        process = await asyncio.create_subprocess_exec(
            *start.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the submitting process, which passes it on
        )
        return RemoteHost(start, process, output)

    async def _follow(self, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> int:
        readers = [asyncio.create_task(self._read_output(stdout)), asyncio.create_task(self._read_errors(stderr))]
        code = asyncio.ensure_future(self._process.wait())
        pending: set[asyncio.Future[Any]] = {code, *readers}
        try:
            while not code.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what went wrong
            await asyncio.wait(readers, timeout=5)  # a program that ssh started may keep them open
        finally:
            for task in pending:
                task.cancel()
        return code.result()

    def send(self, **values: Any) -> None:
        """Send the host a message, if it still listens."""
        if not self._stdin.is_closing():
            self._stdin.write(host_message(**values))

    def close_input(self) -> None:
        """Send no more: the host ends what runs there."""
        if not self._stdin.is_closing():
            self._stdin.write_eof()

    def kill(self) -> None:
        """End the connection at once; the host notices."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        async for line in lines(stream):
            text, mark, message = line.partition(ANSWER)
            if text or not mark:
                await self._output.write(1, self.name, text)
            if mark:
                await self._receive(json.loads(message))

    async def _receive(self, message: dict[str, Any]) -> None:
        expected: dict[str, asyncio.Future[Any]] = {"hello": self.greeting, "endpoint": self.endpoint}
        for name, future in expected.items():
            if name in message and not future.done():
                future.set_result(message[name])
        if "hello" in message:
            while self.held:
                await self._output.write(2, self.name, self.held.pop(0))

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in lines(stream):
            if self.greeting.done():
                await self._output.write(2, self.name, line)
            else:
                self.held.append(line)


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream without their line ends; a very long line comes in pieces."""
    rest = b""
    while chunk := await stream.read(2**16):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest


_QUIET = (ExitCode.DONE, ExitCode.REQUEUE, ExitCode.INTERRUPTED)
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # a terminal that was closed: save
}
_TOGETHER_SECONDS = 60
"""How long the other hosts have to exit after one has exited without an error; the next one that does renews it."""
_MORE_BAD_HOSTS_SECONDS = 12
"""How long to look for further hosts that cannot start, after the first: all are named in one error."""


def supervise(
    starts: Sequence[RemoteStart], timeout: float, on_start: Callable[[HostOutput], None] = lambda output: None
) -> int:
    """Run the job on all hosts. Returns the exit code of the run.

    Args:
        timeout: seconds that a host has to answer.
        on_start: called once, when all hosts have answered and the job begins.

    Raises:
        UserError: a host cannot be reached, has no drawbar, does not answer, or was lost.
    """
    return asyncio.run(_Supervisor(timeout, on_start).run(starts))


class _Supervisor:
    def __init__(self, timeout: float, on_start: Callable[[HostOutput], None]) -> None:
        self._timeout = timeout
        self._on_start = on_start
        self._output = HostOutput()
        self._hosts: list[RemoteHost] = []
        self._signals = 0
        self._running = False
        self._stopped: asyncio.Future[int]
        """The exit code, where a signal ends it all."""

    async def run(self, starts: Sequence[RemoteStart]) -> int:
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop the heartbeats: the hosts would end the run
        self._hosts = list(await asyncio.gather(*(RemoteHost.connect(start, self._output) for start in starts)))
        work, heartbeat = asyncio.create_task(self._work()), asyncio.create_task(self._send_heartbeats())
        try:
            await asyncio.wait({work, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            return self._stopped.result() if self._stopped.done() else work.result()
        finally:
            work.cancel()
            heartbeat.cancel()
            await self._end(0 if self._stopped.done() else GRACE)
            self._output.close()

    def _on_signal(self, number: signal.Signals) -> None:
        """The first one is for the ranks, if there may be any; a second one ends all at once."""
        self._signals += 1
        if self._signals == 1 and self._running:
            for host in self._hosts:
                host.send(signal=_PASSED_ON[number])
        elif not self._stopped.done():
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.REQUEUE
            self._stopped.set_result(code if self._signals == 1 else 128 + number)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for host in self._hosts:
                host.send(heartbeat=True)

    async def _work(self) -> int:
        await self._await_greetings()
        await self._start_rendezvous()
        return await self._await_ends()

    async def _await_greetings(self) -> None:
        """Wait until every host has answered. Raises UserError for those that do not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while waiting := [host for host in self._hosts if not (host.greeting.done() or host.ended.done())]:
            if any(host.ended.done() for host in self._hosts):
                deadline = min(deadline, loop.time() + _MORE_BAD_HOSTS_SECONDS)
            events = [event for host in waiting for event in (host.greeting, host.ended)]
            done, _ = await asyncio.wait(events, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        if failed := [host for host in self._hosts if host.ended.done() and not host.greeting.done()]:
            raise no_start([(host.name, host.ended.result(), host.held) for host in failed])
        if waiting:
            raise no_answer([host.name for host in waiting], self._timeout)

    async def _start_rendezvous(self) -> None:
        """Let the first host choose the endpoint, send it to all of them, and so start the job."""
        first, *others = self._hosts
        endpoint = ""
        if others:
            first.send(peers=[host.greeting.result()["address"] for host in others])
            events: list[asyncio.Future[Any]] = [first.endpoint, *(host.ended for host in self._hosts)]
            done, _ = await asyncio.wait(events, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise no_answer([first.name], self._timeout)
            if not first.endpoint.done():
                return  # a host has ended, and has printed why
            endpoint = first.endpoint.result()
        self._running = True
        self._on_start(self._output)
        for host in self._hosts:
            host.send(start=endpoint)

    async def _await_ends(self) -> int:
        """Wait until all have ended, or one has failed. Returns the exit code of the run."""
        running, codes = list(self._hosts), list[int]()
        while running:
            done, _ = await asyncio.wait(
                [host.ended for host in running],
                timeout=_TOGETHER_SECONDS if codes else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ended = [host for host in running if host.ended in done]
            running = [host for host in running if host.ended not in done]
            if not ended:
                names = ", ".join(host.name for host in running)
                raise UserError(
                    f"still running {_TOGETHER_SECONDS}s after another host had ended: {names}",
                    remedy="look above for what these hosts say; they were ended",
                    exit_code=ExitCode.FAILED,
                )
            for host in ended:
                code = host.ended.result()
                if code not in _QUIET:
                    return self._one_failed(host, code)
                codes.append(code)
        return next((code for code in reversed(_QUIET) if code in codes), ExitCode.DONE)

    def _one_failed(self, host: RemoteHost, code: int) -> int:
        if code == SSH_FAILED or code < 0:
            raise UserError(
                f"lost the host {host.name}: its connection ended, or what drawbar runs there was killed",
                remedy="see whether the host is up and has memory left; the same command resumes from the last "
                "checkpoint",
                exit_code=ExitCode.FAILED,
            )
        if len(self._hosts) > 1:
            print(f"drawbar: {host.name} ended with exit code {code}, and the others with it", file=sys.stderr)
        return code

    async def _end(self, grace: float) -> None:
        """End what still runs. A host that has not answered has started nothing: its ssh is killed."""
        ends = []
        for host in self._hosts:
            if host.greeting.done():
                host.send(end=grace)
                host.close_input()
            else:
                host.kill()
            ends.append(host.ended)
        _, left = await asyncio.wait(ends, timeout=grace + GRACE)
        for host in self._hosts:
            if host.ended in left:
                host.kill()
        await asyncio.wait(ends, timeout=GRACE)
        for end in ends:
            with suppress(asyncio.CancelledError, OSError):
                end.cancel()
                await end
