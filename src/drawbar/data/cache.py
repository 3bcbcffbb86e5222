"""A content-addressed cache of encoded data: each entry is encoded once, by one process, even if several need it at the
same time.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from drawbar.data.columns import FolderStorage
from drawbar.data.dataset import EncodedDataset, read_samples, write_samples
from drawbar.data.encode import Encode, OnProgress
from drawbar.data.readers import Record
from drawbar.data.sources import Reading, Records
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger, told_while_waiting
from drawbar.util.atomic_files import identity, sync, write_atomically

T = TypeVar("T")

FORMAT = 2
META = "meta.json"
POLL_SECONDS = 0.05
BEAT_SECONDS = 1.0
HEAD_START_SECONDS = 2.0
SHOWN_CHANGES = 5
_IDENTIFYING_INPUTS = {"the records", "task.type"}
"""Inputs that differ between unrelated runs; runs that differ in at most five inputs still count as related."""
DIGESTS_FILE = "digests.json"
"""File with the digests, in the folder of the encoded data."""
MAX_DIGESTS = 100_000
"""Maximum number of digests to keep; the oldest are dropped."""
MIN_AGE_NS = 2 * 10**9
"""Nanoseconds that a file must be unchanged before its times are trusted: some file systems have 2 s timestamps."""
REMEDIES = {
    errno.ENOSPC: "free some space there, or keep the cache on another disk (data.cache)",
    errno.EDQUOT: "your quota there is used up: delete some files, or keep the cache on another disk (data.cache)",
    errno.EFBIG: "files are limited in size: raise the limit (ulimit -f unlimited)",
    errno.EACCES: "make the folder writable, or use another one (data.cache)",
    errno.EPERM: "make the folder writable, or use another one (data.cache)",
    errno.EROFS: "the disk is read-only: use another one (data.cache)",
    errno.ENOTDIR: "a file is in the way: use another folder (data.cache)",
    errno.EEXIST: "a file is in the way: use another folder (data.cache)",
}
"""Remedies for a cache that cannot be written, by error number."""


class DigestCache:
    """Digests of the content of files, by path and ``identity``: a file that has not changed is not read again.

    Args:
        folder: folder for the digests; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DIGESTS_FILE
        self._stored = _read(self._path)
        self._new: dict[str, str] = {}

    def of(self, file: Path) -> str:
        """Hex digest of every byte of a file. Raises OSError if it cannot be read."""
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
            others = _read(self._path)  # saved by other processes in the meantime
            latest = list({**others, **self._new}.items())[-MAX_DIGESTS:]
            with suppress(OSError):
                write_atomically(self._path, json.dumps(dict(latest), indent=0).encode())


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
    """``records.digest``, computed by one of the ranks that see the same files. Collective."""
    leader = world.lowest_rank_with_same(records.identity())
    own = None
    if leader == world.rank:
        with world.working("hashing the data"):

            def digest_of(file: Path) -> str:
                world.set_activity(f"hashing {file}")
                return kept.of(file)

            own = records.digest(digest_of)
    found = world.all_gather(own)[leader]
    assert found is not None
    return found


class Heartbeat:
    """Tells waiting processes which process encodes, and its progress. Its thread also beats while records are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = 0
        self.total = 0
        self._beats = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def __enter__(self) -> "Heartbeat":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        about = {"host": socket.gethostname(), "pid": os.getpid(), "done": self.done, "total": self.total}
        with suppress(OSError):  # a full disk also fails the encoding itself
            write_atomically(self.path, json.dumps({**about, "beats": self._beats}).encode())


class Watch:
    """Reads the heartbeat in a waiting process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = False
        """Whether a heartbeat was ever seen: of a process that encodes, or of one that died while encoding."""
        self._text = ""
        self._changed = time.monotonic()
        self._about: dict[str, Any] = {}

    def look(self, progress: OnProgress | None) -> None:
        try:
            text = self.path.read_text()
        except OSError:
            return
        if text == self._text:
            return
        self.seen = True
        self._text = text
        self._changed = time.monotonic()
        with suppress(ValueError):
            self._about = json.loads(text)
        if progress and self._about.get("total"):
            progress(self._about["done"], self._about["total"])

    def __str__(self) -> str:
        if not self._about:
            return f"the process that holds {self.path.with_suffix('.lock')}"
        return f"process {self._about['pid']} on host {self._about['host']}, which encodes the data"

    def raise_if_silent(self, timeout: float) -> None:
        if time.monotonic() - self._changed <= timeout:
            return
        about = {"pid": "?", "host": "?", "done": 0, "total": 0, **self._about}
        raise UserError(
            f"process {about['pid']} on host {about['host']} encodes the data, and sent no heartbeat for "
            f"{timeout:.0f} s (it had done {about['done']} of {about['total']} records)",
            where=str(self.path.with_suffix(".lock")),
            remedy=f"look at that process, end it (on {about['host']}: `kill -9 {about['pid']}`), and start again",
            exit_code=ExitCode.FAILED,
        )


