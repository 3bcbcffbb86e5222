"""``supervise``: runs a job on ssh hosts: starts all, sends all the rendezvous endpoint, and ends all when one
fails, or stays long after another has ended.

The submitting process stays in the foreground. It holds one connection for each host, and a host ends what it runs when
its connection ends: so nothing is left anywhere, however the submitting process goes.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.launch.ssh.host_output import HostOutput
from drawbar.launch.ssh.protocol import GRACE, HEARTBEAT_SECONDS
from drawbar.launch.ssh.remote_host import RemoteHost
from drawbar.launch.ssh.ssh_command import SSH_FAILED, RemoteStart, no_answer, no_start

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
        """Let the first host choose the endpoint, tell it to all of them, and so start the job."""
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
                raise _left_behind(running)
            for host in ended:
                code = host.ended.result()
                if code not in _QUIET:
                    return self._one_failed(host, code)
                codes.append(code)
        return next((code for code in reversed(_QUIET) if code in codes), ExitCode.DONE)

    def _one_failed(self, host: RemoteHost, code: int) -> int:
        if code == SSH_FAILED or code < 0:
            raise _lost(host)
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


def _lost(host: RemoteHost) -> UserError:
    return UserError(
        f"lost the host {host.name}: its connection ended, or what drawbar runs there was killed",
        remedy="see whether the host is up and has memory left; the same command goes on from the last checkpoint",
        exit_code=ExitCode.FAILED,
    )


def _left_behind(running: Sequence[RemoteHost]) -> UserError:
    names = ", ".join(host.name for host in running)
    return UserError(
        f"still running {_TOGETHER_SECONDS}s after another host had ended: {names}",
        remedy="look above for what these hosts say; they were ended",
        exit_code=ExitCode.FAILED,
    )
