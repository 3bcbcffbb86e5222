"""One source as a stream: reads records in order, in constant memory, split into shares, from any position on."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from drawbar.config.io.user_modules import cause
from drawbar.data.arrow import HubDataset
from drawbar.data.class_labels import agreed_names
from drawbar.data.files import check_contents
from drawbar.data.readers import BadRecord, RawRecord, Reader, Record
from drawbar.data.tables import columns_of, old_name, value_at
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from drawbar.util.atomic_files import identity

SHOWN_IN_FULL = 10
"""Bad records of a stream that are logged one by one."""
END_BYTES = 64 * 1024
"""How much of each end of a file ``SourceStream.quick_digests`` reads."""
EXCERPTS, EXCERPT_BYTES = 16, 4096
"""Number of excerpts of a file that it reads between the two ends, and their size in bytes."""


@dataclass(frozen=True)
class LocatedRecord:
    """A record, and where it is."""

    position: int
    """Its number within the share that was read, from 0; bad records and those of the other split are counted."""
    record: Record
    where: str
    """File and line, for messages."""


@dataclass(frozen=True)
class SplitFilter:
    """Selects the training or the validation records where ``data.validation_share`` splits the training data.

    Only the content of a record decides, so duplicates are on the same side, and reordering files moves nothing.
    """

    share: float
    """The share of the records that is for validation."""
    split: Literal["train", "validation"]

    def has(self, content: bytes) -> bool:
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        return (number < self.share * 2**64) == (self.split == "validation")


class SourceStream:
    """One source of a split. Can be sent to another process."""

    def __init__(
        self,
        readers: list[Reader],
        *,
        key: str,
        name: str | None,
        weight: float | None,
        rename: dict[str, str],
        rename_key: str,
        split_filter: SplitFilter | None,
        limit: int | None,
        before: "SourceStream | None",
        skip_bad: bool,
    ) -> None:
        """
        Args:
            readers: of the files, in order.
            key: the setting that names the source.
            name: what scores of it alone are called; None for no such scores.
            weight: its part of the training, relative to the other sources.
            rename: old names of columns by their new ones.
            rename_key: the setting that says so.
            split_filter: selects the split's records, if the files hold those of another split, too; else None.
            limit: most records of the split, over all sources.
            before: the source before this one, which uses up a part of the limit.
            skip_bad: leave out records that cannot be read, and log them.
        """
        self.name = name
        self.weight = weight
        self.size: int | None = None
        """How many records it has up to the limit, left-out ones included; None before it was read that far."""
        self.skipped = 0
        """Bad records that ``read`` left out so far, in this process."""
        self._readers = readers
        self._key = key
        self._rename = rename
        self._rename_key = rename_key
        self._split_filter = split_filter
        self._limit = limit
        self._before = before
        self._skip_bad = skip_bad
        self._checked = False
        self._seen: dict[Path, tuple[Any, bytes]] = {}
        """Of each file, when it was first read: ``identity``, and a digest of ``_size_and_excerpts``."""

    def read(self, share: int = 0, shares: int = 1, first: int = 0) -> Iterator[LocatedRecord]:
        """The records of one share of the source, in constant memory: record i belongs to share ``i % shares``.

        Those of other shares are skipped undecoded, except where a limit counts what the split filter selects.
        ``read(share, shares, located.position + 1)`` continues after a record.

        Args:
            share: 0 <= share < shares; for ``RankReader`` the rank.
            shares: number of shares that the source is divided into; for ``RankReader`` the number of ranks.
            first: number within the share of the first record that is wanted.

        Raises:
            UserError: a file that cannot be read, or a bad record that is not to be left out.
        """
        for position, where, record in self.read_all(share, shares, first):
            if isinstance(record, BadRecord):
                self._log(record)
            else:
                yield LocatedRecord(position, record, where)

    def read_all(
        self, share: int = 0, shares: int = 1, first: int = 0
    ) -> Iterator[tuple[int, str, Record | BadRecord]]:
        """As ``read``, with the bad records that should be left out: (position, where, record or what is wrong)."""
        for number, reader, raw in self._raw_records_of_share(share, shares, first):
            where = reader.where(raw)
            try:
                with self._naming(reader):
                    record = _decoded(reader, raw, where)
                yield number // shares, where, self._renamed(record, where)
            except BadRecord as error:
                error.where = error.where or where  # a user's reader may give neither place nor remedy
                if not self._skip_bad:
                    remedy = (
                        f"{error.remedy or 'correct the record'}; or leave bad records out: data.on_bad_record=skip"
                    )
                    raise UserError(error.what, where=error.where, remedy=remedy) from error
                yield number // shares, where, error

    @cached_property
    def count(self) -> int:
        """How many records belong to the split, bad ones included. The files are read; only split filters decode."""
        return sum(1 for _ in self._raw_records_of_share(0, 1, 0))

    def class_names(self, column: str) -> list[str] | None:
        """The names of a column's classes, in the order of their numbers, where all files with such names agree."""
        self._check_contents()
        old, found = old_name(column, self._rename), []
        for reader in self._readers:
            with self._naming(reader):
                found.append(reader.class_names(old))
        return agreed_names(found)

    @cached_property
    def quick_digests(self) -> dict[str, str]:
        """Hex digest of the settings, and of each file's size, both ends and some excerpts: quick at any length. One
        for each value of ``data.on_bad_record``: ``{"error": …, "skip": …}``."""
        return self._digests(_size_and_excerpts)

    def digest(self, of_file: Callable[[Path], str]) -> str:
        """Hex digest of the files and of the settings that decide what records come out.

        Args:
            of_file: the digest of every byte of a file.
        """
        return self._digests(lambda path: of_file(path).encode())["skip" if self._skip_bad else "error"]

    @property
    def origins(self) -> list[Path]:
        """What is read: every file; for a dataset, whose splits may share files, its name with the split."""
        return [
            path
            for reader in self._readers
            for path in ([reader.name] if isinstance(reader, HubDataset) else reader.files)
        ]

    def identity(self) -> list[Any]:
        """``identity`` of each file; for a dataset from the Hub the node's name, as each node has its own
        copy."""
        from drawbar.distributed.rank_info import node_name  # loads torch, which submitting does not need

        found: list[Any] = []
        for reader in self._readers:
            with self._naming(reader):
                found.append([*map(identity, reader.files)] or node_name())
        return found

    def _digests(self, of_file: Callable[[Path], bytes]) -> dict[str, str]:
        """A hex digest for each value of ``data.on_bad_record``.

        Args:
            of_file: a self-delimiting byte string that identifies a file.
        """
        digests = {}
        for on_bad_record in ("error", "skip"):
            settings = [self._rename, self._split_filter, self._limit, on_bad_record == "skip"]
            digests[on_bad_record] = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for content in self._digested(of_file):
            for digest in digests.values():
                digest.update(content)
        return {on_bad_record: digest.hexdigest() for on_bad_record, digest in digests.items()}

    def _digested(self, of_file: Callable[[Path], bytes]) -> Iterator[bytes]:
        for reader in self._readers:
            with self._naming(reader):
                yield repr(reader.settings()).encode()
                if isinstance(reader, HubDataset):
                    yield reader.datasets_fingerprint.encode()
            for path in reader.files:
                with self._naming(reader, path):
                    yield of_file(path)

    def _raw_records_of_share(self, share: int, shares: int, first: int) -> Iterator[tuple[int, Reader, RawRecord]]:
        """(number in the source, reader, raw record) of a share's records in the split, from number ``first`` on."""
        quota, taken = self._quota, 0
        if quota == 0:
            if self.weight is None:
                return
            raise UserError(
                "a source with a weight gave no samples: the sources before it use up data.limit",
                where=self._key,
                remedy="raise data.limit, or leave the source out",
            )
        number = -1
        for number, (reader, raw) in enumerate(self._raw_records()):
            wanted = number % shares == share and number // shares >= first
            if not wanted and quota is None:
                continue
            if self._split_filter:
                with self._naming(reader):
                    content = reader.content(raw)
                if not self._split_filter.has(content):
                    continue
            if wanted:
                yield number, reader, raw
            taken += 1
            if taken == quota:
                break
        self.size = number + 1

    @cached_property
    def _quota(self) -> int | None:
        """How much of the limit the sources before this one leave."""
        if self._limit is None or self._before is None or self._before._quota is None:
            return self._limit
        return self._before._quota - self._before.count

    def _check_contents(self) -> None:
        """``check_contents`` of all files, when the first of them is read: a start from the cache opens none."""
        if not self._checked:
            for reader in self._readers:
                check_contents(reader, self._key)
            self._checked = True

    def _raw_records(self) -> Iterator[tuple[Reader, RawRecord]]:
        self._check_contents()
        for reader in self._readers:
            raw = None
            self._check_unchanged(reader)
            with self._naming(reader):
                for raw in _raw_records_of_reader(reader):
                    yield reader, raw
                if raw is None:
                    raise reader.empty()
            self._check_unchanged(reader)

    def _check_unchanged(self, reader: Reader) -> None:
        """Call before and after reading its files. Raises UserError if one is not what it was when it was first read:
        some records would be trained twice or never. One that was only touched or moved may pass."""
        for path in reader.files:
            with self._naming(reader, path):
                found = identity(path)
                known, before = self._seen.get(path) or (None, b"")
                if found == known or not path.is_file():  # to look at a pipe would be to read it
                    continue
                now = hashlib.blake2b(_size_and_excerpts(path), digest_size=16).digest()
            if known is not None and now != before:
                raise UserError(
                    f"{path} has changed since it was first read, so records would be trained twice or never",
                    where=self._key,
                    remedy="start again when no other process is writing to it; a run that was trained on it resumes "
                    "once its content is restored",
                    exit_code=ExitCode.FAILED,
                )
            self._seen[path] = found, now

    @contextmanager
    def _naming(self, reader: Reader, *paths: Path) -> Iterator[None]:
        """Context for reading. It turns an OSError into a UserError that names the file: the error of a failed read
        does not.

        Args:
            paths: what is read; by default all files of the reader.
        """
        try:
            yield
        except OSError as error:
            names = error.filename or ", ".join(map(str, paths or reader.files)) or type(reader).__name__
            raise UserError(
                f"cannot read {names}: {error.strerror or error}",
                where=self._key,
                remedy="check the path, its permissions, and the disk or network that it is on",
            ) from error

    def _renamed(self, record: Record, where: str) -> Record:
        if not self._rename:
            return record
        old_names = set(self._rename.values())
        renamed: dict[str, Any] = {name: value for name, value in record.items() if name not in old_names}
        for new, old in self._rename.items():
            try:
                value = value_at(record, old)
            except KeyError as error:
                raise UserError(
                    f"there is no column {old!r} to be renamed in {where}",
                    where=self._rename_key,
                    remedy=f"the columns are: {', '.join(map(repr, columns_of(record)))}",
                ) from error
            if new in renamed:
                raise UserError(
                    f"{where} has a column {new!r} already, and {old!r} is to be renamed to that",
                    where=self._rename_key,
                    remedy=f"rename {new!r} too, or leave out this name",
                )
            renamed[new] = value
        return renamed

    def _log(self, error: BadRecord) -> None:
        self.skipped += 1
        if self.skipped <= SHOWN_IN_FULL:
            logger.warning("left out a bad record: %s: %s", error.where, error.what)
        if self.skipped == SHOWN_IN_FULL:
            logger.warning("more bad records of %s are left out without a message", self._key)


