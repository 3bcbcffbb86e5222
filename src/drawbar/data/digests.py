"""Digests of data files: one rank reads a file for all ranks that see it, and again only when it has changed."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from drawbar.data.heartbeat import replace_text
from drawbar.data.sources import Records
from drawbar.distributed.process_group import Distributed
from drawbar.util.atomic_files import identity

FILE = "digests.json"
"""Beside the encoded data."""
MAX_ENTRIES = 100_000
"""The most digests that are kept; when there are more, the oldest are dropped."""
MIN_AGE_NS = 2 * 10**9
"""Nanoseconds a file must be unchanged before its times are trusted: some file systems have 2 s timestamps."""


class DigestCache:
    """Digests of the content of files, by path and ``identity``: a file that has not changed is not read again.

    Args:
        folder: where they are kept; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._stored = _read(self._path)
        self._new: dict[str, str] = {}

    def of(self, file: Path) -> str:
        """Hex digest of every byte of a file. Raises OSError where it cannot be read."""
        found, began = identity(file), time.time_ns()
        key = json.dumps([str(file.absolute()), *found])
        digest = self._stored.get(key)
        if digest is None:
            digest = file_digest(file)
            _size, mtime, ctime, _inode = found
            if identity(file) == found and began - max(mtime, ctime) > MIN_AGE_NS:
                self._new[key] = digest
        return digest

    def save(self) -> None:
        """Save the digests, if the folder is writable."""
        if self._new:
            others = _read(self._path)  # that other processes have kept in the meantime
            latest = list({**others, **self._new}.items())[-MAX_ENTRIES:]
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._path, json.dumps(dict(latest), indent=0))


def _read(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text("utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def file_digest(file: Path) -> str:
    """Hex digest of every byte of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_for_all(records: Records, kept: DigestCache, world: Distributed) -> str:
    """``records.digest``. Of the ranks that see the same files, one reads them. Every rank must call this function."""
    leader = world.lowest_rank_with_same(records.identity())
    own = None
    if leader == world.rank:
        with world.working("hashing the data"):
            own = records.digest(kept.of)
    found = world.all_gather(own)[leader]
    assert found is not None
    return found