class Failure:
    """Tells waiting processes why encoding failed, as they would only fail again, possibly hours later.

    A failure recorded before this process started to wait is from an older attempt, and is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = self._read()

    def _read(self) -> str:
        try:
            return self.path.read_text()
        except OSError:
            return ""

    def write(self, error: UserError) -> None:
        about = {"what": error.what, "where": error.where, "remedy": error.remedy, "exit_code": int(error.exit_code)}
        with suppress(OSError):
            write_atomically(self.path, json.dumps({**about, "attempt": f"{os.getpid()} {time.time_ns()}"}).encode())

    def raise_if_new(self) -> None:
        text = self._read()
        if text and text != self._old:
            about = json.loads(text)
            raise UserError(
                about["what"],
                where=about["where"],
                remedy=about["remedy"],
                exit_code=ExitCode(about["exit_code"]),
            )


def is_cached(cache: Path, name: str, inputs: Mapping[str, str]) -> bool:
    """Whether the cache has these samples."""
    return (entry_folder(cache, name, inputs) / META).is_file()


def explain_cache_miss(cache: Path, name: str, inputs: Mapping[str, str]) -> str | None:
    """The differences from the most similar cached samples of this name, as text for the log. None if all cached
    samples of this name seem to belong to unrelated runs."""
    changes = [_changes(kept, inputs) for kept in _cached_entries(cache, name)]
    if not changes:
        return f"no {name} data are cached in {cache}"
    changes = [changed for changed in changes if not _is_unrelated_run(changed)]
    if not changes:
        return None
    fewest = min(changes, key=len)
    shown = ", ".join(fewest[:SHOWN_CHANGES])
    more = f" and {len(fewest) - SHOWN_CHANGES} more" if len(fewest) > SHOWN_CHANGES else ""
    return f"changed since the cached data: {shown}{more}"


def _cached_entries(cache: Path, name: str) -> list[dict[str, str]]:
    """The inputs of the cache's entries."""
    found = []
    for path in cache.glob(f"{name}-*/{META}"):
        try:
            found.append(dict(json.loads(path.read_text())["made_of"]))
        except (OSError, ValueError, KeyError, TypeError):  # just removed, damaged, or of another version
            continue
    return found


def _is_unrelated_run(changed: list[str]) -> bool:
    return len(changed) > SHOWN_CHANGES and not _IDENTIFYING_INPUTS.isdisjoint(changed)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in [*new, *(name for name in old if name not in new)] if old.get(name) != new.get(name)]


def content_key(*parts: object) -> str:
    """Hex digest of plain values: None, bool, numbers, str, bytes, numpy arrays, and lists, tuples and dicts of them.

    The order of a dict's keys is ignored; tuples hash like lists.

    Raises:
        TypeError: for an object of any other type.
    """
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        _hash_value(digest.update, part)
    return digest.hexdigest()


def records_digest(records: Iterable[Record]) -> str | None:
    """A digest of every record; None if one of them holds a value of a type that ``content_key`` refuses."""
    digest = hashlib.blake2b(digest_size=20)
    try:
        for record in records:
            _hash_value(digest.update, record)
    except TypeError:
        return None
    return digest.hexdigest()


def _hash_value(update: Callable[[bytes], None], part: Any) -> None:
    """Hash a value with its type and length as a prefix, so that different values never produce the same bytes."""
    if isinstance(part, np.generic):
        part = np.asarray(part)
    if part is None or isinstance(part, bool):
        update(f"{part};".encode())
    elif isinstance(part, int | float):
        plain = int(part) if isinstance(part, int) else float(part)  # a member of an IntEnum has another repr
        update(f"{type(plain).__name__} {plain!r};".encode())
    elif isinstance(part, str | bytes):
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        update(b"%s %d:%s" % (b"str" if isinstance(part, str) else b"bytes", len(content), content))
    elif isinstance(part, np.ndarray) and part.dtype.kind in "biufcSU":
        update(f"array {part.dtype.str} {part.shape}:".encode())
        update(part.tobytes())
    elif isinstance(part, list | tuple):
        update(b"list %d:" % len(part))
        for item in part:
            _hash_value(update, item)
    elif isinstance(part, dict):
        update(b"dict %d:" % len(part))
        for key in sorted(part, key=lambda key: (type(key).__name__, repr(key))):
            _hash_value(update, key)
            _hash_value(update, part[key])
    else:
        raise TypeError(f"no digest of the content of {type(part).__name__}")


