"""Facts about a machine and its folders, gathered without torch; what is wrong there, and the remedies: pure
functions from facts to findings.

``drawbar doctor`` prints all of them; ``drawbar submit`` refuses a job for the problems of its folder and its
partition. Those of GPUs, and of nodes that differ, are in :mod:`drawbar.launch.findings`.
"""

import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.jobs.node.network import address_of_host_name, interface_address, read_text
from drawbar.launch.findings import Finding, Gpus, Level, problem
from drawbar.threads import usable_cores
from drawbar.util.byte_sizes import readable
from drawbar.util.memory import usable_memory

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """Sizes are in bytes, and those of the container where there is one; None means no limit."""

    name: str
    system: str
    cores: float
    """What this process gets: a container's quota may be a fraction."""
    memory: int
    memory_available: int
    shared_memory_free: int | None
    """None if there is no /dev/shm."""
    open_files: int | None
    locked_memory: int | None
    address: str
    """The address of its host name; empty if it cannot be resolved."""
    interfaces: Mapping[str, str]
    """The IPv4 address of each network interface, by its name; empty if it has none."""
    has_infiniband: bool


def look_at_machine(shared_memory: str = "/dev/shm") -> Machine:
    """The facts about this machine."""
    memory = usable_memory()
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


def _available_memory() -> int | None:
    lines = read_text(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_cores() -> float | None:
    quota, _, period = read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
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
    """Why it cannot be written; empty if it can."""
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


FEW_FILES = 1024
"""Open files: a run has one for each file of its data and each connection to another rank."""
LITTLE_LOCKED = 64 * MIB
"""Bytes of locked memory: InfiniBand's driver locks NCCL's buffers."""
INSTALL_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu126"
"""cu126 is a CUDA version: an old one, which most drivers support."""


def _warn_if(is_trouble: bool, where: str, what: str, remedy: str) -> Finding:
    return Finding(where, Level.WARNING, what, remedy) if is_trouble else Finding(where, Level.OK, what)


def of_machine(
    machine: Machine, environ: Mapping[str, str], processes: int, many_nodes: bool = False
) -> Iterator[Finding]:
    """Args:
    processes: that a run would have on this machine.
    many_nodes: whether the run is on several machines.
    """
    yield Finding("host", Level.OK, f"{machine.name}: {machine.system}")
    share = max(1, int(machine.cores) // processes)
    yield _warn_if(
        processes > machine.cores,
        "cores",
        f"{machine.cores:g} for {processes} process{'es' * (processes > 1)}",
        f"set launch.nproc={max(1, int(machine.cores))}, or ask for more (Slurm: --cpus-per-task)",
    )
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > share:
        what = f"{threads} threads in each process, but cores for {share}: threads that take turns are slow"
        yield Finding("OMP_NUM_THREADS", Level.WARNING, what, f"export OMP_NUM_THREADS={share}")
    yield _warn_if(
        machine.memory_available < 2 * GIB,
        "memory",
        f"{readable(machine.memory)}, {readable(machine.memory_available)} available",
        "end what is not needed (ps aux --sort=-rss), or ask for more (Slurm: --mem, docker: --memory)",
    )
    if machine.shared_memory_free is not None:
        yield _warn_if(
            machine.shared_memory_free < GIB // 4,
            "/dev/shm",
            f"{readable(machine.shared_memory_free)} free",
            "NCCL dies of a bus error when it is full: docker run --shm-size=8g (or --ipc=host), or remove "
            "what ended programs have left there (ls -lS /dev/shm)",
        )
    yield from _limit_findings(machine)
    yield from _network_findings(machine, environ, many_nodes)


def _limit_findings(machine: Machine) -> Iterator[Finding]:
    files, locked = machine.open_files, machine.locked_memory
    what = "no limit" if files is None else f"{files:,} at once"
    few = files is not None and files < FEW_FILES
    remedy = "ulimit -n 65536, or ask root for more (nofile in limits.conf)"
    yield _warn_if(few, "open files", what, remedy)
    if machine.has_infiniband and locked is not None and locked < LITTLE_LOCKED:
        what = f"{readable(locked)}: NCCL cannot register its buffers with InfiniBand (ibv_reg_mr fails)"
        remedy = "ulimit -l unlimited (Slurm: LimitMEMLOCK=infinity for slurmd; docker: --ulimit memlock=-1)"
        yield Finding("locked memory", Level.WARNING, what, remedy)


def _network_findings(machine: Machine, environ: Mapping[str, str], many_nodes: bool) -> Iterator[Finding]:
    addresses = [f"{name} ({address})" for name, address in machine.interfaces.items() if address]
    yield Finding("interfaces", Level.OK, ", ".join(addresses) or "none has an address")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        if value and not _names_interface(variable, value, machine.interfaces):
            what = f"{value} is no interface of this machine: it has {', '.join(machine.interfaces)}"
            yield problem(variable, what, f"unset {variable}, or set it to one of these")
    is_loopback = not machine.address or machine.address.startswith("127.")  # gloo takes that, too
    if many_nodes and is_loopback and "GLOO_SOCKET_IFNAME" not in environ:
        what = f"{machine.name} is {machine.address or 'unknown'}, where other nodes do not find this one"
        remedy = "export GLOO_SOCKET_IFNAME=INTERFACE, the one that leads to the others"
        yield Finding("host name", Level.WARNING, what, remedy)


def _names_interface(variable: str, value: str, names: Mapping[str, str]) -> bool:
    """gloo takes names; NCCL takes beginnings, after ``=`` names, and after ``^`` those to leave out."""
    wanted = value.lstrip("^=").split(",")
    if value.startswith("^"):
        return True
    if variable.startswith("NCCL") and not value.startswith("="):
        return any(name.startswith(tuple(wanted)) for name in names)
    return any(name in wanted for name in names)


def of_folder(
    folder: Folder, enough: int, least: int = 64 * MIB, needed: bool = True, builds: bool = False
) -> Iterator[Finding]:
    """Args:
    enough: bytes, below which there is a warning.
    least: bytes, below which there is a problem.
    needed: whether a run fails if the folder cannot be written.
    builds: whether libraries are built there, and loaded.
    """
    trouble = Level.PROBLEM if needed else Level.WARNING
    remedy = f"free some space there, or {folder.change}"
    if folder.error:
        what = f"{folder.path} cannot be written: {folder.error}"
        yield Finding(folder.name, trouble, what, f"make {folder.place} yours; {remedy}")
        return
    what = f"{folder.path}: {readable(folder.free)} free"
    if folder.free < least:
        what = f"the disk is nearly full: {what}, {readable(least)} needed"
        yield Finding(folder.name, trouble, what, remedy)
    else:
        yield _warn_if(folder.free < enough, folder.name, what, remedy)
    if not folder.has_locks:
        what = f"{folder.path}: flock does not work, so two runs could write to it at once"
        remedy = f"mount it with locks (NFS: without nolock; Lustre: -o flock), or {folder.change}"
        yield Finding(folder.name, Level.WARNING, what, remedy)
    if builds and not folder.can_execute:
        what = f"{folder.path} is mounted noexec: what torch.compile builds there cannot be loaded"
        yield Finding(folder.name, Level.WARNING, what, folder.change)


def of_torch(torch: Mapping[str, Any], gpus: Gpus, device: str) -> Iterator[Finding]:
    """Args:
    torch: what the doctor's probe says of torch here.
    device: the setting.
    """
    if "error" in torch:
        remedy = "python -c 'import torch; print(torch.zeros(1))' must work; else reinstall torch"
        yield problem("torch", f"torch does not work: {torch['error']}", remedy)
        return
    build = f"{torch['torch']}, built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'the CPU'}"
    if gpus.driver and not torch["gpus"] and device in ("auto", "cuda"):
        what = f"{build}, sees no GPU of the NVIDIA driver {gpus.driver}. {torch['reason']}".rstrip(". ")
        remedy = f"unset CUDA_VISIBLE_DEVICES; or take a torch for this driver: {INSTALL_TORCH}"
        yield Finding("torch", Level.WARNING, what, remedy)
    else:
        driver = f"NVIDIA driver {gpus.driver}" if gpus.driver else "no nvidia-smi"
        yield Finding("torch", Level.OK, f"{build}; {driver}; GPUs: {torch['gpus']}")
    if "device" in torch["errors"]:
        error = torch["errors"]["device"]
        yield problem(error.get("where") or "device", error["what"], error["remedy"] or "")
    else:
        products = f"products in {torch['precision']}, weights and sums in fp32"
        yield Finding("device", Level.OK, f"{torch['device']} (device={device}); {products}")


def of_hub(cached: Mapping[str, bool], obstacle: str) -> Iterator[Finding]:
    """Args:
    cached: the names of the Hub that a configuration has, and whether they are in the cache.
    obstacle: why the Hub cannot be asked for those that are not; empty if it can.
    """
    for name, is_cached in cached.items():
        if obstacle and not is_cached:
            remedy = f"hf download {name}, where there is a network, into the same HF_HOME; or set a folder"
            yield problem(name, f"not in the cache, and {obstacle}", remedy)
        else:
            place = "in the cache" if is_cached else "on the Hugging Face Hub; the run downloads it"
            yield Finding(name, Level.OK, place)
