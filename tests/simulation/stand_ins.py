"""What the modules under simulation have instead of ``os``, ``time``, ``threading`` and the like.

Each stand-in is the real module, but for what processes, threads, signals and clocks do; ``installed`` puts them into
the modules' globals, so that the source runs as it is.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from world import EPOCH, Process, Thread, Wait, current, world


class _StandIn:
    """A module of which some names are replaced."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        setattr(self, name, value)  # found at once from here on
        return value


class Time(_StandIn):
    def monotonic(self) -> float:
        return 1000.0 + world().now

    def perf_counter(self) -> float:
        return world().now

    def time(self) -> float:
        return EPOCH + world().now

    def sleep(self, seconds: float) -> None:
        world().sleep(seconds)


class Os(_StandIn):
    @property
    def environ(self) -> dict[str, str]:
        return current().environ

    def getpid(self) -> int:
        return current().pid

    def getppid(self) -> int:
        return current().parent_pid

    def uname(self) -> Any:
        return os.uname_result(("Linux", current().node, "6.1", "", "x86_64"))

    def _exit(self, code: int) -> None:
        current().exit(int(code))

    def kill(self, pid: int, number: int) -> None:
        world().send(pid, number)

    killpg = kill

    def waitid(self, kind: int, pid: int, options: int) -> Any:
        process = world().processes.get(pid)
        if process is None or process.is_reaped or process.parent is not current():
            raise ChildProcessError
        while process.end is None:
            if options & os.WNOHANG:
                return None
            process.waiting.append(wait := world().new_wait())
            world().block(wait)
        how = os.CLD_EXITED if process.end >= 0 else os.CLD_KILLED
        return os.waitid_result((pid, 0, signal.SIGCHLD, abs(process.end), how))

    def fsync(self, descriptor: int) -> None:
        room, process = world(), current()
        room.operate(process, "fsync", "", writes=True)  # type: ignore[attr-defined]

    fdatasync = fsync


class Signal(_StandIn):
    def signal(self, number: int, handler: Any) -> Any:
        before = self.getsignal(number)
        current().handlers[number] = handler
        return before

    def getsignal(self, number: int) -> Any:
        return current().handlers.get(number, signal.SIG_DFL)

    def set_wakeup_fd(self, writer: Any, *, warn_on_full_buffer: bool = True) -> Any:
        before, current().wakeup = current().wakeup or -1, None if writer == -1 else writer
        return before


class _Socket:
    """One end of a socket pair."""

    def __init__(self) -> None:
        self.received: deque[int] = deque()
        self.peer = self
        self._waiting: Wait | None = None
        self._seconds: float | None = None

    def fileno(self) -> "_Socket":
        return self

    def setblocking(self, blocks: bool) -> None:
        self._seconds = None if blocks else 0.0

    settimeout = lambda self, seconds: setattr(self, "_seconds", seconds)  # noqa: E731

    def send(self, content: bytes) -> int:
        self.peer.received.extend(content)
        if self.peer._waiting is not None:
            self.peer._waiting.wake()
        return len(content)

    def recv(self, size: int) -> bytes:
        if not self.received and self._seconds != 0.0:
            self._waiting = world().new_wait()
            world().block(self._waiting, self._seconds)
            self._waiting = None
        if not self.received:
            raise TimeoutError
        return bytes(self.received.popleft() for _ in range(min(size, len(self.received))))


class Sockets(_StandIn):
    def socketpair(self) -> tuple[_Socket, _Socket]:
        ends = _Socket(), _Socket()
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        return ends

    def gethostname(self) -> str:
        return current().node


class Event:
    """``threading.Event``"""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Wait] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            wait.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(wait := world().new_wait())
            world().block(wait, timeout)
            if not wait.done:
                self._waiting.remove(wait)
        return self._is_set


class Lock:
    """``threading.Lock``"""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: list[Wait] = []

    def __enter__(self) -> None:
        while self._is_locked:
            self._waiting.append(wait := world().new_wait())
            world().block(wait)
        self._is_locked = True

    def __exit__(self, *error: object) -> None:
        self._is_locked = False
        if self._waiting:
            self._waiting.pop(0).wake()


class SimulatedThread:
    """``threading.Thread``"""

    def __init__(self, target: Callable[[], object], name: str = "thread", daemon: bool = False) -> None:
        self.target, self.name, self.daemon = target, name, daemon
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = Thread(current(), self.target, self.name, self.daemon)
        world().after(0.0, world().resume, self._thread)

    def join(self) -> None:
        assert self._thread is not None
        if not self._thread.finished:
            self._thread.joining.append(wait := world().new_wait())
            world().block(wait)

    @property
    def ident(self) -> int:
        assert self._thread is not None
        return self._thread.ident