def encode_cached(
    read: Callable[[], Reading],
    encoder: Encode,
    *,
    inputs: Mapping[str, str],
    cache: Path,
    workers: int | Literal["auto"],
    name: str,
    on_bad_record: str,
    progress: OnProgress | None,
    timeout: float,
    eager: bool,
) -> EncodedDataset:
    """The encoded records from the cache; encodes them first on a cache miss.

    Args:
        read: starts reading the records; not called on a cache hit.
        encoder: see ``Encode``; workers need it to be picklable.
        workers: processes to encode in; see ``encode_chunks``.
        on_bad_record: ``error`` or ``skip``.
        inputs, cache, name, progress, timeout, eager: see ``load_or_create``.

    Raises:
        UserError: as ``encode_records`` and ``load_or_create``.
    """

    def write(draft: FolderStorage, report: OnProgress) -> dict[str, Any]:
        return write_samples(
            draft, read(), encoder, progress=report, on_bad_record=on_bad_record, workers=workers, timeout=timeout
        )

    return load_or_create(
        cache, name, inputs, write=write, read=read_samples, progress=progress, timeout=timeout, eager=eager
    )


def load_or_create(
    cache: Path,
    name: str,
    inputs: Mapping[str, str],
    *,
    write: Callable[[FolderStorage, OnProgress], dict[str, Any]],
    read: Callable[[FolderStorage, dict[str, Any]], T],
    progress: OnProgress | None,
    timeout: float,
    eager: bool,
) -> T:
    """Load the cache entry with this name and these inputs; create it first if it does not exist.

    If several processes call this at the same time, on one or several hosts that share the folder, one of them writes.
    The others wait for it, and one of them takes over if it dies.

    Args:
        cache: the folder; it need not exist.
        name: the name of the entry in the cache, such as the split.
        inputs: everything that the content of the entry depends on, by name.
        write: writes the content to an empty folder; returns what ``read`` needs to know, as plain values. The second
            argument is a function to report progress to.
        read: opens the written content; raises ValueError if the content is damaged.
        progress: see ``OnProgress``; told of the work of the process that writes, whichever it is.
        timeout: longest time without a heartbeat of the writing process, in seconds.
        eager: try to write at once; a process that is not eager first waits a moment for another to begin.

    Raises:
        UserError: as ``write``; or the folder cannot be written, or whoever writes sent no heartbeat.
    """
    entry = _Entry(cache.absolute(), name, inputs, read)

    def make(heartbeat: Heartbeat) -> None:
        def report(done: int, total: int) -> None:
            heartbeat.report(done, total)
            if progress:
                progress(done, total)

        entry.make(lambda draft: write(draft, report))

    with _explain_errors(entry):
        found = entry.read()  # before anything is written: a read-only cache may have the entry
        if found is None:
            entry.folder.parent.mkdir(parents=True, exist_ok=True)
            found = _wait_or_make(entry, make, progress, timeout, eager)
        return found


def entry_folder(cache: Path, name: str, inputs: Mapping[str, str]) -> Path:
    """The cache folder of the samples with this name and these inputs."""
    return cache / f"{name}-{content_key(dict(inputs))[:24]}"


def remove_cached(cache: Path, name: str, inputs: Mapping[str, str]) -> None:
    """Remove samples from the cache, if present; other processes never see only some of their files.

    Args: as for ``encode_cached``.

    Raises:
        UserError: the folder cannot be written.
    """
    entry = _Entry(cache.absolute(), name, inputs, read_samples)
    removed = entry.beside(_draft_suffix())
    with _explain_errors(entry), suppress(FileNotFoundError):
        shutil.rmtree(removed, ignore_errors=True)
        entry.folder.rename(removed)
        shutil.rmtree(removed)


def _draft_suffix() -> str:
    return f".tmp-{socket.gethostname()}-{os.getpid()}"


