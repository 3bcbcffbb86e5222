"""Commands of drawbar on a disk that fails or is slow, or that they are killed on, at a call of a test's choice.

``faulty_disk.c`` stands between these processes and the system: see there. The commands are forked from a process that
has it preloaded and has imported everything: ``faulty_disk_server.py``.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from programs import need_programs

TESTS = Path(__file__).parent
ALWAYS = 10**9
"""``times`` of a fault that stays."""


@dataclass(frozen=True)
class Ended:
    """A command on the faulty disk."""

    code: int
    """Of several ranks, that of the first that failed. Negative: the signal that killed it."""
    output: str
    calls: list[str]
    """What changed files, in order: the call, and the path in the folder."""


class FaultyDisk:
    """Use as a context manager; several threads may run commands at the same time.

    Args:
        folder: for the library and the output of commands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "faulty_disk.so"
        self._name = f"drawbar-faulty-disk-{os.getpid()}-{id(self)}"

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            pytest.skip("no Linux here: calls of the system cannot be made to fail")
        need_programs("gcc")
        source = str(TESTS / "faulty_disk.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(self._library), source, "-ldl"], check=True)
        self._server = subprocess.Popen(
            [sys.executable, str(TESTS / "faulty_disk_server.py"), self._name],
            env={**os.environ, "LD_PRELOAD": str(self._library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "listening\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        folder: Path,
        *,
        at: int = 0,
        times: int = 1,
        error: int = 0,
        calls: Sequence[str] = (),
        rank: str = "",
        ranks: int = 1,
        together: bool = False,
        without: Path | None = None,
        slow: Path | None = None,
        delay: float = 0.0,
        timeout: int = 120,
    ) -> Ended:
        """``drawbar ARGUMENTS`` in ``cwd``.

        Args:
            folder: calls that change files in it are counted.
            at: number of the call at which the process is killed, or fails; 0 for none.
            times: how many calls fail, from that one on.
            error: its error number; 0 to be killed.
            calls: names of the calls that count; empty for all that change files.
            rank: the one that counts, where there are several; ``*`` for all of them.
            ranks: how many processes to start, as ranks that meet at a store, as torchrun does.
            together: where one rank is killed, kill the others at the same moment; else they get a SIGTERM.
            without: a folder in ``folder`` where calls are not counted.
            slow: a folder in ``folder`` where each call takes ``delay`` seconds longer.
        """
        output = Path(tempfile.mkdtemp(dir=self._folder))
        log = output / "calls"
        env = {
            "FAULTY_FOLDER": str(folder),
            "FAULTY_EXCEPT": str(without or ""),
            "FAULTY_RANK": rank,
            "FAULTY_AT": str(at),
            "FAULTY_TIMES": str(times),
            "FAULTY_ERRNO": str(error),
            "FAULTY_CALLS": " ".join(calls),
            "FAULTY_SLOW": str(slow or ""),
            "FAULTY_DELAY": str(round(delay * 1000)),
            "FAULTY_LOG": str(log),
        }
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": env, "output": str(output)}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{self._name}")
            more = {"ranks": ranks, "together": together, "timeout": timeout}
            connection.sendall(json.dumps(request | more).encode() + b"\n")
            code = int(connection.makefile().readline())
        text = "".join(path.read_text() for path in sorted(output.glob("*/0.*")))
        lines = log.read_text().splitlines() if log.exists() else []
        shutil.rmtree(output)
        return Ended(code, text, [line.partition(" ")[2] for line in lines])
