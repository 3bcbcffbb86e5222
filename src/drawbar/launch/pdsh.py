"""The same launch through pdsh: it starts the ssh of each host, and everything else is as without it.

pdsh has no standard input for what it starts, and its exit code is the largest of all. So it does not start ssh
itself but :mod:`drawbar.launch.relay`, which leads the streams of ssh past it.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.launch.remote_hosts import Connection
from drawbar.launch.ssh import RemoteStart

_SECONDS = 60
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def pdsh_command(starts: Sequence[RemoteStart], socket: str) -> tuple[str, ...]:
    """What starts all hosts at once. pdsh writes a host's name for %h.

    Raises:
        UserError: a host's name has a user in it, which pdsh would take for the user on all of them.
    """
    names = [start.host.name for start in starts]
    for name in names:
        if "@" in name:
            raise UserError(
                f"pdsh cannot start {name}: it knows one user for all hosts",
                where="cluster.ssh_program=pdsh",
                remedy="write `User` below `Host` in your ssh configuration, or set cluster.ssh_program=ssh",
            )
    *options, _, shell = starts[0].command
    # through env: pdsh tells a program its name without its folder, by which Python would look for itself along PATH
    words = ["env", sys.executable, "-m", "drawbar.launch.relay", socket]
    relay = [*(word.replace("%", "%%") for word in words), "%h"]
    ssh = [*(word.replace("%", "%%") for word in options), "%h", shell]
    return ("pdsh", "-R", "exec", "-f", str(len(names)), "-S", "-w", ",".join(names), *relay, *ssh)


@asynccontextmanager
async def connect_all(starts: Sequence[RemoteStart]) -> AsyncIterator[list[Connection]]:
    """The streams of the ssh of each host.

    Raises:
        UserError: pdsh fails, or does not start them.
    """
    arrived: dict[tuple[str, str], asyncio.Future[tuple[_Streams, int]]] = {
        (start.host.name, stream): asyncio.get_running_loop().create_future()
        for start in starts
        for stream in ("output", "errors")
    }

    async def welcome(*streams: Any) -> None:
        said = json.loads(await streams[0].readline())
        arrived[said["host"], said["stream"]].set_result((streams, said["pid"]))

    with tempfile.TemporaryDirectory(prefix="drawbar-") as folder, tempfile.TemporaryFile() as errors:
        socket = str(Path(folder) / "launcher")
        server = await asyncio.start_unix_server(welcome, socket)
        process = await asyncio.create_subprocess_exec(
            *pdsh_command(starts, socket),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        ended = asyncio.create_task(process.wait())
        everybody = asyncio.gather(*arrived.values())
        events: list[asyncio.Future[Any]] = [everybody, ended]
        await asyncio.wait(events, timeout=_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        try:
            if not everybody.done():
                errors.seek(0)
                raise _no_start(errors.read().decode(errors="replace"))
            yield [_connection(start.host.name, arrived) for start in starts]
            await asyncio.wait({ended}, timeout=5)
        finally:
            if not ended.done():
                with suppress(ProcessLookupError):
                    process.kill()
                await ended


def _connection(host: str, arrived: dict[tuple[str, str], "asyncio.Future[tuple[_Streams, int]]"]) -> Connection:
    (output, writer), relay = arrived[host, "output"].result()
    (errors, _), _ = arrived[host, "errors"].result()
    return Connection(writer, output, errors, None, lambda: os.kill(relay, signal.SIGTERM))


def _no_start(said: str) -> UserError:
    return UserError(
        f"pdsh does not start ssh: {said.strip() or 'it does not say why'}",
        where="pdsh",
        remedy="set cluster.ssh_program=ssh, or install a pdsh with the module exec (`pdsh -L` lists them)",
        exit_code=ExitCode.FAILED,
    )
