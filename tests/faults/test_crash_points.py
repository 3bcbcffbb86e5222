"""Acceptance: killed at any write, fsync, rename or deletion of a save, a rotation or a restore, a run has a complete
checkpoint, old or new, and goes on exactly: with the same losses, and the same bits of model, optimizer and generators.

What safetensors renames by itself, before the checkpoint has its name, is not seen: it calls the system without libc.
Here, some of the calls. With ``DRAWBAR_CRASH_POINTS=all`` all of them, and then the counts are written to
``crash_points.json``; with ``missing`` those that have no counts there.
"""

import json
import os
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from checkpointing_run import NEW, OLD, CheckpointingRun, kind, phase
from exhaustive import params
from faulty_disk import Ended, FaultyDisk

COUNTS = Path(__file__).with_name("crash_points.json")
TRY = os.environ.get("DRAWBAR_CRASH_POINTS", "some")
TRIED = {1: 4, 2: 1}
"""By the number of ranks: how many points are tried, where not all are."""
AT_ONCE = 2 * (os.cpu_count() or 1)
"""Points that are tried at the same time, where all are: much of it is waiting."""

PHASES = ("restore", "save", "rotation", "other files")
"""The last: of the run, outside its folder of checkpoints."""
COLUMNS = ("layout", "ranks", "killed", "phase", "call")
Place = tuple[str, str, str]
"""Who is killed, in which phase, at which kind of call."""


@dataclass(frozen=True)
class Point:
    """A call at which a process is killed."""

    killed: str
    """``rank 0``, or ``all, by rank 0`` where the others die at the same moment."""
    rank: int
    calls: tuple[str, ...]
    """What that process does, up to this call."""
    elsewhere: bool
    """Calls on other files of the run are counted, and not those on its checkpoints."""

    @property
    def place(self) -> Place:
        return self.killed, "other files" if self.elsewhere else phase(self.calls), kind(self.calls[-1])


@pytest.fixture(scope="module")
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs are slow on a busy disk, and SIGKILL needs none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


class Sweep:
    """The points of a run at which a rank dies alone, or at which all die together."""

    def __init__(self, run: CheckpointingRun, together: bool) -> None:
        self._run = run
        self._together = together

    def points(self) -> list[Point]:
        found = []
        elsewhere = (False, True) if self._run.ranks == 1 else (False,)  # two write no more there than one
        for rank, is_elsewhere in product(range(self._run.ranks), elsewhere):
            with self._run.copy() as project:
                calls = self._interrupt(project, rank, is_elsewhere)[1]
            killed = f"all, by rank {rank}" if self._together else f"rank {rank}"
            found += [Point(killed, rank, calls[: number + 1], is_elsewhere) for number in range(len(calls))]
        return found

    def _interrupt(self, project: Path, rank: int, elsewhere: bool, at: int = 0) -> tuple[Ended, tuple[str, ...]]:
        """What the process does, too; safetensors writes to a file of a name by chance, which it then renames."""
        place = {"folder": project / "runs", "without": self._run.checkpoints(project)} if elsewhere else {}
        name = str(rank) if self._run.ranks > 1 else ""
        ended = self._run.train(project, rank=name, at=at, together=self._together, **place)
        return ended, tuple(re.sub(r"/\.tmp\w+$", "/.tmp", call) for call in ended.calls)

    def check_on_samples(self, point: Point) -> int:
        """Kill it there; the step from which the run goes on."""
        with self._run.copy() as project:
            killed, calls = self._interrupt(project, point.rank, point.elsewhere, at=len(point.calls))
            assert killed.code == -signal.SIGKILL, f"{point.calls[-1]}: {killed.code}\n{killed.output}"
            if not point.elsewhere:  # there, several threads write
                # not the names: those in a folder come in the order in which the ranks happened to write them
                assert list(map(kind, calls)) == list(map(kind, point.calls)), killed.output
            try:
                return self._run.check_goes_on(project, killed)
            except AssertionError as error:
                error.add_note(f"killed: {point.killed}, at call {len(point.calls)}: {point.calls[-1]}")
                raise


def read_counts() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(COUNTS.read_text()) if COUNTS.exists() else []
    return rows


def counts_written(layout: str, ranks: int, places: Iterable[Place]) -> Counter[Place]:
    """Of who is killed there."""
    killed = {place[0] for place in places}
    rows = [
        row for row in read_counts() if (row["layout"], row["ranks"]) == (layout, ranks) and row["killed"] in killed
    ]
    return Counter({(row["killed"], row["phase"], row["call"]): row["points"] for row in rows})


def write_counts(layout: str, ranks: int, tried: Mapping[Place, Sequence[int]], all_places: Iterable[Place]) -> None:
    """Put them in the place of those that there were of such points, and drop those of points that are no more.

    Args:
        tried: the steps from which runs went on.
        all_places: that there are now of who is killed there.
    """
    known, killed = set(all_places) - set(tried), {place[0] for place in all_places}
    rows = []
    for row in read_counts():
        place = (row["killed"], row["phase"], row["call"])
        if (row["layout"], row["ranks"]) != (layout, ranks) or place[0] not in killed or place in known:
            rows.append(row)
    for place, steps in tried.items():
        row = dict(zip(COLUMNS, (layout, ranks, *place), strict=True))
        rows.append(row | {"points": len(steps), "old": steps.count(OLD), "new": steps.count(NEW)})
    rows.sort(key=lambda row: (row["layout"] != "whole", row["ranks"], PHASES.index(row["phase"]), row["killed"]))
    COUNTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


@pytest.fixture(scope="module", params=params(["whole-1", "whole-2", "parts-1", "parts-2"], often=["parts-1"]))
def case(request: pytest.FixtureRequest, disk: FaultyDisk, memory_path: Path) -> tuple[str, int, CheckpointingRun]:
    layout, ranks = request.param.split("-")
    folder = memory_path / request.param
    folder.mkdir()
    return layout, int(ranks), CheckpointingRun(disk, folder, layout, int(ranks))


@pytest.mark.timeout(600 if TRY == "some" else 7200)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_run_that_is_killed_at_any_call_goes_on_exactly(
    together: bool, case: tuple[str, int, CheckpointingRun]
) -> None:
    layout, ranks, run = case
    if together and ranks == 1:
        return  # there is nobody else
    sweep = Sweep(run, together)
    points = sweep.points()
    counts = Counter(point.place for point in points)
    if TRY in ("all", "missing"):
        written = counts_written(layout, ranks, counts)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for place in counts:
                if TRY == "all" or written[place] != counts[place]:
                    steps = list(pool.map(sweep.check_on_samples, [point for point in points if point.place == place]))
                    write_counts(layout, ranks, {place: steps}, counts)
        return
    for point in random.Random(f"{layout} {ranks}").sample(points, TRIED[ranks]):
        sweep.check_on_samples(point)
