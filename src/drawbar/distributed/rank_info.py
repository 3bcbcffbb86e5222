"""Rank and host facts, from the environment."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drawbar.distributed.foreign_launcher import refuse_unconnected_processes
from drawbar.distributed.watchdog import NODE
from drawbar.errors import UserError

if TYPE_CHECKING:
    import torch

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
"""Set by torch's and DeepSpeed's launchers, which stay until their ranks end."""


_FURTHER_RANK_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "NODE_RANK",
)
"""What some launchers set besides."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's settings of its CUDA allocator: their name, and an older one. It reads them when it first allocates."""


@contextmanager
def without_rank_in_environment() -> Iterator[None]:
    """Context in which a rank's environment is that of a single process: a user's code may look at it."""
    names = (*_RANK_VARIABLES, *_FURTHER_RANK_VARIABLES)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@dataclass(frozen=True)
class RankInfo:
    """Which process this is. ``rank`` is global; ``local_rank`` is within this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def spans_nodes(self) -> bool:
        """Whether there are ranks on other machines, too."""
        return self.world_size > self.local_world_size

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> "RankInfo":
        """The rank and world size from torchrun or DeepSpeed's launcher; those of a single process without either.

        Raises:
            UserError: some of torchrun's variables are set and others are missing or no numbers; or MPI or srun
                started several processes, and each would train alone.
        """
        if not has_rank(environ):
            refuse_unconnected_processes(environ)
            return RankInfo()
        missing = [name for name in _RANK_VARIABLES if name not in environ]
        if missing:
            raise UserError(
                f"this process was started as one of several, but {', '.join(missing)} is not set",
                where="the environment",
                remedy="start it with torchrun or with launch.nproc=N; or unset RANK and WORLD_SIZE to run alone",
            )
        try:
            world_size, local_rank = int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])
            # torchrun's name, and DeepSpeed's
            local_world_size = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size)
            place = RankInfo(int(environ["RANK"]), world_size, local_rank, local_world_size)
        except ValueError as error:
            raise UserError(
                f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}",
                where="the environment",
                remedy="start it with torchrun or with launch.nproc=N; or unset RANK and WORLD_SIZE to run alone",
            ) from error
        if not 0 <= place.rank < place.world_size:
            raise UserError(
                f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}",
                where="the environment",
                remedy="number the processes from 0 to WORLD_SIZE - 1; torchrun and launch.nproc=N do",
            )
        return place


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """What messages call this node. Slurm's name may differ from the host's."""
    return environ.get(NODE) or environ.get("SLURMD_NODENAME") or socket.gethostname()


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 3``"""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def has_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher gave this process a rank."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def who_set_rank(environ: Mapping[str, str] = os.environ) -> str:
    """For messages: the variables that make this process one of several, and who has set them, as far as is known."""
    by = "torch's launcher, or drawbar's" if has_launcher(environ) else "no launcher that drawbar knows of"
    return f"RANK={environ.get('RANK')} and WORLD_SIZE={environ.get('WORLD_SIZE')} are set in the environment, by {by}"


def has_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process's parent is a launcher that stays for as long as its ranks do."""
    return any(name in environ for name in _LAUNCHER_VARIABLES)


def choose_device(wanted: str, rank_info: RankInfo) -> "torch.device":
    """The device of this process, for the setting ``device``. On CUDA it becomes torch's current one, and its allocator
    gets segments that can grow, unless the environment configures it.

    Raises:
        UserError: the device does not exist here, or this machine has fewer GPUs than processes.
    """
    import torch  # here, as the command line reads ranks without it

    if wanted == "auto":
        if torch.cuda.is_available():
            wanted = "cuda"
        else:
            wanted = "mps" if torch.backends.mps.is_available() and rank_info.world_size == 1 else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("device is mps, but this machine has none", remedy="set device=cpu or device=auto")
        if rank_info.world_size > 1:
            raise UserError("Apple's MPS device serves one process", remedy="set launch.nproc=1 or device=cpu")
        return torch.device("mps")
    if not torch.cuda.is_available():
        raise UserError(
            "device is cuda, but torch sees no CUDA device",
            remedy="set device=cpu, or check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch was built with CUDA",
        )
    count = torch.cuda.device_count()
    # processes of one launcher see the same GPUs; Slurm's srun can show each task only its own (--gpus-per-task)
    index = 0 if count == 1 and not has_launcher() else rank_info.local_rank
    if index >= count:
        raise UserError(
            f"{rank_info.local_world_size} processes on this machine, but {count} GPUs are visible",
            remedy=f"set launch.nproc={count}, or device=cpu",
        )
    # micro-batches differ in size, and a segment that cannot grow is of no use for a larger one
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
