"""Checkpoints that are complete or absent, whatever happens to the process that writes them.

Independent of the strategy: a rank writes a full ``Snapshot``, or its own shards (a part); every rank may read.
"""

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.load import read, read_state
from drawbar.checkpoint.save import host_copies
from drawbar.checkpoint.space import check_space, check_writable, required_bytes
from drawbar.checkpoint.writer import AsyncWriter

__all__ = [
    "AsyncWriter",
    "CheckpointDirectory",
    "Snapshot",
    "check_space",
    "check_writable",
    "host_copies",
    "read",
    "read_state",
    "required_bytes",
]
