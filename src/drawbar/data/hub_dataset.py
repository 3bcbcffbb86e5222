"""Datasets of the Hugging Face Hub, and folders in its layout, through `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drawbar.data.arrow import ROWS_AT_ONCE, ColumnarReader, Group
from drawbar.data.class_labels import Feature
from drawbar.errors import UserError
from drawbar.runtime.hub import fetching, hub_answers


@dataclass(frozen=True)
class HubDataset(ColumnarReader):
    """One split of a dataset: from memory-mapped files, or as a stream. Images and audio stay encoded bytes."""

    dataset: str
    """A name on the Hub, or a folder."""
    subset: str | None
    split: str
    streaming: bool
    key: str
    """The setting that names it, for messages."""

    @property
    def files(self) -> list[Path]:
        """The files of a folder, without hidden ones; none for a dataset of the Hub."""
        folder = Path(self.dataset)
        found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()] if self.is_folder else []
        return [folder / path for path in sorted(found) if not any(part.startswith(".") for part in path.parts)]

    @property
    def checked_files(self) -> list[Path]:
        """Of a folder, what `datasets` would read of it: a pointer is text to it."""
        import datasets

        if not self.is_folder:
            return []
        found: Any = {}
        with suppress(Exception):  # `datasets` raises errors of many libraries; loading the folder will tell
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
        features = self._dataset.features  # of some streams, they are not known
        return features.to_dict() if features is not None else {}

    def settings(self) -> list[str]:
        known = [f"subset={self.subset!r}", f"split={self.split!r}"]
        if self.is_folder:  # splits are told by the names of the files
            return [*known, *(path.relative_to(self.dataset).as_posix() for path in self.files)]
        return [*known, self.dataset]

    @cached_property
    def datasets_fingerprint(self) -> str:
        """What `datasets` calls the fingerprint of a dataset: a hash that differs between versions of a dataset of the
        Hub. Empty for a folder, and where records are streamed."""
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
        root = error.__cause__ or error  # the outer error only says that something went wrong
        reason = (str(root).strip() or type(root).__name__).splitlines()[0].rstrip(".")
        return UserError(
            f"cannot load the dataset {self.dataset!r}: {reason}",
            where=self.key,
            remedy="check `subset` and `split`, and that the files are whole; "
            "what `save_to_disk` wrote is read with files: FOLDER/*.arrow",
        )


@contextmanager
def _offline(yes: bool) -> Iterator[None]:
    """`datasets` without a network would retry for half a minute; offline, it looks into its cache at once."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or yes
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
