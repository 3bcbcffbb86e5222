"""The local launcher: what it gives to each process."""

import json
import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from drawbar.config.schema.run_config import LimitsSection
from drawbar.launch.agent import _parted, run_processes
from drawbar.launch.failures import End, explain, report_failure
from drawbar.launch.observer import Observer
from drawbar.launch.rendezvous import Rendezvous
from harness import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs to choose its cores")
REPORT = """
import json, os, pathlib, sys
from drawbar.distributed import pulse
pulse.begin()
pulse.Pulse(1, pulse.Kind.ENDED).write()
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


def launch_script(script: str) -> tuple[int, str]:
    with redirect_stderr(StringIO()) as said:
        return run_processes(["-c", script], 2), said.getvalue()


@pytest.mark.parametrize(
    "script",
    ["pass", "import os, time; time.sleep(600 if os.environ['RANK'] == '0' else 0)", "import sys; sys.exit()"],
    ids=["all", "one", "by sys.exit"],
)
def test_a_rank_that_ends_without_having_met_the_others_has_failed(script: str) -> None:
    ((code, said),) = run_ranks(launch_script, 1, script)
    assert code == 1
    assert "this process ended with exit code 0 before it had met the others" in said


def test_a_rank_that_ends_in_an_evaluation_before_its_first_step_is_lost() -> None:
    """As of a run that is resumed where an evaluation is due."""
    script = REPORT.replace("ENDED", "CALLBACK").partition("names =")[0]
    ((code, said),) = run_ranks(launch_script, 1, script)
    assert code == 1
    assert "this process ended with exit code 0 before its run was complete" in said


def explained(failure: ProcessFailure, nodes: int = 1) -> End:
    return explain({0: failure}, Observer(LimitsSection(), timeout=10, host="node-a" if nodes > 1 else ""))


LOST = "lost its connection to a rank on another node"


@pytest.mark.parametrize(
    ("error", "nodes", "lost"),
    [
        (RuntimeError("[gloo/pair.cc:525] Connection closed by peer [10.0.0.2]:7"), 2, True),
        (dist.DistBackendError("NCCL error: a remote process exited"), 2, True),
        (dist.DistStoreError("wait timeout after 10000ms, keys: /world-1/0//cpu//0/1"), 2, True),
        (RuntimeError("[gloo/pair.cc:525] Connection closed by peer [10.0.0.2]:7"), 1, False),
        (dist.DistBackendError("NCCL error: invalid usage of NCCL_SOCKET_IFNAME"), 2, False),
        (OSError("cannot read gloomy.txt"), 2, False),
    ],
)
def test_a_lost_connection_hides_no_other_error(error: Exception, nodes: int, lost: bool, tmp_path: Path) -> None:
    assert report_failure(error, str(tmp_path / "error"))
    end = explained(ProcessFailure(0, 7, 1, str(tmp_path / "error")), nodes)
    assert end.code == 1
    assert str(error) in end.message
    assert (LOST in end.message) is lost


def test_a_rank_whose_launcher_is_gone_reports_its_error_itself(tmp_path: Path) -> None:
    assert not report_failure(ValueError("its own"), str(tmp_path / "gone" / "error"))


@pytest.mark.parametrize(("has_met", "said"), [(False, "did not meet all the others"), (True, "lost its connection")])
def test_nodes_that_have_met_do_not_meet_again(has_met: bool, said: str) -> None:
    own = Rendezvous("drawbar-7", "10.0.0.1:7", nodes=2, node=1, address="10.0.0.2")
    assert said in str(_parted(own, 10, has_met=has_met))


def test_a_rank_may_be_killed_by_a_signal_without_a_name() -> None:
    assert explained(ProcessFailure(0, 7, -35, "no-such-file")) == End(
        1, "error: rank 0 was killed by signal 35", is_abnormal=True, lost_a_rank=True
    )
