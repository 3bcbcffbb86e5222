"""A simulated machine room: processes, threads, signals and files on one clock, in one order that a seed decides.

A simulated thread is a greenlet. It runs until it sleeps, waits, or comes to a file: then the scheduler goes on with
whatever is due next, so that one seed is one schedule. A process that is killed is never resumed: neither its
``finally`` blocks nor its exit handlers run.
"""

import heapq
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from drawbar.distributed.pulse import DUMP_SIGNAL

FOLDER = Path(__file__).parent
FIRST_PID = 10_000_000
"""Above the largest number that Linux gives, so that a signal that escapes from the simulation meets nobody."""
EPOCH = 1_800_000_000.0
_DEADLY = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, DUMP_SIGNAL}
"""Signals that end a process which has no handler for them."""
_SCHEDULER = {str(FOLDER / name) for name in ("world.py", "stand_ins.py", "disk.py")}
"""Files whose frames no stack shows: what they do happens inside the kernel or the interpreter."""

worlds: list["World"] = []
"""The world that is being simulated, if one is."""


def world() -> "World":
    return worlds[-1]


def current() -> "Process":
    """The process whose code runs."""
    thread = worlds[-1].running
    assert thread is not None
    return thread.process


class Wait:
    """What a thread waits for; done once ``wake`` was called."""

    __slots__ = ("done", "thread")

    def __init__(self, thread: "Thread") -> None:
        self.thread = thread
        self.done = False

    def wake(self) -> None:
        if not self.done:
            self.done = True
            scheduler = self.thread.process.world
            scheduler.after(0.0, scheduler.resume, self.thread)


