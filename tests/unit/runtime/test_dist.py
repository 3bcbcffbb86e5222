"""The world: collectives on several ranks, none on one, and who is missing when somebody is."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.pulse import PULSE, Kind, Pulse
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import ExitCode, UserError
from exhaustive import some
from harness import free_port, run_ranks

CPU = torch.device("cpu")


def collectives() -> dict[str, Any]:
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        made: list[int] = []

        def make() -> dict[str, int]:
            made.append(world.rank)
            return {"by rank": world.rank}

        world.barrier("a test")
        return {
            "sum": world.sum(2.0**53 + 2 * world.rank),
            "largest": world.max([3, 2**40, -1][world.rank]),
            "tensor": world.sum_tensor(torch.full((2,), float(world.rank))).tolist(),
            "gathered": world.gather({"rank": world.rank}),
            "from first": world.from_rank0(make, "making it"),
            "made": made,
            "first": world.is_rank0,
        }


def refused_by_rank0() -> tuple[str, int, float]:
    """The error, and a sum after it: all ranks are still together."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:

        def make() -> None:
            raise UserError("no room", where="the disk", remedy="make some", exit_code=ExitCode.FAILED)

        with pytest.raises(UserError) as caught:
            world.from_rank0(make, "making it")
        return str(caught.value), caught.value.exit_code, world.sum(1.0)


def test_what_rank_0_refuses_all_ranks_refuse() -> None:
    assert run_ranks(refused_by_rank0, 2) == [("no room\n  where: the disk\n  fix:   make some", 1, 2.0)] * 2


def one_world_after_the_other() -> list[float]:
    totals = []
    for _ in range(4):
        with Distributed(RankInfo.from_environment(), CPU, timeout=30) as world:
            totals.append(world.sum(world.rank + 1.0))
    return totals


def test_a_process_may_join_again() -> None:
    """As where a script trains, evaluates and trains again: the second world must not find the keys of the first."""
    assert run_ranks(one_world_after_the_other, 2) == [[3.0] * 4] * 2


def test_three_ranks() -> None:
    """Numbers travel as float64 and int64: 2**53 + 2 fits into no float32, 2**40 into no int32."""
    results = run_ranks(collectives, 3)
    for rank, found in enumerate(results):
        assert found["sum"] == 3 * 2.0**53 + 6
        assert found["largest"] == 2**40
        assert found["tensor"] == [3.0, 3.0]
        assert found["gathered"] == ([{"rank": 0}, {"rank": 1}, {"rank": 2}] if rank == 0 else None)
        assert found["from first"] == {"by rank": 0}
        assert found["made"] == ([0] if rank == 0 else [])
        assert found["first"] == (rank == 0)


def test_one_process_needs_no_group() -> None:
    with Distributed(RankInfo(), CPU, timeout=60) as world:
        world.barrier("a test")
        assert world.sum(1.5) == 1.5
        assert world.max(7) == 7
        assert world.sum_tensor(torch.ones(2)).tolist() == [1.0, 1.0]
        assert world.gather("a") == ["a"]
        assert world.from_rank0(lambda: 3, "counting") == 3
        assert not dist.is_initialized()


def wait_for_rank_one(done: str) -> tuple[str, int] | None:
    """The error of rank 0; rank 1 stays away, and alive, until rank 0 has given up."""
    world = Distributed(RankInfo.from_environment(), CPU, timeout=60).__enter__()
    if world.rank == 1:
        end = time.monotonic() + 60
        while not Path(done).exists() and time.monotonic() < end:
            time.sleep(0.05)
        return None
    world._liveness.timeout = 1  # only now: joining may take longer on a busy machine
    try:
        world.barrier("the test")
    except UserError as error:
        return str(error), error.exit_code
    finally:
        Path(done).touch()
    return None


def test_a_barrier_names_the_rank_that_does_not_come(tmp_path: Path) -> None:
    result, _ = run_ranks(wait_for_rank_one, 2, str(tmp_path / "done"))
    assert result is not None
    message, code = result
    assert "rank 0 waited 1s for the others at the test: rank 1 (" in message
    assert "launch.timeout" in message
    assert code == ExitCode.FAILED


