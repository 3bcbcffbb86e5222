"""Runs a job on ssh hosts from here: starts all, brings them together, and ends all when one ends.

The launcher stays in the foreground. It holds one connection for each host, and a host ends what it runs when its
connection ends: so nothing is left anywhere, however the launcher goes.
"""

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.launch import pdsh, remote_hosts
from drawbar.launch.protocol import HEARTBEAT_SECONDS
from drawbar.launch.remote import GRACE
from drawbar.launch.remote_hosts import RemoteHost
from drawbar.launch.ssh import SSH_FAILED, RemoteStart, no_answer, no_start

_QUIET = (ExitCode.DONE, ExitCode.REQUEUE, ExitCode.INTERRUPTED)
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # a terminal that was closed: save
}
_TOGETHER_SECONDS = 60
"""How long the other hosts have to end by themselves after the first has done so, saved or done."""
_MORE_BAD_HOSTS_SECONDS = 12
"""How long to look for further hosts that cannot start, after the first: all are named in one error."""


def run(starts: Sequence[RemoteStart], program: str, timeout: float) -> int:
    """Run the job on all hosts; the exit code of the run.

    Args:
        starts: the hosts.
        program: what starts ssh: ``ssh`` itself, or ``pdsh``.
        timeout: seconds that a host has to answer.

    Raises:
        UserError: a host cannot be reached, has no drawbar, does not answer, or was lost.
    """
    return asyncio.run(_Fleet(timeout).run(starts, program))


class _Fleet:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._members: list[RemoteHost] = []
        self._signals = 0
        self._running = False
        self._stopped: asyncio.Future[int]
        """The exit code, where a signal ends it all."""

    async def run(self, starts: Sequence[RemoteStart], program: str) -> int:
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # stopped, it would be silent, and the hosts would end the run
        connect_all = pdsh.connect_all if program == "pdsh" else remote_hosts.connect_all
        async with connect_all(starts) as connections:
            self._members = [RemoteHost(*pair) for pair in zip(starts, connections, strict=True)]
            work, beat = asyncio.create_task(self._work()), asyncio.create_task(self._beat())
            try:
                await asyncio.wait({work, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
                return self._stopped.result() if self._stopped.done() else work.result()
            finally:
                work.cancel()
                beat.cancel()
                await self._end(0 if self._stopped.done() else GRACE)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first one is for the ranks, if there may be any; a second one ends all at once."""
        self._signals += 1
        if self._signals == 1 and self._running:
            for member in self._members:
                member.say(signal=_PASSED_ON[number])
        elif not self._stopped.done():
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.REQUEUE
            self._stopped.set_result(code if self._signals == 1 else 128 + number)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for member in self._members:
                member.say(beat=True)

    async def _work(self) -> int:
        await self._greet()
        await self._meet()
        return await self._see_through()

    async def _greet(self) -> None:
        """Wait until every host has answered. Raises UserError for those that do not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while waiting := [member for member in self._members if not (member.greeting.done() or member.ended.done())]:
            if any(member.ended.done() for member in self._members):
                deadline = min(deadline, loop.time() + _MORE_BAD_HOSTS_SECONDS)
            events = [event for member in waiting for event in (member.greeting, member.ended)]
            done, _ = await asyncio.wait(events, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        if failed := [member for member in self._members if member.ended.done() and not member.greeting.done()]:
            raise no_start([(member.name, member.ended.result(), member.held) for member in failed])
        if waiting:
            raise no_answer([member.name for member in waiting], self._timeout)

    async def _meet(self) -> None:
        """Let the first host choose where, and tell all of them."""
        first, *others = self._members
        endpoint = ""
        if others:
            first.say(meet=[member.greeting.result()["address"] for member in others])
            events: list[asyncio.Future[Any]] = [first.endpoint, *(member.ended for member in self._members)]
            done, _ = await asyncio.wait(events, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise no_answer([first.name], self._timeout)
            if not first.endpoint.done():
                return  # one of them has said why
            endpoint = first.endpoint.result()
        self._running = True
        for member in self._members:
            member.say(start=endpoint)

    async def _see_through(self) -> int:
        """Wait until all have ended, or one has failed; the exit code of the run."""
        running, codes = list(self._members), list[int]()
        while running:
            done, _ = await asyncio.wait(
                [member.ended for member in running],
                timeout=_TOGETHER_SECONDS if codes else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ended = [member for member in running if member.ended in done]
            running = [member for member in running if member.ended not in done]
            if not ended:
                raise _left_behind(running)
            for member in ended:
                code = member.ended.result()
                if code not in _QUIET:
                    return self._one_failed(member, code)
                codes.append(code)
        return next((code for code in reversed(_QUIET) if code in codes), ExitCode.DONE)

    def _one_failed(self, member: RemoteHost, code: int) -> int:
        if code == SSH_FAILED or code < 0:
            raise _lost(member)
        if len(self._members) > 1:
            print(f"drawbar: {member.name} ended with exit code {code}, and the others with it", file=sys.stderr)
        return code

    async def _end(self, grace: float) -> None:
        """End what still runs: what has not answered yet has started nothing."""
        ends = []
        for member in self._members:
            if member.greeting.done():
                member.say(end=grace)
                member.hang_up()
            else:
                member.kill()
            ends.append(member.ended)
        _, left = await asyncio.wait(ends, timeout=grace + GRACE)
        for member in self._members:
            if member.ended in left:
                member.kill()
        await asyncio.wait(ends, timeout=GRACE)
        for end in ends:
            with suppress(asyncio.CancelledError, OSError):
                end.cancel()
                await end


def _lost(member: RemoteHost) -> UserError:
    return UserError(
        f"lost the host {member.name}: its connection ended, or what drawbar runs there was killed",
        remedy="see whether the host is up and has memory left; the same command goes on from the last checkpoint",
        exit_code=ExitCode.FAILED,
    )


def _left_behind(running: Sequence[RemoteHost]) -> UserError:
    names = ", ".join(member.name for member in running)
    return UserError(
        f"still running {_TOGETHER_SECONDS}s after another host had ended: {names}",
        remedy="look above for what these hosts say; they were ended",
        exit_code=ExitCode.FAILED,
    )
