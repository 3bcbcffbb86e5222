"""Which process this is, and what it runs on."""

import os
import subprocess
import sys

import pytest
import torch

from drawbar.distributed.rank_info import RankInfo, choose_device, has_launcher
from drawbar.errors import UserError
from drawbar.launch.rendezvous import VARIABLE

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_alone_without_a_launcher() -> None:
    for environ in ({}, {"LOCAL_RANK": "3", "MASTER_ADDR": "here"}):
        assert RankInfo.from_environment(environ) == RankInfo(0, 1, 0, 1)
    assert RankInfo().is_rank0


def test_the_place_that_torchrun_gives() -> None:
    place = RankInfo.from_environment(TORCHRUN)
    assert place == RankInfo(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert not place.is_rank0


def test_without_the_local_size_all_processes_are_on_this_machine() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    assert RankInfo.from_environment(environ).local_world_size == 8


def test_the_place_that_deepspeed_gives() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    environ |= {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    assert RankInfo.from_environment(environ) == RankInfo(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_whose_parent_is_a_launcher() -> None:
    assert has_launcher({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert has_launcher({**TORCHRUN, "LOCAL_SIZE": "4", "CROSS_SIZE": "2"})
    assert not has_launcher(TORCHRUN)  # as under Slurm's srun, whose processes have no such parent


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_several_by_mpi_are_not_each_alone(name: str) -> None:
    with pytest.raises(UserError, match=rf"MPI started 4 processes[\s\S]*{name}[\s\S]*fix:.*torchrun"):
        RankInfo.from_environment({name: "4"})
    assert RankInfo.from_environment({name: "1"}) == RankInfo()
    assert RankInfo.from_environment({**TORCHRUN, name: "8"}).rank == 5


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_names_what_is_missing(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UserError, match=rf"\b{name} is not set[\s\S]*fix:") as caught:
        RankInfo.from_environment(environ)
    assert "torchrun" in str(caught.value)


@pytest.mark.parametrize("change", [{"RANK": "first"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "0.5"}])
def test_what_is_no_number_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(UserError, match="whole numbers"):
        RankInfo.from_environment({**TORCHRUN, **change})


@pytest.mark.parametrize("rank", ["8", "-1"])
def test_a_rank_outside_the_world_is_refused(rank: str) -> None:
    with pytest.raises(UserError, match=f"RANK={rank} is not below WORLD_SIZE=8"):
        RankInfo.from_environment({**TORCHRUN, "RANK": rank})


def test_the_processor_is_always_there() -> None:
    assert choose_device("cpu", RankInfo()) == torch.device("cpu")


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"no CUDA device[\s\S]*device=cpu"):
        choose_device("cuda", RankInfo())


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for wanted in ("cuda", "auto"):
        with pytest.raises(UserError, match=r"4 processes[\s\S]*2 GPUs[\s\S]*launch.nproc=2"):
            choose_device(wanted, RankInfo(2, 4, 2, 4))


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert choose_device("auto", RankInfo(7, 8, 3, 4)) == torch.device("cuda", 3)
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert choose_device("auto", RankInfo(7, 8, 3, 4)) == torch.device("cuda", 3)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert chosen == 2 * [torch.device("cuda", 3)]


def test_a_launcher_may_show_each_process_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun --gpus-per-task does. Under torchrun all processes see the same one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    assert choose_device("auto", RankInfo(7, 8, 3, 4)) == torch.device("cuda", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match=r"4 processes[\s\S]*1 GPUs are visible"):
        choose_device("auto", RankInfo(7, 8, 3, 4))


@pytest.mark.parametrize(("there", "processes", "expected"), [(True, 1, "mps"), (True, 2, "cpu"), (False, 1, "cpu")])
def test_auto_without_cuda(there: bool, processes: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    assert choose_device("auto", RankInfo(0, processes, 0, processes)) == torch.device(expected)


@pytest.mark.parametrize(("there", "processes", "message"), [(False, 1, "has none"), (True, 2, "one process")])
def test_mps_that_cannot_be(there: bool, processes: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    with pytest.raises(UserError, match=rf"{message}[\s\S]*fix:"):
        choose_device("mps", RankInfo(0, processes, 0, processes))


@pytest.mark.parametrize("variable", ["LOCAL_RANK", VARIABLE, None])
def test_only_ranks_and_launchers_leave_out_the_warnings_of_torchs_code(variable: str | None) -> None:
    """Those of DDP, which no filter of Python's sees; a program that imports drawbar keeps its own."""
    program = "import os, drawbar; print(os.environ.get('TORCH_CPP_LOG_LEVEL'))"
    left_out = ("TORCH_CPP_LOG_LEVEL", "LOCAL_RANK", VARIABLE)
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env | ({variable: "0"} if variable else {}),
        capture_output=True,
        text=True,
    )
    assert done.stdout == ("ERROR\n" if variable else "None\n")
