"""``RemoteOwner``: one process at a time writes a run's folder in an object store.

A process that starts creates ``owner/00000007.json``, one number above the highest present: if several do so at the
same time, the store lets one succeed. The process with the highest number is the owner. It rewrites its object every
half minute (a heartbeat), and checks before each commit that it still is the owner. A process that finds an owner waits
to see whether a heartbeat comes: the clocks of two machines are never compared.
"""

import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

from drawbar.checkpoint.object_store import ObjectStore
from drawbar.errors import ExitCode, UserError

logger = logging.getLogger("drawbar")

HEARTBEAT_SECONDS = 30.0
"""Seconds between two heartbeats."""
_OWNER_TIMEOUT_SECONDS = 4 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which an owner counts as gone."""
_FOLDER = "owner"
_MAX_OBJECT_BYTES = 4096
"""Upper limit on the size of an owner's object, in bytes."""
_silent_owners: dict[str, dict[str, Any]] = {}
"""By the URL of a store's folder: the content of the last owner's object, where this process has waited in vain for a
heartbeat. It need not wait again as long as the object stays the same."""


class Superseded(UserError):
    """Another process owns the folder by now."""


class RemoteOwner:
    """This process's ownership of a run's folder in the store. Methods raise UserError where the store does not
    answer."""

    def __init__(self, store: ObjectStore, number: int) -> None:
        self._store = store
        self.number = number
        self._values = {**_this_process(), "session": uuid.uuid4().hex, "beat": 0, "ended": False}
        self.times_emptied = 0
        """How often no owner's object was left: somebody has emptied the folder, and copies may be gone, too."""

    @classmethod
    def claim(cls, store: ObjectStore, before: int) -> "RemoteOwner":
        """Become the owner.

        Args:
            before: number of the previous owner, as returned by ``wait_until_owner_ended``.

        Raises:
            Superseded: another process has become the owner since then.
        """
        owner = cls(store, before + 1)
        if not store.create(_object(owner.number), owner._content()):
            raise owner._superseded()
        owner.check()
        store.delete(_object(number) for number in _numbers(store) if number < owner.number)
        return owner

    def check(self) -> None:
        """Write this owner's object anew where none is left. Raises Superseded if another process is the owner by
        now."""
        newest = max(_numbers(self._store), default=0)
        if newest == 0:
            self.times_emptied += 1
            self._store.write(_object(self.number), self._content())
        elif newest != self.number:
            raise self._superseded()

    def heartbeat(self) -> None:
        """Send a heartbeat. Raises Superseded as ``check`` does."""
        self.check()
        self._values["beat"] += 1
        self._store.write(_object(self.number), self._content())

    def release(self) -> None:
        """Mark the ownership as ended, so that the next process need not wait for a timeout."""
        self._values["ended"] = True
        self._store.write(_object(self.number), self._content())

    def _content(self) -> bytes:
        return json.dumps(self._values).encode()

    def _superseded(self) -> Superseded:
        newest = max(_numbers(self._store), default=0)
        return Superseded(
            f"{_describe_process(_read(self._store, newest))} writes this run's checkpoints to the store now",
            where=self._store.url,
            remedy="stop one of the two; a run of its own needs another run.name, or another checkpoint.remote",
            exit_code=ExitCode.FAILED,
        )


def wait_until_owner_ended(store: ObjectStore, ended: int | None) -> int:
    """Wait until the last owner is known to have ended, and return its number; 0 where there was none.

    Args:
        ended: the number of an owner that has ended: this run's own last process.

    Raises:
        UserError: another process is the owner, and lives; or the store does not answer.
    """
    number = max(_numbers(store), default=0)
    found = _read(store, number)
    if number in (0, ended) or found.get("ended") is True or _is_gone(found) or found == _silent_owners.get(store.url):
        return number
    logger.info(
        "%s was the last to write to %s: waiting %.0f s to see whether it still does",
        _describe_process(found),
        store.url,
        _OWNER_TIMEOUT_SECONDS,
    )
    end = time.monotonic() + _OWNER_TIMEOUT_SECONDS
    while time.monotonic() < end:
        time.sleep(min(HEARTBEAT_SECONDS / 10, max(0.0, end - time.monotonic())))
        newest = max(_numbers(store), default=0)
        now = _read(store, newest)
        if newest == number and now.get("ended") is True:
            return number
        if newest != number or now != found:
            raise UserError(
                f"{_describe_process(now)} is training this run: it writes its checkpoints to the same folder",
                where=store.url,
                remedy="wait for it, stop it, or choose another run.name or checkpoint.remote",
            )
    _silent_owners[store.url] = found
    return number


def check_store_writable(store: ObjectStore) -> None:
    """Raises UserError where the store cannot be written to."""
    store.write(_object(0), b"{}")  # number 0 is nobody's


def _numbers(store: ObjectStore) -> list[int]:
    """The numbers of the owners' objects: of nine digits at most, as no run is started a billion times."""
    names = (name.removesuffix(".json") for name in store.sizes(_FOLDER))
    return [int(name) for name in names if name.isdecimal() and len(name) <= 9]


def _object(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"


def _read(store: ObjectStore, number: int) -> dict[str, Any]:
    """The content of an owner's object; empty where it is missing or cannot be parsed."""
    if not 0 < store.sizes(_FOLDER).get(f"{number:08d}.json", 0) <= _MAX_OBJECT_BYTES:
        return {}
    try:
        values = json.loads(store.read(_object(number)))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _describe_process(values: dict[str, Any]) -> str:
    return f"process {values.get('pid', '?')} on {values.get('host', 'another machine')}"


def _this_process() -> dict[str, Any]:
    """Identifies this process; ``machine`` is None where the system does not provide it."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "machine": _machine(), "began": _start_time(os.getpid())}


def _is_gone(values: dict[str, Any]) -> bool:
    """Whether the process ran on this machine and has ended."""
    machine, pid = _machine(), values.get("pid")
    if machine is None or values.get("machine") != machine or not isinstance(pid, int):
        return False
    return _start_time(pid) != values.get("began")


def _machine() -> str | None:
    """Boot id of this machine and the PID namespace: containers may share the boot id."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Start time of a process in ticks since boot; None where there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
