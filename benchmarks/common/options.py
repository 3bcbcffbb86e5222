"""How a part of the suite is run."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call, in_fresh_process
from benchmarks.common.turns import Results, in_turns

Run = Callable[[Call], dict[str, Any]]
TakeTurns = Callable[[Mapping[str, Call]], Results[str]]


@dataclass(frozen=True)
class Options:
    """From the command line."""

    folder: Path
    """For what is written while measuring; it is deleted afterwards."""
    rounds: int = 5
    quick: bool = False
    """Tiny sizes and one round: to see that everything runs, not to measure."""
    large: bool = False
    """Sizes that take tens of gigabytes of disk, too."""
    data: Path | None = None
    """Folder with ``sst2/{train,dev}.tsv`` and ``multi30k_en_de/train.{en,de}.gz``; else both are downloaded."""
    run: Run = in_fresh_process
    take_turns: TakeTurns = in_turns

    def new_folder(self, name: str) -> Path:
        """An empty folder whose name begins so."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
