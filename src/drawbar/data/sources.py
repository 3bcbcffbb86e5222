"""Opens the records of a split, as the settings ``data`` say. A record is a plain dict."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

from drawbar.config.schema.data_section import DataSection, SourceSection
from drawbar.data.arrow import HubDataset
from drawbar.data.class_labels import agreed_names
from drawbar.data.files import BUILT_IN_SOURCES, find_files, find_text_file, is_empty, reader_of
from drawbar.data.python_stdlib import PYTHON_STDLIB, PythonStdlib
from drawbar.data.readers import BadRecord, FileReader, Reader, ReadOptions, Record
from drawbar.data.source_stream import LocatedRecord, SourceStream, SplitFilter
from drawbar.data.tables import CsvTable, check_names
from drawbar.data.text_readers import ParallelLines
from drawbar.errors import UserError

KEPT_MESSAGES = 1000


class ReadResult(NamedTuple):
    """A record of a split, or the error of one that cannot be read."""

    source: int
    """The index of the source that it comes from."""
    where: str
    """File and line, for messages."""
    record: Record | BadRecord


class NumberedRecord(NamedTuple):
    """A record of a split that can be read."""

    number: int
    """From 0, over all sources; bad records have none."""
    where: str
    record: Record


class Reading:
    """Iterates over the records of a split, once, and keeps what it has found so far.

    Args:
        found: in the order of the sources.
        sources: how many there are.
        count: counts the records that are found, bad ones included.
    """

    def __init__(self, found: Iterable[ReadResult], sources: int, count: Callable[[], int]) -> None:
        self.counts = [0] * sources
        """Records of each source."""
        self.bad: list[str] = []
        """What is wrong with the bad records that were left out, after their file and line: the first 1000 messages."""
        self.bad_count = 0
        self.first: str | None = None
        """Where the first record is."""
        self._found = found
        self._count = count

    @cached_property
    def total(self) -> int:
        """How many records there are, bad ones included. They are counted on first use."""
        return self._count()

    def __iter__(self) -> Iterator[NumberedRecord]:
        number = 0
        for source, where, record in self._found:
            if isinstance(record, BadRecord):
                self.bad_count += 1
                if len(self.bad) < KEPT_MESSAGES:
                    self.bad.append(f"{record.where}: {record.what}")
                continue
            self.first = self.first or where
            self.counts[source] += 1
            yield NumberedRecord(number, where, record)
            number += 1


def read_list(records: Sequence[Record], describe: Callable[[int], str]) -> Reading:
    """A pass over records in memory.

    Args:
        describe: says where record i came from, for messages.
    """
    found = (ReadResult(0, describe(number), record) for number, record in enumerate(records))
    return Reading(found, sources=1, count=records.__len__)


__all__ = ["BUILT_IN_SOURCES", "LocatedRecord", "Record", "Records", "SourceStream", "open_records"]


class Records(Sequence[Record]):
    """The records of a split. They are read from their files, one at a time, on every iteration; asking
    for one by its number, or for their number, loads all of them into memory, where they stay."""

    def __init__(self, streams: list[SourceStream], key: str) -> None:
        self.streams = streams
        """One a source, in the order of the configuration."""
        self._key = key

    def __len__(self) -> int:
        return len(self._loaded)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._loaded[index]

    def __iter__(self) -> Iterator[Record]:
        if "_loaded" in vars(self):
            return iter(self._loaded)
        return (found.record for found in self._good())

    def reading(self, at_end: Callable[[], None] = lambda: None) -> Reading:
        """A pass over the records, for encoding.

        Args:
            at_end: called after the last one.
        """
        return Reading(self._found(at_end), len(self.streams), lambda: sum(stream.count for stream in self.streams))

    def where(self, index: int) -> str:
        """File and line of a record, for messages: ``data/train.jsonl:17``. The files are read as far as that."""
        return next(islice(self._good(), index, None)).where

    def class_names(self, column: str) -> list[str] | None:
        """The names of a column's classes, in the order of their numbers, where all files with such names agree."""
        return agreed_names(stream.class_names(column) for stream in self.streams)

    def identity(self) -> list[Any]:
        """Identifies the files by metadata, without reading them: differs between file systems and after a change."""
        return [stream.identity() for stream in self.streams]

    def digest(self, of_file: Callable[[Path], str]) -> str:
        """Hex digest of the bytes of all files and of every setting that decides what records come out.

        Nothing is decoded for it, and paths do not count: a file that was moved has the same digest.

        Args:
            of_file: the digest of the bytes of one file.
        """
        digests = " ".join(stream.digest(of_file) for stream in self.streams)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    @cached_property
    def _loaded(self) -> list[Record]:
        return list(iter(self))  # list(self) would ask for the length first

    def _good(self) -> Iterator[NumberedRecord]:
        return iter(self.reading())

    def _found(self, at_end: Callable[[], None]) -> Iterator[ReadResult]:
        good = bad = 0
        first: BadRecord | None = None
        for source, stream in enumerate(self.streams):
            for _, where, record in stream.read_all():
                if isinstance(record, BadRecord):
                    first, bad = first or record, bad + 1
                else:
                    good += 1
                yield ReadResult(source, where, record)
        if not good:
            raise self._nothing_left(first, bad)
        at_end()

    def _nothing_left(self, first: BadRecord | None, bad: int) -> UserError:
        if first is not None:
            return UserError(
                f"no record is left: all {bad} are bad; the first: {first.where}: {first.what}",
                where=self._key,
                remedy="correct the data; data.on_bad_record=error stops at the first bad record",
            )
        return UserError(
            "there are too few records to be shared: none is left for this split",
            where=f"{self._key}, data.validation_share",
            remedy="change data.validation_share, or set data.validation=FILE",
        )


