"""Processes for tests, forked from a server that has torch and transformers imported already.

``run_cli`` runs the drawbar command line as a process of its own in about 0.2 s instead of 3 s; ``run_ranks`` runs
a function on several ranks of a real gloo group. Both end after a timeout, and show every process's output when one
fails.
"""

import errno
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forked import DEEPSPEED, DRAWBAR, TORCHRUN, fork_ranks, run_python

T = TypeVar("T")

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch must not touch the GPUs to find them: it is to fork
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preloaded"])
_running: list[BaseProcess] = []


@dataclass(frozen=True)
class Finished:
    """A process that ended by itself."""

    code: int
    out: str
    err: str


def run_cli(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240) -> Finished:
    """``drawbar ARGUMENTS`` in ``cwd``."""
    return _run([*DRAWBAR, *arguments], cwd, env, timeout)


def run_script(
    script: Path, *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240
) -> Finished:
    """``python SCRIPT ARGUMENTS`` in ``cwd``."""
    return _run([str(script), *arguments], cwd, env, timeout)


def run_torchrun(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240) -> Finished:
    """``torchrun ARGUMENTS``, whose ranks are forked too."""
    return _run([*TORCHRUN, *arguments], cwd, env, timeout)


def run_deepspeed(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240) -> Finished:
    """``deepspeed ARGUMENTS``, whose ranks are forked too; the port is a free one unless ``arguments`` has another."""
    command = [*DEEPSPEED, f"--master_port={free_port()}", *arguments]
    return _run(command, cwd, {"DS_ACCELERATOR": "cpu", **(env or {})}, timeout)


def free_port() -> int:
    """A port at which nobody listens, of those that Linux gives to no connection (by default, it gives them 32768 and
    above): another test's connection could take one of these before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def _run(command: list[str], cwd: Path, env: dict[str, str] | None, timeout: float) -> Finished:
    with tempfile.TemporaryDirectory() as folder:
        process = _process(run_here, command, str(cwd), env or {}, folder)
        process.start()
        _wait([process], timeout, folder=Path(folder))
        code = process.exitcode
        assert code is not None
        return Finished(code, (Path(folder) / "0.out").read_text(), (Path(folder) / "0.err").read_text())


def start_cli(*arguments: str, cwd: Path, output: Path, env: dict[str, str] | None = None) -> BaseProcess:
    """The same, still running; its output goes to ``0.out`` and ``0.err`` in ``output``. A process group of its own."""
    process = _process(run_here, [*DRAWBAR, *arguments], str(cwd), env or {}, str(output))
    process.start()
    _running.append(process)
    return process


def kill_started() -> None:
    """Kill what ``start_cli`` has started and what still runs."""
    while _running:
        process = _running.pop()
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def wait_until(ready: Callable[[], T | None], what: str | Callable[[], object], seconds: float = 60) -> T:
    """The first value that is not None or False. Raises AssertionError after ``seconds``, with ``what`` it then is."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"waited {seconds:.0f}s in vain for {what() if callable(what) else what}"
        time.sleep(0.05)
    return found


def kill_when_logged(project: Path, command: tuple[str, ...], step: int) -> None:
    """Start the run, and SIGKILL its process group once it has logged ``step``."""
    output = project / f"output-{step}"
    output.mkdir()
    process = start_cli(*command, cwd=project, output=output)
    log = project / "runs" / "tiny" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert time.monotonic() < end, (output / "0.err").read_text()
        assert process.is_alive(), (output / "0.err").read_text()
        time.sleep(0.005)
    assert process.pid is not None
    with suppress(ProcessLookupError):  # on a busy machine it may have come to its end meanwhile
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def run_here(command: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    """``python COMMAND`` in this process, which is one of our own."""
    _enter(0, output, env)
    os.chdir(cwd)
    fork_ranks()
    run_python(command)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """``function(*arguments)`` on every rank at once; what each returned, in rank order.

    The ranks find their place in the environment, as under torchrun; nothing is joined for them.
    """
    with tempfile.TemporaryDirectory() as folder, _store(world_size) as port:
        processes = []
        pipes = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            place = {} if world_size == 1 else _place(rank, world_size, port)
            process = _process(_rank, function, arguments, rank, {**place, **(env or {})}, folder, sender)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        results = [_receive(pipe, process, timeout) for pipe, process in zip(pipes, processes, strict=True)]
        _wait(processes, timeout, folder=Path(folder))
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        if failed:
            raise AssertionError(f"ranks {failed} failed\n{_outputs(Path(folder))}")
        return results


@contextmanager
def _store(world_size: int) -> Iterator[int]:
    """A store that the ranks meet at, on a port that the operating system chose."""
    if world_size == 1:
        yield 0
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def _place(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    _start_server()
    return _context.Process(target=function, args=arguments)


@cache
def _start_server() -> None:
    with chdir(Path(__file__).parent):  # it looks there for what it is to import
        forkserver.ensure_running()


def _rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, env: dict[str, str], folder: str, sender: Any
) -> None:
    _enter(rank, folder, env)
    try:
        sender.send(function(*arguments))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the parent shows it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sender.close()
    os._exit(code)  # peers of a failed rank must not wait for its goodbyes


def _enter(number: int, folder: str, env: dict[str, str]) -> None:
    gc.freeze()  # what is imported already, which makes most of the work of a collection
    os.setpgid(0, 0)
    os.environ.update({"OMP_NUM_THREADS": "1", **env})  # tiny tensors: threads would only wait for one another
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for stream, name in ((1, "out"), (2, "err")):
        target = os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, stream)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _receive(pipe: Any, process: BaseProcess, timeout: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(timeout) else None
    except EOFError:
        return None


def _wait(processes: Sequence[BaseProcess], timeout: float, folder: Path) -> None:
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    if hung:
        raise AssertionError(f"processes {hung} still ran after {timeout:.0f}s\n{_outputs(folder)}")


def _outputs(folder: Path) -> str:
    parts = []
    for path in sorted(folder.glob("*.*")):
        text = path.read_text(errors="replace").strip()
        if text:
            parts.append(f"--- {path.name} ---\n{text[-6000:]}")
    return "\n".join(parts)