def die_at_work() -> float:
    """Seconds until rank 0 knows it."""
    world = Distributed(RankInfo.from_environment(), CPU, timeout=60).__enter__()
    if world.rank == 1:
        with world.working("writing the checkpoint of step 3"):
            time.sleep(1)
            os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        world.barrier("the test")
    return time.monotonic() - began


def test_a_rank_that_dies_at_work_is_noticed_at_once() -> None:
    seconds, _ = run_ranks(die_at_work, 2)
    assert seconds < 30  # half the timeout


def init_single_process_group() -> tuple[str, int] | None:
    try:
        Distributed(RankInfo.from_environment(), CPU, timeout=1).__enter__()
    except UserError as error:
        return str(error), error.exit_code
    return None


def come_or_stay_away() -> tuple[str, int] | None:
    return None if os.environ["RANK"] == "1" else init_single_process_group()


def test_the_rank_that_does_not_come_is_named() -> None:
    told, nothing, _ = run_ranks(come_or_stay_away, 3)
    assert nothing is None
    assert told is not None
    assert "rank 0 could not meet the other 2 processes: rank 1 did not come" in told[0]


def pulse_of_one_that_waits() -> Pulse | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pulse"
        os.environ[PULSE] = str(path)
        come_or_stay_away()
        return Pulse.read(path)


def test_a_rank_that_waits_for_one_that_does_not_come_is_no_suspect() -> None:
    waits, absent = run_ranks(pulse_of_one_that_waits, 2)
    assert waits is not None
    assert waits.kind is Kind.WAITING
    assert absent is None


@pytest.mark.parametrize(
    ("rank", "number", "code"), some([("0", "SIGINT", ExitCode.INTERRUPTED), ("1", "SIGTERM", ExitCode.REQUEUE)], 1)
)
def test_a_rank_that_waits_says_for_whom_and_hears_a_signal(rank: str, number: str, code: int) -> None:
    """In torch's store, which waits in C++: with variables that are left over from another run."""
    place = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    program = [sys.executable, "-c", WAITING]
    with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "waits for" in line)
            others = "1–3" if rank == "0" else "0, 2–3"
            assert f"rank {rank} waits for ranks {others} at 127.0.0.1:{env['MASTER_PORT']}" in line
            assert f"RANK={rank} and WORLD_SIZE=4 are set in the environment, by no launcher" in line
            process.send_signal(getattr(signal, number))
            assert process.wait(60) == code  # without an ear for it, it would wait for ten minutes
        finally:
            process.kill()


WAITING = """
import logging, torch
from drawbar.distributed.interrupt import exit_on_signal
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo

logging.basicConfig()
with exit_on_signal():
    Distributed(RankInfo.from_environment(), torch.device("cpu"), timeout=600).__enter__()
"""


FORKING = """
import os, signal, time
from drawbar.distributed.interrupt import exit_now, handle

handle(lambda *_: None, signal.SIGTERM, deaf=exit_now)
if not os.fork():
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.wait()
time.sleep(1.5)
"""


def test_a_signal_of_a_fork_is_none_of_its_parents() -> None:
    assert subprocess.run([sys.executable, "-c", FORKING], check=False, timeout=60).returncode == 0


LATE_READER = """
import ctypes, os, signal, time
from drawbar.distributed.interrupt import exit_now, handle

heard = []
handle(lambda *_: heard.append(1), signal.SIGTERM, deaf=exit_now)
os.kill(os.getpid(), signal.SIGTERM)
ctypes.PyDLL(None).usleep({microseconds})  # PyDLL: no other thread of this process runs meanwhile
{again}
time.sleep(2.5)
print(len(heard))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("again", ["", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_signal_that_a_thread_learns_of_late_was_heard(again: str) -> None:
    script = LATE_READER.format(microseconds=2_000_000, again=again)
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n" if again else "1\n")


def test_a_world_that_never_gets_together() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (result,) = run_ranks(init_single_process_group, 1, env=place)
    assert result is not None
    message, code = result
    assert "rank 0 could not meet the other 1 processes" in message
    assert "MASTER_ADDR" in message
    assert code == ExitCode.FAILED
