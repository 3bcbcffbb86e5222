"""``RemoteHost``: one host of an ssh job as the submitting process sees it: its connection, its messages, its end."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from drawbar.launch.ssh.host_output import HostOutput
from drawbar.launch.ssh.protocol import ANSWER, host_message
from drawbar.launch.ssh.ssh_command import RemoteStart

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
