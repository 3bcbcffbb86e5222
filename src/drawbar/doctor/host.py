"""The machine itself: cores and threads, memory, shared memory, limits, the compiler."""

import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawbar.doctor.finding import Finding, Fix, Level, size
from drawbar.util.cores import usable_cores

SECTION = "Machine"
GIB = 2**30
FEWEST_FILES, FEW_FILES = 256, 1024
"""Open files: a run has one for each file of its data and each connection to another rank."""
COMPILER_SECONDS = 20
_PROGRAM = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


@dataclass(frozen=True)
class HostFacts:
    """Facts. Sizes are in bytes; a limit of None is none."""

    name: str
    system: str
    cores: int
    """That this process may use."""
    all_cores: int
    cpu_quota: float | None
    """Cores' worth of time that the container gets."""
    omp_threads: str | None
    memory: int
    memory_available: int
    memory_limit: int | None
    shared_memory: int | None
    """None where there is no /dev/shm."""
    shared_memory_free: int | None
    open_files_limit: int
    open_files_hard_limit: int


def collect_host(environ: Mapping[str, str] = os.environ, shared_memory: str = "/dev/shm") -> HostFacts:
    usage = shutil.disk_usage(shared_memory) if os.path.isdir(shared_memory) else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    all_cores = os.cpu_count() or 1
    return HostFacts(
        name=platform.node(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        cores=usable_cores(),
        all_cores=all_cores,
        cpu_quota=_cpu_quota(),
        omp_threads=environ.get("OMP_NUM_THREADS"),
        memory=memory,
        memory_available=_available_memory() or memory,
        memory_limit=_memory_limit(memory),
        shared_memory=usage.total if usage else None,
        shared_memory_free=usage.free if usage else None,
        open_files_limit=_files(soft),
        open_files_hard_limit=_files(hard),
    )


def _files(limit: int) -> int:
    return 2**20 if limit == resource.RLIM_INFINITY else limit


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _available_memory() -> int | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _memory_limit(memory: int) -> int | None:
    """Of the container: cgroup version 2, then 1."""
    text = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes") or "max"
    return int(text) if text.isdigit() and int(text) < memory else None


def _cpu_quota() -> float | None:
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    if quota == "max":
        quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "-1"
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or "1"
    return int(quota) / int(period) if quota.isdigit() and int(quota) > 0 and int(period) > 0 else None


def check_host(host: HostFacts, processes: int) -> Iterator[Finding]:
    """Args: processes: that a run would have on this machine."""
    yield Finding(SECTION, "host", Level.OK, f"{host.name}: {host.system}")
    yield _cores(host, processes)
    yield _threads(host, processes)
    yield _memory(host)
    yield _shared_memory(host)
    yield _open_files(host)


def _cores(host: HostFacts, processes: int) -> Finding:
    of = "" if host.cores == host.all_cores else f" of {host.all_cores}, as this process's affinity has it"
    what = f"{host.cores} core{'s' * (host.cores > 1)}{of}"
    usable = min(host.cores, host.cpu_quota or host.cores)
    if host.cpu_quota is not None and host.cpu_quota < host.cores:
        what += f", with a quota of CPU time for {host.cpu_quota:g}"
    if processes > usable:
        fewer = f"launch.nproc={max(1, int(usable))}"
        fix = Fix("", f"give the job more cores (Slurm: --cpus-per-task; docker: --cpus), or set {fewer}")
        return Finding(SECTION, "CPU", Level.WARNING, f"{what}, but {processes} processes", "they take turns", fix)
    return Finding(SECTION, "CPU", Level.OK, what)


def _threads(host: HostFacts, processes: int) -> Finding:
    share = max(1, int(min(host.cores, host.cpu_quota or host.cores)) // processes)
    each = f"{share} thread{'s' * (share > 1)}" + (f" in each of {processes} processes" if processes > 1 else "")
    given = host.omp_threads
    if given is None:
        return Finding(SECTION, "OMP threads", Level.OK, each, "OMP_NUM_THREADS is not set")
    fix = Fix(f"export OMP_NUM_THREADS={share}")
    if not (given.strip().isdigit() and int(given) > 0):
        what = f"OMP_NUM_THREADS={given!r} is no positive whole number, and is not heeded"
        return Finding(SECTION, "OMP threads", Level.WARNING, what, fix=fix)
    if int(given) > share:
        what = f"OMP_NUM_THREADS={given}, but there are cores for {each}"
        return Finding(SECTION, "OMP threads", Level.WARNING, what, "threads that take turns are slow", fix)
    return Finding(SECTION, "OMP threads", Level.OK, f"{given.strip()} in each process", "OMP_NUM_THREADS")


def _memory(host: HostFacts) -> Finding:
    limit = f", of which the container gets {size(host.memory_limit)}" if host.memory_limit else ""
    available = min(host.memory_available, host.memory_limit or host.memory_available)
    what = f"{size(host.memory)}{limit}; {size(available)} available"
    if available < 2 * GIB:
        level = Level.PROBLEM if available < GIB / 2 else Level.WARNING
        fix = Fix(
            "ps aux --sort=-rss | head", "end what is not needed, or ask for more (Slurm: --mem; docker: --memory)"
        )
        return Finding(SECTION, "memory", level, what, "a process with torch alone takes about 0.5 GiB", fix)
    return Finding(SECTION, "memory", Level.OK, what)


def _shared_memory(host: HostFacts) -> Finding:
    if host.shared_memory is None or host.shared_memory_free is None:
        return Finding(SECTION, "/dev/shm", Level.NOTE, "there is none", "NCCL wants to use it")
    what = f"{size(host.shared_memory)}, {size(host.shared_memory_free)} free"
    if host.shared_memory_free < GIB // 4:
        fix = Fix("sudo mount -o remount,size=8G /dev/shm", "in a container: docker run --shm-size=8g (or --ipc=host)")
        if host.shared_memory > GIB:
            fix = Fix("ls -lS /dev/shm", "and remove what ended programs have left there")
        why = "NCCL between the GPUs of a machine ends with a bus error when it is full"
        return Finding(SECTION, "/dev/shm", Level.WARNING, what, why, fix)
    return Finding(SECTION, "/dev/shm", Level.OK, what)


def _open_files(host: HostFacts) -> Finding:
    what = f"{host.open_files_limit:,} at once"
    if host.open_files_limit < FEW_FILES:
        level = Level.PROBLEM if host.open_files_limit < FEWEST_FILES else Level.WARNING
        may = host.open_files_hard_limit >= FEW_FILES
        fix = (
            Fix(f"ulimit -n {min(host.open_files_hard_limit, 65536)}")
            if may
            else Fix("", "ask root for more: nofile in limits.conf")
        )
        return Finding(SECTION, "open files", level, what, "each data file and each connection takes one", fix)
    return Finding(SECTION, "open files", Level.OK, what)


@dataclass(frozen=True)
class Compiler:
    """Facts about what torch.compile and DeepSpeed's kernels need."""

    path: str | None
    error: str
    """Empty where it compiled a small program."""
    has_python_headers: bool


def collect_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """The compiler that torch takes: that of ``CXX``, or g++."""
    path = shutil.which(environ.get("CXX", "g++"), path=environ.get("PATH"))
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return Compiler(path, _try_compiler(path, environ) if path else "not found", headers)


def _try_compiler(path: str, environ: Mapping[str, str]) -> str:
    command = [path, "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(
            command, input=_PROGRAM, text=True, capture_output=True, timeout=COMPILER_SECONDS, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return "" if done.returncode == 0 else lines[0]


def check_compiler(compiler: Compiler, compiles: bool, on_gpu: bool) -> Finding:
    """Args: compiles: whether the run has ``parallel.compile``."""
    without = "; or set parallel.compile=false" if compiles else ""
    install = Fix("sudo apt-get install g++", f"or: dnf install gcc-c++; conda install -c conda-forge gxx{without}")
    trouble = Level.PROBLEM if compiles else Level.NOTE
    why = "parallel.compile is on" if compiles else "torch.compile and DeepSpeed's kernels would need one"
    if compiler.path is None:
        return Finding(SECTION, "C++ compiler", trouble, "there is none (CXX, or g++ on PATH)", why, install)
    if compiler.error:
        return Finding(SECTION, "C++ compiler", trouble, f"{compiler.path} fails: {compiler.error}", why, install)
    if on_gpu and not compiler.has_python_headers:
        fix = Fix("sudo apt-get install python3-dev", "of this Python's version")
        return Finding(SECTION, "C++ compiler", trouble, "Python.h is missing, which triton compiles with", why, fix)
    return Finding(SECTION, "C++ compiler", Level.OK, f"{compiler.path} compiles")