def open_records(data: DataSection, split: str) -> Records:
    """The records of ``train``, ``validation`` or ``test``, source by source, in the order of the configuration.

    With ``data.validation_share``, training and validation records are two parts of the training data, separated by a
    hash of their content. ``data.limit`` counts the records of the split, bad ones included.

    Raises:
        UserError: at once for no data, files that are missing, empty or of an unknown kind, and settings that do not
        combine; when a record is first needed, for what is wrong inside the files.
    """
    split_filter = _split_filter(data, split)
    key = "data.train" if split_filter else f"data.{split}"
    spec = getattr(data, key.removeprefix("data."))
    items = spec if isinstance(spec, list) else [spec] if spec is not None else []
    if not items:
        raise UserError(f"there is no {split} data", where=key, remedy=f"set {key}=FILE")
    streams: list[SourceStream] = []
    for number, item in enumerate(items):
        source = SourceSection(files=item) if isinstance(item, str) else item
        # for a plain path, messages name the whole setting; for a section in a list, its index, too
        item_key = key if isinstance(item, str) or not isinstance(spec, list) else f"{key}.{number}"
        readers = _readers(source, data, split=key.removeprefix("data."), key=item_key)
        rename, rename_key = (source.rename, f"{item_key}.rename") if source.rename else (data.rename, "data.rename")
        streams.append(
            SourceStream(
                readers,
                key=item_key,
                name=source.name,
                weight=source.weight,
                rename=rename or {},
                rename_key=rename_key,
                split_filter=split_filter,
                limit=getattr(data.limit, split),
                before=streams[-1] if streams else None,
                skip_bad=data.on_bad_record == "skip",
            )
        )
    names = [stream.name for stream in streams if stream.name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two sources have the name {twice!r}", where=key, remedy="give each a name of its own")
    if len({stream.weight is None for stream in streams}) > 1:
        raise UserError(
            "some sources have a weight, and others do not", where=key, remedy="give all of them a weight, or none"
        )
    return Records(streams, key)


def _split_filter(data: DataSection, split: str) -> SplitFilter | None:
    if data.validation_share is None or split not in ("train", "validation"):
        return None
    if data.validation not in (None, []):
        raise UserError(
            "data.validation and data.validation_share both say what to validate on",
            where="data.validation, data.validation_share",
            remedy="keep one of the two",
        )
    return SplitFilter(data.validation_share, cast(Literal["train", "validation"], split))


def _readers(source: SourceSection, data: DataSection, *, split: str, key: str) -> list[Reader]:
    """The readers of one source; ``key`` is the setting that names it."""
    _check(source, key)
    if source.parallel is not None:
        paths = [find_text_file(path, f"{key}.parallel.{column}") for column, path in source.parallel.items()]
        return [ParallelLines(tuple(source.parallel), tuple(paths))]
    if source.dataset is not None:
        streaming = data.streaming and split == "train"
        return [HubDataset(source.dataset, source.subset, source.split or split, streaming, key)]
    columns, columns_key = data.columns, "data.columns"
    if source.columns is not None:
        columns, columns_key = source.columns, f"{key}.columns"
    check_names(columns or [], columns_key, "give every column a name of its own")
    readers: list[Reader] = []
    separator = data.separator if source.separator is None else source.separator
    options = ReadOptions(data.sample_by, None if columns is None else tuple(columns), separator)
    for item in [source.files] if isinstance(source.files, str) else source.files or []:
        if item == PYTHON_STDLIB:
            readers.append(PythonStdlib(split))
            continue
        for path in find_files(item, key):
            reader = reader_of(path, options, source.reader, key)
            if is_empty(path):
                raise reader.empty()
            readers.append(reader)
    has_tables = any(isinstance(reader, FileReader) and reader.takes_columns for reader in readers)
    if source.columns is not None and not has_tables:
        raise UserError(
            "only .tsv and .csv files have columns to be named", where=columns_key, remedy="use `rename` instead"
        )
    if source.separator is not None and not any(isinstance(reader, CsvTable) for reader in readers):
        raise UserError(
            "only .csv files have a separator",
            where=f"{key}.separator",
            remedy="leave it out, or read the files as such: reader: .csv",
        )
    return readers


def _check(source: SourceSection, key: str) -> None:
    """Settings that do not combine."""
    forms: dict[str, Any] = {"files": source.files, "parallel": source.parallel, "dataset": source.dataset}
    given = [name for name, value in forms.items() if value]
    if len(given) != 1:
        raise UserError(
            f"a source has {' and '.join(given)}" if given else "a source names no data",
            where=key,
            remedy="give one of files, parallel and dataset, and not an empty one",
        )
    if not source.files and source.reader:
        raise UserError("a reader reads files", where=f"{key}.reader", remedy="leave it out, or give files")
    if source.dataset is None and (source.subset or source.split):
        raise UserError("subset and split belong to a dataset", where=key, remedy="leave them out, or give dataset")
    if source.dataset is not None and Path(source.dataset).is_file():
        raise UserError(f"{source.dataset} is a file", where=f"{key}.dataset", remedy="name it with files: instead")
    is_path = source.dataset is not None and source.dataset.startswith(("/", "./", "../"))
    if is_path and not Path(str(source.dataset)).is_dir():
        raise UserError(
            f"there is no folder {source.dataset}",
            where=f"{key}.dataset",
            remedy=f"check the path; a relative one starts at the folder {Path.cwd()}",
        )