class _Entry(Generic[T]):
    """One folder of the cache, always complete or absent: written under another name, then renamed."""

    def __init__(
        self, cache: Path, name: str, inputs: Mapping[str, str], read: Callable[[FolderStorage, dict[str, Any]], T]
    ) -> None:
        self._read = read
        self.inputs = dict(inputs)
        self.key = content_key(self.inputs)
        self.folder = entry_folder(cache, name, inputs)
        self.written = 0
        """Bytes of the last draft if it failed; 0 after a successful one."""

    def beside(self, ending: str) -> Path:
        return self.folder.with_name(self.folder.name + ending)

    def read(self, *, remove: bool = False) -> T | None:
        """Read the entry; None if absent or damaged. The holder of the lock may ``remove`` a damaged one."""
        if not self.folder.is_dir():
            return None
        try:
            about = json.loads((self.folder / META).read_text())
            if about["format"] != FORMAT or about["key"] != self.key:
                raise ValueError(f"{META} is of another format or key")
            for name, size in about["sizes"].items():
                if (self.folder / name).stat().st_size != size:
                    raise ValueError(f"{name} is not of {size} bytes")
            return self._read(FolderStorage(self.folder), about)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:  # what bad JSON leads to
            if remove:
                logger.warning("encoding again: the data in %s are damaged (%s)", self.folder, error)
                shutil.rmtree(self.folder)
            return None

    def make(self, write: Callable[[FolderStorage], dict[str, Any]]) -> None:
        """Write a draft, sync it to disk, and rename it."""
        _remove_dead_drafts(self.folder)
        draft = self.beside(_draft_suffix())
        shutil.rmtree(draft, ignore_errors=True)  # left by a dead process with the same process id
        draft.mkdir()
        storage = FolderStorage(draft)
        try:
            about = write(storage)
            storage.close()
            sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
            head = {"format": FORMAT, "key": self.key, "made_of": self.inputs, "sizes": sizes}
            storage.append(META, json.dumps({**head, **about}).encode())
            storage.close()
            sync(draft)
            _publish(draft, self.folder)
        finally:
            storage.abandon()
            self.written = sum(path.stat().st_size for path in draft.glob("*"))
            shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        logger.info("another process made %s in the meantime", folder)  # on a file system without working locks
    sync(folder.parent)


def _remove_dead_drafts(entry: Path) -> None:
    """Remove drafts that killed processes on this host left in the cache. The caller holds the lock of ``entry``."""
    for draft in entry.parent.glob(f"*.tmp-{socket.gethostname()}-*"):
        name = draft.name.rpartition(".tmp-")[0]
        if _is_dead(entry.with_name(f"{name}.lock"), ours=name == entry.name):
            shutil.rmtree(draft, ignore_errors=True)


def _is_dead(lock: Path, *, ours: bool) -> bool:
    """Whether the writer of a draft has ended, so that its lock is free. Process ids are no proof: they are reused."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ours  # we hold it now, so the draft's writer does not
    except OSError:  # no locks here: unknown
        return False
    return True


def _wait_or_make(
    entry: _Entry[T], make: Callable[[Heartbeat], None], progress: OnProgress | None, timeout: float, eager: bool
) -> T:
    watch = Watch(entry.beside(".progress"))
    failure = Failure(entry.beside(".error"))
    head_start_until = time.monotonic() + HEAD_START_SECONDS
    with entry.beside(".lock").open("ab") as lock:  # closing it unlocks it, as does the end of the process
        with told_while_waiting(lambda: str(watch), HEAD_START_SECONDS + 1):
            while True:
                found = entry.read()
                if found is not None:
                    return found
                failure.raise_if_new()
                watch.look(progress)
                if (eager or watch.seen or time.monotonic() > head_start_until) and _try_lock(lock.fileno()):
                    break
                watch.raise_if_silent(timeout)
                time.sleep(POLL_SECONDS)
        return _read_or_make(entry, make, failure)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("the file system of the cache has no locks (%s): several processes may encode", error)
    return True


def _read_or_make(entry: _Entry[T], make: Callable[[Heartbeat], None], failure: Failure) -> T:
    """Called with the lock held. Its previous holder may have just finished or failed."""
    os.listdir(entry.folder.parent)  # NFS may have cached that the folder was absent; this refreshes its view
    found = entry.read(remove=True)
    if found is not None:
        return found
    failure.raise_if_new()
    failure.path.unlink(missing_ok=True)
    with Heartbeat(entry.beside(".progress")) as heartbeat:
        try:
            with _explain_errors(entry, heartbeat):
                make(heartbeat)
        except UserError as error:
            failure.write(error)
            raise
    found = entry.read()
    if found is None:
        raise UserError(
            "the encoded data cannot be read back",
            where=str(entry.folder),
            remedy="check that disk, or keep the cache on another one (data.cache)",
            exit_code=ExitCode.FAILED,
        )
    return found


@contextmanager
def _explain_errors(entry: _Entry[Any], heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """Turn disk errors of the cache into UserErrors with a remedy; others pass."""
    cache = entry.folder.parent
    try:
        yield
    except OSError as error:
        ours = error.filename is None or Path(str(error.filename)).is_relative_to(cache)
        if error.errno not in REMEDIES or not ours:
            raise
        free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
        space = f"{free / 2**20:.1f} MiB free"
        if heartbeat and heartbeat.done and entry.written:
            space = f"about {entry.written / heartbeat.done * heartbeat.total / 2**20:.1f} MiB needed, {space}"
        raise UserError(
            f"cannot write the encoded data: {error.strerror} ({space})",
            where=str(cache),
            remedy=REMEDIES[error.errno],
            exit_code=ExitCode.FAILED,
        ) from error
