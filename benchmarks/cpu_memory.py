"""How much torch's CPU allocator has given out, at most: ``cpu_memory.cpp``, compiled where it is needed."""

import ctypes
import shutil
import subprocess
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")


def build_counter(folder: Path) -> Path:
    """Compile the counting allocator into ``folder``. Needs a C++ compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise SystemExit("a C++ compiler (c++) is needed to measure memory")
    library = folder / "cpu_memory.so"
    paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *paths, str(SOURCE), "-o", str(library), "-lc10"]
    subprocess.run(command, check=True)
    return library


class CpuMemory:
    """The count of this process, from here on.

    Args:
        library: what ``build_counter`` made.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.peak.restype = ctypes.c_longlong
        self._library.start()

    def begin_peak(self) -> None:
        """Look for the peak from here on."""
        self._library.begin_peak()

    def peak(self) -> int:
        """The most bytes at once, on all threads."""
        return int(self._library.peak())
