"""Arrow and Parquet files, and datasets of the Hugging Face Hub or folders in its layout, through `datasets`."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drawbar.data.class_labels import Feature, class_features, class_names, features_of, with_class_numbers
from drawbar.data.files import check_not_saved_dataset
from drawbar.data.readers import BadRecord, FileReader, RawRecord, Reader, Record
from drawbar.errors import UserError
from drawbar.runtime.hub import fetching, hub_answers

ROWS_AT_ONCE = 1024


class Group(NamedTuple):
    """Table rows that are stored together in Arrow record batches, each read when one of its rows is requested."""

    rows: int
    record_batches: Iterator[Any]
    """Record batches, or tables, which also have rows and columns."""


class _RowFinder:
    """Finds rows of a group by number. Numbers must not decrease: record batches are read once and not cached."""

    def __init__(self, record_batches: Iterator[Any]) -> None:
        self._record_batches = record_batches
        self._begin = self._end = 0
        self._columns: list[tuple[str, Any]] = []

    def row(self, number: int) -> Record:
        while number >= self._end:
            batch = next(self._record_batches)
            self._begin, self._end = self._end, self._end + batch.num_rows
            self._columns = list(zip(batch.schema.names, batch.columns, strict=True))
        return {name: column[number - self._begin].as_py() for name, column in self._columns}


class ColumnarReader(Reader):
    """Reads rows of Arrow tables, group by group."""

    no_records: ClassVar[str] = "it has no rows"

    @abstractmethod
    def groups(self) -> Iterator[Group]:
        """The rows in order."""

    @property
    @abstractmethod
    def name(self) -> Path:
        """The path, for messages."""

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """The types of the columns, as stored by `datasets`; empty if another program wrote the rows."""

    @cached_property
    def _class_features(self) -> dict[str, Feature]:
        return class_features(self.features)

    def class_names(self, column: str) -> list[str] | None:
        return class_names(self._class_features, column)

    def units(self) -> Iterator[RawRecord]:
        import pyarrow as pa

        line = 0
        try:
            for group in self.groups():
                cursor = _RowFinder(group.record_batches)
                for number in range(group.rows):
                    line += 1
                    yield RawRecord((cursor, number), self.name, line)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def where(self, unit: RawRecord) -> str:
        return f"{unit.path}, row {unit.line}"

    def decode(self, unit: RawRecord) -> Record:
        import pyarrow as pa

        cursor, number = unit.raw
        try:
            return with_class_numbers(cursor.row(number), self._class_features)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        except (ValueError, OverflowError) as error:  # not UTF-8; a date beyond those of Python; no such class
            raise BadRecord(
                f"a value cannot be a Python value: {error}",
                where=self.where(unit),
                remedy="write the column again as what it holds, such as binary, or text in UTF-8",
            ) from error

    def _damaged(self, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:  # from the operating system: the file may be intact
            raise error
        reason = str(error).strip().split("\n")[0].rstrip(".")
        return UserError(
            f"{self.name} cannot be read in the format of its extension: {reason}",
            where=str(self.name),
            remedy="it is damaged, truncated or in another format: copy, download or write it again",
        )


@dataclass(frozen=True)
class _ColumnarFile(FileReader, ColumnarReader):
    @property
    def name(self) -> Path:
        return self.path

    @property
    def features(self) -> dict[str, Feature]:
        import pyarrow as pa

        try:
            return features_of(self.schema().metadata)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    @abstractmethod
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of the file: names and types of its columns."""


class ParquetFile(_ColumnarFile):
    """A ``.parquet`` file. Row groups without requested rows are not read."""

    holds: ClassVar[frozenset[str]] = frozenset({"parquet"})

    def schema(self) -> Any:
        import pyarrow.parquet as pq

        return pq.read_schema(self.path)

    def groups(self) -> Iterator[Group]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                yield Group(rows, file.iter_batches(ROWS_AT_ONCE, row_groups=[number]))


class ArrowFile(_ColumnarFile):
    """An IPC file or an IPC stream; `datasets` writes the latter."""

    holds: ClassVar[frozenset[str]] = frozenset({"arrow"})

    def schema(self) -> Any:
        with self._opened() as (schema, _):
            return schema

    def groups(self) -> Iterator[Group]:
        with self._opened() as (_, batches):
            for batch in batches:
                yield Group(batch.num_rows, iter([batch]))

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """The schema, and the record batches."""
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source:
            if source.read(6) == b"ARROW1":  # magic bytes of IPC files
                file = pa.ipc.open_file(source)
                yield file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
            else:
                source.seek(0)
                stream = pa.ipc.open_stream(source)
                yield stream.schema, iter(stream)


