"""Small files that other processes read at any time: whole or absent, though perhaps not yet on the disk."""

import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name, and rename it. Several processes, and nodes, may do so at the same time.

    Raises:
        OSError: it cannot be written, nor its folder made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    draft.write_bytes(content)
    draft.replace(path)