def _size_and_excerpts(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        found = [b"%d " % size, file.read(END_BYTES)]
        if size > 2 * END_BYTES:
            for number in range(1, EXCERPTS + 1):
                file.seek(number * size // (EXCERPTS + 1))
                found.append(file.read(EXCERPT_BYTES))
        file.seek(max(size - END_BYTES, 0))
        return b"".join([*found, file.read(END_BYTES)])


def _raw_records_of_reader(reader: Reader) -> Iterator[RawRecord]:
    """The raw records of a reader. The error of a user's reader names the reader, and not the task."""
    try:
        for raw in reader.units():
            if not isinstance(raw, RawRecord):
                raise TypeError(f"its method units gives {type(raw).__name__}, and not RawRecord")
            yield raw
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        what = f"the reader {type(reader).__name__} cannot find the records: {cause(error)}"
        where = str(reader.files[0])
        raise UserError(what, where=where, remedy="correct its method units: it yields a RawRecord for each") from error


def _decoded(reader: Reader, raw: RawRecord, where: str) -> Record:
    """The decoded record. Errors as in :func:`_raw_records_of_reader`."""
    name = type(reader).__name__
    try:
        record = reader.decode(raw)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        what = f"the reader {name} cannot decode a record: {cause(error)}"
        raise UserError(what, where=where, remedy="correct its method decode, or let it raise BadRecord") from error
    if not isinstance(record, dict):
        what = f"the reader {name} makes {type(record).__name__} of a record, and not dict"
        raise UserError(what, where=where, remedy="let its method decode return a dict")
    return record