class Timer(SimulatedThread):
    """``threading.Timer``"""

    def __init__(self, interval: float, function: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        self._cancelled = Event()

        def run() -> None:
            if not self._cancelled.wait(interval):
                function(*args)

        super().__init__(run, "timer", daemon=True)  # an exit does not wait for those of the launcher

    def cancel(self) -> None:
        self._cancelled.set()


class Threading(_StandIn):
    Event, Lock, Thread, Timer = Event, Lock, SimulatedThread, Timer

    def current_thread(self) -> Thread | None:
        return world().running

    def main_thread(self) -> Thread:
        return current().main


class Future:
    """``concurrent.futures.Future``"""

    def __init__(self) -> None:
        self.over = Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.value = call(*arguments)
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            self.error = error
        self.over.set()

    def done(self) -> bool:
        return self.over.is_set()

    def exception(self) -> BaseException | None:
        self.over.wait()
        return self.error

    def result(self) -> Any:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Executor:
    """``ThreadPoolExecutor`` of one thread, for which the process waits at its exit."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "worker") -> None:
        self._name = thread_name_prefix
        self._queue: deque[tuple[Future, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._thread: Thread | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        self._queue.append((future := Future(), call, arguments))
        if self._thread is None or self._thread.finished:
            self._thread = Thread(current(), self._work, self._name, daemon=False)
            world().after(0.0, world().resume, self._thread)
        return future

    def _work(self) -> None:
        while self._queue:
            future, call, arguments = self._queue.popleft()
            future.run(call, arguments)

    def shutdown(self) -> None:
        if self._thread is not None and not self._thread.finished:
            self._thread.joining.append(wait := world().new_wait())
            world().block(wait)


class AtOnce:
    """``ThreadPoolExecutor`` whose calls are made at once: the checksums and fsyncs beside a write."""

    def __init__(self, max_workers: int) -> None: ...

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()
        future.run(call, arguments)
        return future


def wait_for(futures: list[Future]) -> None:
    for future in futures:
        future.over.wait()


class _Stream:
    """Standard error of the running process."""

    def write(self, text: str) -> int:
        process = current()
        if text.strip():
            process.stderr.append(text)
            world().note(process.name, f"prints: {text.rstrip()}")
        return len(text)

    def flush(self) -> None: ...


class Sys(_StandIn):
    stdout = stderr = _Stream()
    argv = ["drawbar", "train", "config.yaml"]


class Click(_StandIn):
    def echo(self, text: str, err: bool = True) -> None:
        Sys.stderr.write(text)


class AtExit:
    def _run_exitfuncs(self) -> None:
        current().join_workers()


class FaultHandler:
    def is_enabled(self) -> bool:
        return True  # nothing to write where nobody reads it

    def enable(self, file: Any) -> None: ...

    def register(self, number: int, file: Any) -> None:
        current().stacks = file


class Locks(_StandIn):
    def flock(self, file: Any, flags: int) -> None:
        fcntl.flock(file, flags)
        current().locked.append(file)


class TemporaryFolders:
    """``tempfile`` with names that a seed decides, on each node's own disk."""

    def TemporaryDirectory(self, prefix: str) -> "contextlib.AbstractContextManager[str]":
        return self._folder(prefix)

    @contextlib.contextmanager
    def _folder(self, prefix: str) -> Iterator[str]:
        room = world()
        room.folders = getattr(room, "folders", 0) + 1  # type: ignore[attr-defined]
        folder = room.folder / f"{prefix}{room.folders}"  # type: ignore[attr-defined]
        folder.mkdir()
        try:
            yield str(folder)
        finally:
            if not room.is_over:
                shutil.rmtree(folder, ignore_errors=True)


class Uuid:
    def uuid4(self) -> Any:
        room = world()
        room.uuids = getattr(room, "uuids", 0) + 1  # type: ignore[attr-defined]
        return type("Id", (), {"hex": f"{room.uuids:08x}{'0' * 24}"})  # type: ignore[attr-defined]


class Secrets:
    def token_hex(self, count: int) -> str:
        return Uuid().uuid4().hex[: 2 * count]


class PerProcess(list):
    """A module's global list, of which each process has its own."""

    @property
    def _own(self) -> list[Any]:
        return current().state.setdefault(id(self), [])

    def __bool__(self) -> bool:
        return bool(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def append(self, value: Any) -> None:
        self._own.append(value)

    def clear(self) -> None:
        self._own.clear()


class Token:
    """``run_dir_lock._TOKEN`` of the running process."""

    def __str__(self) -> str:
        return f"token-{current().pid}"


class StartedProcess:
    """``subprocess.Popen``: a rank."""

    def __init__(self, process: Process) -> None:
        self.process, self.pid = process, process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.process.end is not None:
            self.process.is_reaped = True
            self.returncode = self.process.end
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = world().now + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if world().now >= end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            self.process.waiting.append(wait := world().new_wait())
            world().block(wait, max(0.0, end - world().now) if timeout is not None else None)
        return code


def state_and_parent(pid: int) -> tuple[str, int]:
    """What ``/proc`` says of a process."""
    process = world().processes.get(pid)
    if process is None or process.is_reaped:
        raise FileNotFoundError
    if process.end is not None:
        letter = "Z"
    elif process.is_stopped:
        letter = "T"
    else:
        letter = "D" if process.main.is_in_disk else "S"
    return letter, process.parent_pid


MODULES: dict[str, Any] = {
    "os": Os(os),
    "time": Time(time),
    "signal": Signal(signal),
    "threading": Threading(threading),
    "sys": Sys(sys),
    "socket": Sockets(socket),
    "fcntl": Locks(fcntl),
    "uuid": Uuid(),
    "secrets": Secrets(),
    "faulthandler": FaultHandler(),
    "tempfile": TemporaryFolders(),
    "click": Click(click),
    "atexit": AtExit(),
}


@contextlib.contextmanager
def replaced(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context in which these attributes of objects have these values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def module_changes(module: ModuleType, names: str) -> list[tuple[Any, str, Any]]:
    """Stand-ins for these modules, in the globals of another one."""
    return [(module, name, MODULES[name]) for name in names.split()]


def folder_in_memory() -> Path:
    """Where the simulated disks are."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path("/tmp")
