"""Run a function in a process of its own: nothing that was imported, allocated or warmed up before counts for it."""

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar.threads import SLEEP_SOON

ROOT = Path(__file__).resolve().parents[2]


class MeasurementFailed(Exception):
    """The function raised, or its process ended; the message ends with what it wrote."""


class TookTooLong(MeasurementFailed):
    """Its time was over, and it was killed."""


@dataclass(frozen=True)
class Call:
    """A function to be run in fresh processes."""

    function: str
    """``package.module:function``; it takes keyword arguments and returns what JSON can hold."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    """Processes that run it as ranks of one job, with torchrun's variables; the cores are shared out to them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 1800


@dataclass(frozen=True)
class Started:
    """The processes of a call."""

    call: Call
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    spawned: float
    """``time.time()``."""

    @property
    def deadline(self) -> float:
        return self.spawned + self.call.timeout

    def result(self) -> dict[str, Any]:
        """Wait for the end: what the function returned on rank 0, and ``spawned``.

        Raises:
            MeasurementFailed: see there.
        """
        failed = _wait(self.processes, self.deadline)
        if failed is not None:
            written = (self.folder / f"{failed}.log").read_text(errors="replace")[-3000:]
            code = self.processes[failed].poll()
            what = f"{self.call.function} on rank {failed}"
            if code is None:
                raise TookTooLong(f"{what} took too long:\n{written}")
            raise MeasurementFailed(f"{what} ended with {code}:\n{written}")
        return {**json.loads((self.folder / "0.json").read_text()), "spawned": self.spawned}


def start(call: Call, stack: ExitStack, inherited: Sequence[int] = ()) -> Started:
    """Start the processes of a call; the end of ``stack`` kills them.

    Args:
        inherited: descriptors that stay open in them.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    spec = json.dumps({"function": call.function, "arguments": dict(call.arguments)})
    spawned, port, processes = time.time(), _free_port(), []
    for rank in range(call.ranks):
        log = stack.enter_context((folder / f"{rank}.log").open("w+"))
        command = [sys.executable, str(Path(__file__).with_name("child.py")), spec, str(folder / f"{rank}.json")]
        environment = plain_environment() | _rank_variables(rank, call.ranks, port) | dict(call.environment)
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=log, pass_fds=tuple(inherited)
        )
        stack.callback(_end, process)
        processes.append(process)
    return Started(call, folder, processes, spawned)


def in_fresh_process(call: Call) -> dict[str, Any]:
    """What the function returns on rank 0; and ``spawned``, when the process was started (``time.time()``).

    Raises:
        MeasurementFailed: see there.
    """
    with ExitStack() as stack:
        return start(call, stack).result()


def in_this_process(call: Call) -> dict[str, Any]:
    """The same without a process of its own: for tests, on one rank."""
    return {**load_function(call.function)(**call.arguments), "spawned": time.time()}


def load_function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def plain_environment() -> dict[str, str]:
    """Without what importing drawbar here has set: the program that is measured says itself how its threads wait."""
    environment = {name: value for name, value in os.environ.items() if SLEEP_SOON.get(name) != value}
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    threads = max(1, (os.cpu_count() or 1) // ranks)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in (place | {"OMP_NUM_THREADS": threads}).items()} | {
        "MASTER_ADDR": "127.0.0.1"
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Until all have ended well; the first that has not, or is not over at the deadline: its peers wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        if bad is not None or None not in codes:
            return bad
        if time.time() > deadline:
            return codes.index(None)
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