@dataclass(frozen=True)
class HubDataset(ColumnarReader):
    """One split of a dataset: from memory-mapped files, or as a stream. Images and audio stay encoded bytes."""

    dataset: str
    """A name on the Hub, or a folder."""
    subset: str | None
    split: str
    streaming: bool
    key: str
    """The setting that names the dataset, for messages."""

    @property
    def files(self) -> list[Path]:
        """The files of a folder, without hidden ones; empty for a Hub dataset."""
        folder = Path(self.dataset)
        found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()] if self.is_folder else []
        return [folder / path for path in sorted(found) if not any(part.startswith(".") for part in path.parts)]

    @property
    def checked_files(self) -> list[Path]:
        """For a folder, the files that `datasets` would read, since it would read Git LFS pointers as text."""
        import datasets

        if not self.is_folder:
            return []
        found: Any = {}
        with suppress(Exception):  # `datasets` raises errors of many libraries; loading the folder will report them
            found = datasets.load_dataset_builder(self.dataset, name=self.subset).config.data_files
        return [Path(name) for names in (found or {}).values() for name in names]

    @property
    def is_folder(self) -> bool:
        return Path(self.dataset).is_dir()

    @property
    def name(self) -> Path:
        return Path(self.dataset, self.subset or "", self.split)

    @property
    def features(self) -> dict[str, Feature]:
        features = self._dataset.features  # unknown for some streams
        return features.to_dict() if features is not None else {}

    def settings(self) -> list[str]:
        known = [f"subset={self.subset!r}", f"split={self.split!r}"]
        if self.is_folder:  # splits follow from the file names
            return [*known, *(path.relative_to(self.dataset).as_posix() for path in self.files)]
        return [*known, self.dataset]

    @cached_property
    def datasets_fingerprint(self) -> str:
        """The fingerprint that `datasets` gives a dataset: a hash that differs between versions of a Hub dataset. Empty
        for a folder, and if records are streamed."""
        return "" if self.is_folder or self.streaming else str(self._dataset._fingerprint)

    def groups(self) -> Iterator[Group]:
        # as Arrow, a row is read without decoding its images and audio
        dataset = self._dataset.with_format("arrow")
        if self.streaming:
            yield from self._stream(dataset)
            return
        for first in range(0, len(dataset), ROWS_AT_ONCE):
            end = min(first + ROWS_AT_ONCE, len(dataset))
            yield Group(end - first, (dataset[number:end] for number in [first]))

    def _stream(self, dataset: Any) -> Iterator[Group]:
        try:
            for table in dataset.iter(ROWS_AT_ONCE):
                yield Group(table.num_rows, iter([table]))
        except Exception as error:  # `datasets` opens its files only now, with many libraries
            raise self._unusable(error, online=True) from error

    def empty(self) -> UserError:
        return UserError(f"{self.name} has no records", where=self.key, remedy="choose another split")

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        check_not_saved_dataset(Path(self.dataset), self.key, self.split)
        try:
            online = not self.is_folder and hub_answers(self.dataset, "dataset")
        except UserError as error:
            raise UserError(error.what, where=self.key, remedy=error.remedy) from error
        try:
            with _offline(not online), fetching(self.dataset, online and not self.streaming):
                return datasets.load_dataset(self.dataset, name=self.subset, split=self.split, streaming=self.streaming)
        except Exception as error:  # `datasets` raises errors of many libraries
            raise self._unusable(error, online) from error

    def _unusable(self, error: Exception, online: bool) -> UserError:
        if isinstance(error, ConnectionError) and not online:
            return UserError(
                f"there is no dataset {self.dataset!r} on this machine, and the Hugging Face Hub cannot be reached",
                where=self.key,
                remedy="give a folder, or load it once where there is a network, then bring the cache (HF_HOME) here",
            )
        root = error.__cause__ or error  # the outer error is generic
        reason = (str(root).strip() or type(root).__name__).splitlines()[0].rstrip(".")
        return UserError(
            f"cannot load the dataset {self.dataset!r}: {reason}",
            where=self.key,
            remedy="check `subset` and `split`, and that the files are whole; "
            "what `save_to_disk` wrote is read with files: FOLDER/*.arrow",
        )


@contextmanager
def _offline(yes: bool) -> Iterator[None]:
    """Put `datasets` into offline mode: without a network it would retry for half a minute before using its cache."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or yes
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
