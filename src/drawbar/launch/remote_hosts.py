"""One host of a launch over ssh, as the launcher sees it: what it says, and how it ends."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from drawbar.launch.protocol import ANSWER, order_line, say
from drawbar.launch.ssh import SSH_FAILED, RemoteStart

_LONGEST_LINE = 2**16


@dataclass(frozen=True)
class Connection:
    """A running ssh."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    code: Awaitable[int] | None
    """Its exit code, when it has ended; None where it comes as an answer."""
    kill: Callable[[], None]


class RemoteHost:
    """A host that takes part. It gets its order at once."""

    def __init__(self, start: RemoteStart, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self.name = start.host.name
        self.greeting: asyncio.Future[dict[str, str]] = loop.create_future()
        """What it says first: it runs, and has the order."""
        self.endpoint: asyncio.Future[str] = loop.create_future()
        """Where the nodes meet, from the first of them."""
        self.held: list[bytes] = []
        """Errors of ssh and of the shell, until there is a greeting."""
        self._exit: asyncio.Future[int] = loop.create_future()
        self._connection = connection
        connection.stdin.write(start.script + order_line(start.order))
        self.ended = asyncio.create_task(self._follow())
        """The exit code, once all output is written."""

    async def _follow(self) -> int:
        connection = self._connection
        readers = [
            asyncio.create_task(self._read_output(connection.stdout)),
            asyncio.create_task(self._read_errors(connection.stderr)),
        ]
        code = asyncio.ensure_future(self._exit if connection.code is None else connection.code)
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

    def say(self, **words: Any) -> None:
        """Tell the host something, if it still listens."""
        if not self._connection.stdin.is_closing():
            self._connection.stdin.write(say(**words))

    def hang_up(self) -> None:
        """Say no more: the host ends what runs there."""
        if not self._connection.stdin.is_closing():
            self._connection.stdin.write_eof()

    def kill(self) -> None:
        """End the connection at once; the host notices."""
        with contextlib.suppress(ProcessLookupError):
            self._connection.kill()

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        async for line in lines(stream):
            text, mark, answer = line.partition(ANSWER)
            if text or not mark:
                await self._write(1, text)
            if mark:
                await self._hear(json.loads(answer))
        if not self._exit.done():
            self._exit.set_result(SSH_FAILED)  # where it should have come before the end

    async def _hear(self, words: dict[str, Any]) -> None:
        expected: dict[str, asyncio.Future[Any]]
        expected = {"hello": self.greeting, "endpoint": self.endpoint, "exit": self._exit}
        for name, future in expected.items():
            if name in words and not future.done():
                future.set_result(words[name])
        if "hello" in words:
            while self.held:
                await self._write(2, self.held.pop(0))

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in lines(stream):
            if self.greeting.done():
                await self._write(2, line)
            else:
                self.held.append(line)

    async def _write(self, descriptor: int, line: bytes) -> None:
        """In a thread: a terminal or a pager may make us wait, and the hosts must not."""
        await asyncio.to_thread(_write_whole, descriptor, self.name.encode() + b": " + line + b"\n")


def _write_whole(descriptor: int, text: bytes) -> None:
    stream = (sys.stdout if descriptor == 1 else sys.stderr).buffer
    stream.write(text)  # a buffered stream has a lock: lines stay whole
    stream.flush()


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream without their ends; one without an end, or a very long one, in pieces."""
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


@asynccontextmanager
async def connect_all(starts: Sequence[RemoteStart]) -> AsyncIterator[list[Connection]]:
    """Start an ssh for each host, all at the same time."""
    yield list(await asyncio.gather(*(_connect(start.command) for start in starts)))


async def _connect(command: tuple[str, ...]) -> Connection:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    return Connection(process.stdin, process.stdout, process.stderr, process.wait(), process.kill)
