"""Processes of this machine."""

import os


def process_exists(pid: int) -> bool:
    """Whether there is a process with this number, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
