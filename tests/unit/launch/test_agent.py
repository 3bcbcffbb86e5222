"""The local launcher: what it gives to each process."""

import json
import os
from pathlib import Path

import pytest

from drawbar.launch.node.agent import run_processes
from harness import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs to choose its cores")
REPORT = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in names}))
"""


def launch(folder: str, processes: int, cores: set[int], threads: str | None) -> int:
    """In a process of its own, whose environment and cores may be changed."""
    os.sched_setaffinity(0, cores)
    os.environ.pop("OMP_NUM_THREADS")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    return run_processes(["-c", REPORT, folder], processes)


def reports(folder: Path, processes: int, cores: set[int], threads: str | None = None) -> list[dict[str, str]]:
    folder.mkdir()
    (code,) = run_ranks(launch, 1, str(folder), processes, cores, threads)
    assert code == 0
    assert {path.name for path in folder.iterdir()} == {str(rank) for rank in range(processes)}
    return [json.loads((folder / str(rank)).read_text()) for rank in range(processes)]


def test_processes_share_the_cores(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    (alone,) = reports(tmp_path / "alone", 1, cores)
    assert alone["OMP_NUM_THREADS"] == str(len(cores))
    crowd = reports(tmp_path / "crowd", 3, set(list(cores)[:2]))
    assert [report["OMP_NUM_THREADS"] for report in crowd] == ["1", "1", "1"]
    assert [(report["RANK"], report["LOCAL_RANK"], report["WORLD_SIZE"]) for report in crowd] == [
        ("0", "0", "3"),
        ("1", "1", "3"),
        ("2", "2", "3"),
    ]


def test_threads_that_are_set_stay_set(tmp_path: Path) -> None:
    (report,) = reports(tmp_path / "set", 1, os.sched_getaffinity(0), threads="7")
    assert report["OMP_NUM_THREADS"] == "7"