class Thread:
    """A thread of a simulated process."""

    def __init__(self, process: "Process", target: Callable[[], object], name: str, daemon: bool = True) -> None:
        self.process, self.name, self.daemon = process, name, daemon
        self.ident = process.pid * 100 + len(process.threads)
        self.is_interruptible = False
        """Whether Python would run signal handlers in it now."""
        self.finished = False
        self.is_in_disk = False
        self.joining: list[Wait] = []
        self.greenlet = greenlet(self._run, process.world.hub)
        self._target = target
        process.threads.append(self)

    def _run(self) -> None:
        try:
            self._target()
        except GreenletExit:
            return
        except BaseException as error:  # noqa: BLE001 - as ``threading`` does; the oracle looks for it
            self.process.note_crash(self.name, error)
        self.finished = True
        for wait in self.joining:
            wait.wake()

    def frames(self) -> list[tuple[str, int, str]]:
        """The calls that it is in, innermost first: file, line, function."""
        frame = self.greenlet.gr_frame
        if self.process.world.running is self:
            frame = sys._getframe()
        found = []
        while frame is not None:
            if (file := frame.f_code.co_filename) not in _SCHEDULER:
                found.append((self.process.world.shown.get(file, file), frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found


class Process:
    """A simulated process: its threads, signal handlers, environment, and what it has printed."""

    def __init__(
        self, world: "World", name: str, node: str, main: Callable[[], object], environ: dict[str, str]
    ) -> None:
        self.world, self.name, self.node, self.environ = world, name, node, environ
        self.pid = FIRST_PID + len(world.processes)
        self.parent = world.running and world.running.process
        self.rank: int | None = None
        self.threads: list[Thread] = []
        self.handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
        self.unhandled: list[int] = []
        """Signals whose handlers the main thread has yet to run."""
        self.undelivered: list[int] = []
        """Signals that came while it was stopped."""
        self.wakeup: Any = None
        """Where the number of each signal is written: ``signal.set_wakeup_fd``."""
        self.stacks: Any = None
        """The file for its stacks, once it has one: ``faulthandler.register``."""
        self.is_stopped = False
        self.holder: Thread | None = None
        """The thread that holds the interpreter's lock for ever."""
        self.deferred: list[Thread] = []
        self.end: int | None = None
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        self.is_reaped = False
        self.ended_at = 0.0
        self.waiting: list[Wait] = []
        """For its end, or for it to go on after a stop."""
        self.state: dict[Any, Any] = {}
        """What the modules' globals are in it: see ``stand_ins.PerProcess``."""
        self.locked: list[Any] = []
        self.at_end: list[Callable[[], object]] = []
        self.stderr: list[str] = []
        self.main = Thread(self, lambda: self._run(main), "main")
        world.processes[self.pid] = self
        world.after(0.0, world.resume, self.main)

    @property
    def parent_pid(self) -> int:
        return self.parent.pid if self.parent is not None and self.parent.end is None else 1

    def _run(self, main: Callable[[], object]) -> None:
        try:
            main()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 - the oracle looks for it
            self.note_crash("main", error)
            code = 1
        self.join_workers()
        self.exit(code)

    def note_crash(self, thread: str, error: BaseException) -> None:
        if not self.world.is_over:
            self.world.crashes.append(f"{self.name}, {thread}: {''.join(traceback.format_exception(error))}")

    def join_workers(self) -> None:
        """Wait for the threads that Python waits for at its exit."""
        for thread in self.threads:
            if not thread.daemon and not thread.finished:
                thread.joining.append(wait := self.world.new_wait())
                self.world.block(wait)

    def exit(self, code: int) -> None:
        """End this process, from one of its own threads: never returns."""
        self.finish(code)
        self.world.hub.switch()

    def finish(self, end: int) -> None:
        if self.end is not None:
            return
        self.end, self.ended_at = end, self.world.now
        self.world.note(self.name, f"ended with exit code {end}" if end >= 0 else f"ended by signal {-end}")
        for file in self.locked:
            self.world.unlock(file)
        for call in self.at_end:
            call()
        for wait in self.waiting:
            wait.wake()

    def deliver(self, number: int) -> None:
        """Let a signal come to this process."""
        if self.end is not None:
            return
        if number == signal.SIGKILL:
            self.finish(-number)
        elif number == signal.SIGSTOP:
            self.is_stopped = True
        elif number == signal.SIGCONT:
            self._go_on()
        elif self.is_stopped:
            self.undelivered += [number] * (number not in self.undelivered)
        elif number == DUMP_SIGNAL and self.stacks is not None:
            self._write_stacks()
        else:
            self._handle(number)

    def _go_on(self) -> None:
        self.is_stopped = False
        numbers, self.undelivered = self.undelivered, []
        for number in sorted(numbers, key=lambda number: number != DUMP_SIGNAL):
            self.deliver(number)
        self._resume_deferred()
        for wait in self.waiting:
            wait.wake()

    def _resume_deferred(self) -> None:
        threads, self.deferred = self.deferred, []
        for thread in threads:
            self.world.after(0.0, self.world.resume, thread)

    def _handle(self, number: int) -> None:
        handler = self.handlers.get(number, signal.SIG_DFL)
        if handler == signal.SIG_DFL and number in _DEADLY:
            self.finish(-number)
        elif callable(handler) and not isinstance(handler, signal.Handlers):
            if self.wakeup is not None:
                self.wakeup.send(bytes([number]))
            self.unhandled += [number] * (number not in self.unhandled)
            if self.main.is_interruptible:
                self.world.after(0.0, self.world.resume, self.main)

    def _write_stacks(self) -> None:
        lines = []
        for thread in (*self.threads[1:], self.main):
            frames = [] if thread.finished else thread.frames()
            if frames:
                lines += [f"Thread 0x{thread.ident:016x} (most recent call first):"]
                lines += [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
        self.stacks.write("".join(f"{line}\n" for line in lines).encode())

    def __repr__(self) -> str:
        return self.name


class World:
    """The clock, everything that is due, and all processes.

    Args:
        shown: for stacks: a file of the simulation → the file of torch or drawbar that it stands for.
    """

    def __init__(self, seed: int, shown: dict[str, str], tracing: bool = False) -> None:
        self.random = random.Random(seed)
        self.shown = shown
        self.now = 0.0
        self.hub = getcurrent()
        self.running: Thread | None = None
        self.processes: dict[int, Process] = {}
        self.crashes: list[str] = []
        self.turns = 0
        self.tracing = tracing
        self.trace: list[tuple[float, str, str]] = []
        self.is_over = False
        self._due: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def note(self, who: str, what: str) -> None:
        """Note something for the trace."""
        self.trace.append((self.now, who, what))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call something later; what is due at the same time comes in a random order."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self.random.random(), self._count, call, arguments))

    def run(self, is_done: Callable[[], bool], until: float) -> bool:
        """Go on until ``is_done``. Returns whether that came to be by the time ``until`` before nothing was due."""
        while not is_done():
            if not self._due or self._due[0][0] > until:
                return False
            self.now, _, _, call, arguments = heapq.heappop(self._due)
            call(*arguments)
        return True

    @property
    def is_deadlocked(self) -> bool:
        return not self._due

    def resume(self, thread: Thread) -> None:
        """Let a thread run until it waits, unless it cannot."""
        process = thread.process
        if process.end is not None or thread.finished:
            return
        if process.is_stopped or process.holder not in (None, thread):
            if thread not in process.deferred:
                process.deferred.append(thread)
            return
        self.turns += 1
        self.running = thread
        thread.greenlet.switch()
        self.running = None

    def new_wait(self) -> Wait:
        assert self.running is not None
        return Wait(self.running)

    def block(self, wait: Wait | None = None, seconds: float | None = None, interruptible: bool = True) -> bool:
        """Let the running thread wait; False if the time was over first. Its signal handlers run meanwhile, or, where
        it is in C code that is not ``interruptible``, afterwards."""
        thread = self.running
        assert thread is not None, "only threads wait"
        if self.is_over:
            raise GreenletExit
        end = float("inf") if seconds is None else self.now + seconds
        if seconds is not None:
            self.after(seconds, self.resume, thread)
        before, thread.is_interruptible = thread.is_interruptible, interruptible
        try:
            while not (wait is not None and wait.done):
                self._leave(thread)
                if interruptible:
                    self._run_handlers(thread)
                    thread.is_interruptible = True
                if self.now >= end:
                    break
        finally:
            thread.is_interruptible = before
        if not interruptible:
            self._run_handlers(thread)
        return wait is not None and wait.done

    def pass_time(self, until: float) -> None:
        """Go on until then, with whatever is due."""
        self.run(lambda: False, until)
        self.now = max(self.now, until)

    def _leave(self, thread: Thread) -> None:
        """Let others run until this thread is resumed."""
        self.hub.switch()
        if self.is_over:
            raise GreenletExit

    def sleep(self, seconds: float) -> None:
        self.block(None, seconds)

    def _run_handlers(self, thread: Thread) -> None:
        process = thread.process
        while process.unhandled and thread is process.main:
            number = process.unhandled.pop(0)
            handler = process.handlers.get(number)
            if callable(handler):
                handler(number, _frame_outside())

    def send(self, pid: int, number: int) -> None:
        """``os.kill``. Raises ProcessLookupError."""
        process = self.processes.get(pid)
        if process is None or process.is_reaped:
            raise ProcessLookupError
        if number:
            if process.end is None:
                sender = self.running.process.name if self.running else "the world"
                self.note(sender, f"sends {_name_of(number)} to {process.name}")
            process.deliver(number)
            if self.running is not None and self.running.process is process:
                self.block(None, 0.0)  # it may just have ended or stopped itself

    def unlock(self, file: Any) -> None:
        """Overridden by the disk: release the lock of a process that has ended."""

    def close(self) -> None:
        """End all threads, once nobody looks at what they do any more."""
        self.is_over = True
        for process in self.processes.values():
            for thread in process.threads:
                if thread.greenlet and not thread.greenlet.dead:
                    self.running = thread
                    thread.greenlet.throw(GreenletExit)
        self.running = None


def _frame_outside() -> FrameType | None:
    """The innermost frame that is not the scheduler's: the one that a signal interrupts."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _SCHEDULER:
        frame = frame.f_back
    return frame


def _name_of(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
