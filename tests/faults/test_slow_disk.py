"""Acceptance: a slow disk stops nothing. A run trains while a save is written, the next save begins when that one has
ended, and nobody's patience with a rank that saves, or reads a checkpoint, comes to an end."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.inspection import problems
from faulty_disk import Ended, FaultyDisk
from points import write_points

pytestmark = pytest.mark.exhaustive

TIMEOUT = 10
"""``launch.timeout`` in seconds; the least that there is."""
LAYOUTS = {"whole": "ddp", "parts": "fsdp"}
"""With the strategy."""


def train(disk: FaultyDisk, project: Path, layout: str, steps: int, **faults: object) -> Ended:
    settings = (
        *("task.type=points:Points", f"checkpoint.layout={layout}", f"parallel.strategy={LAYOUTS[layout]}"),
        *("checkpoint.every=2", "eval.every=null", f"launch.timeout={TIMEOUT}", f"train.steps={steps}"),
        *("optim.schedule=constant", "tracking.log_every=1"),
    )
    run = project / "runs"
    return disk.run(("train", "config.yaml", *settings), project, run, rank="*", ranks=2, timeout=300, **faults)


def in_both_layouts(check: Callable[[FaultyDisk, Path, str], None], disk: FaultyDisk, folder: Path) -> None:
    """At the same time, as most of it is waiting."""
    with ThreadPoolExecutor(len(LAYOUTS)) as pool:
        tries = []
        for layout in LAYOUTS:
            (folder / layout).mkdir()
            tries.append(pool.submit(check, disk, write_points(folder / layout), layout))
        for done in tries:
            done.result()


def test_a_save_that_takes_longer_than_the_timeout(disk: FaultyDisk, tmp_path: Path) -> None:
    in_both_layouts(check_slow_save, disk, tmp_path)


def check_slow_save(disk: FaultyDisk, project: Path, layout: str) -> None:
    checkpoints = project / "runs" / "points" / "checkpoints"
    first = checkpoints / "step-00000002.tmp"
    done = train(disk, project, layout, 4, slow=first, delay=1.0)
    assert done.code == 0, done.output
    calls = [call for call in done.calls if "/checkpoints/" in call or "metrics.jsonl" in call]
    slow = [number for number, call in enumerate(calls) if first.name in call]
    own = [calls[number] for number in slow if "-00001." not in calls[number]]  # of rank 0, one after another
    assert len(own) > TIMEOUT
    named = calls.index(next(call for call in calls if call.endswith("/step-00000002")))
    assert slow[-1] < named
    logged = [call for call in calls[:named] if call.startswith("write ") and "metrics.jsonl" in call]
    assert len(logged) >= 3, calls  # a line for each step: the third was made before that save of the second had ended
    assert not [call for call in calls[:named] if "step-00000004" in call]
    directory = CheckpointDirectory(checkpoints)
    assert directory.steps() == [2, 4]
    assert [problems(folder) for folder in (directory.resolve("2"), directory.resolve("4"))] == [[], []]


def test_a_checkpoint_that_is_read_for_longer_than_the_timeout(disk: FaultyDisk, tmp_path: Path) -> None:
    in_both_layouts(check_slow_restore, disk, tmp_path)


def check_slow_restore(disk: FaultyDisk, project: Path, layout: str) -> None:
    begun = train(disk, project, layout, 2)
    assert begun.code == 0, begun.output
    file, delay = project / "runs" / "points" / "checkpoints" / "step-00000002" / "rng.safetensors", 2.5
    done = train(disk, project, layout, 4, slow=file, delay=delay, calls=("read",))
    assert done.code == 0, done.output
    of_both_ranks = [call for call in done.calls if file.name in call]
    assert len(of_both_ranks) / 2 * delay > TIMEOUT
