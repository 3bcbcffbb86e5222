"""``WatchedRecord``: a record that knows which of its columns were looked at."""

from collections.abc import Iterator
from typing import Any


class WatchedRecord(dict[str, Any]):
    """A copy of a record. Whoever takes all of its columns at once has looked at all of them."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.read: set[str] = set()
        """The columns that were looked at so far."""

    def __getitem__(self, column: str) -> Any:
        self.read.add(column)
        return super().__getitem__(column)

    def __contains__(self, column: object) -> bool:
        self.read.add(str(column))
        return super().__contains__(column)

    def get(self, column: str, default: Any = None) -> Any:
        self.read.add(column)
        return super().get(column, default)

    def __iter__(self) -> Iterator[str]:
        self.read |= super().keys()
        return super().__iter__()

    def keys(self) -> Any:
        self.read |= super().keys()
        return super().keys()

    def values(self) -> Any:
        self.read |= super().keys()
        return super().values()

    def items(self) -> Any:
        self.read |= super().keys()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())
