"""Facts about a machine and its folders, gathered without torch; ``findings`` says what is wrong there."""

import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drawbar.jobs.node.network import address_of_host_name, interface_address
from drawbar.threads import usable_cores

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """Sizes are in bytes, and those of the container where there is one; a limit of None is none."""

    name: str
    system: str
    cores: float
    """What this process gets: a container's quota may be a fraction."""
    memory: int
    memory_available: int
    shared_memory_free: int | None
    """None where there is no /dev/shm."""
    open_files: int | None
    locked_memory: int | None
    address: str
    """What its host name stands for; empty where nothing knows it."""
    interfaces: Mapping[str, str]
    """The IPv4 address of each network interface, by its name; empty where it has none."""
    has_infiniband: bool


def look_at_machine(shared_memory: str = "/dev/shm") -> Machine:
    """The facts about this machine."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(physical, _container_memory() or physical)
    return Machine(
        name=platform.node(),
        system=f"{platform.platform()}, Python {platform.python_version()}",
        cores=min(usable_cores(), _container_cores() or usable_cores()),
        memory=memory,
        memory_available=min(memory, _available_memory() or memory),
        shared_memory_free=shutil.disk_usage(shared_memory).free if os.path.isdir(shared_memory) else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        address=address_of_host_name() or "",
        interfaces={name: interface_address(name) or "" for _, name in socket.if_nameindex()},
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _available_memory() -> int | None:
    lines = _read("/proc/meminfo").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_memory() -> int | None:
    old = "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # of cgroup version 1
    text = _read("/sys/fs/cgroup/memory.max") or _read(old)
    return int(text) if text.isdigit() else None


def _container_cores() -> float | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


@dataclass(frozen=True)
class Folder:
    """Facts about a folder; if it does not exist, about the nearest folder above it that does."""

    name: str
    """The setting or variable that names it: ``run.dir``, ``TMPDIR``."""
    path: str
    place: str
    """The folder itself, or where it does not exist the nearest that does."""
    free: int
    """Bytes."""
    error: str
    """Why it cannot be written; empty where it can."""
    has_locks: bool
    """Whether flock works."""
    can_execute: bool
    """Whether programs and libraries in it may be run (mounted without ``noexec``)."""

    @property
    def change(self) -> str:
        """How to make a run use another folder."""
        return f"{'export' if self.name.isupper() else 'set'} {self.name}=ANOTHER_FOLDER"


def look_at_folder(name: str, path: str | Path) -> Folder:
    """Facts about a folder. 1 MiB is written there and removed: permissions do not show quotas."""
    wanted = Path(path).expanduser().absolute()
    place = wanted
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    error, has_locks = "", False
    try:
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_locks = True
            file.write(bytes(MIB))
            file.flush()
            os.fsync(file.fileno())
    except OSError as trouble:
        error = trouble.strerror or str(trouble)
    try:
        disk = os.statvfs(place)
        free, can_execute = disk.f_bavail * disk.f_frsize, not disk.f_flag & getattr(os, "ST_NOEXEC", 0)
    except OSError:
        free, can_execute = 0, True
    return Folder(name, str(wanted), str(place), free, error, has_locks, can_execute)
