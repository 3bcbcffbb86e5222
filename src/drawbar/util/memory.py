"""The memory of this machine."""

import os
from contextlib import suppress
from pathlib import Path

_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of cgroup versions 2 and 1."""


def usable_memory() -> int:
    """Bytes of memory that the processes here may use together: the container's limit, if it has one."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # ValueError: "max"
            return min(physical, int(Path(path).read_text()))
    return physical
