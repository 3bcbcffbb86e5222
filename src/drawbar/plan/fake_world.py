"""One rank of a world whose other ranks do not exist, on tensors without memory: its steps take neither a device nor
time. Collectives return at once and send nothing; small collectives answer as if all ranks had said the same."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from drawbar.config.parallel_dims import ParallelDims
from drawbar.distributed import device_mesh
from drawbar.distributed.process_group import DataParallelRanks, Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines import local_model, torch_strategies
from drawbar.runtime.torch_internals import FakeStore, FakeTensorMode, ShardingPropagator, _disable_current_modes

T = TypeVar("T")

HOST = torch.device("cpu")
"""Fake tensors are the host's: torch computes their shapes without a GPU, and chooses attention that keeps no scores,
as it does on CUDA."""


_ON_REAL_TENSORS: tuple[tuple[Any, str], ...] = (
    (device_mesh, "init_device_mesh"),
    (torch_strategies, "another_group"),
    *((DeviceMesh, name) for name in ("__getitem__", "_flatten", "_concatenate", "_unflatten")),
    (local_model, "build_stage"),
    (local_model, "prepared_meta_model"),
    (local_model, "apply_dtypes"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
)
"""Functions that run outside the fake tensor mode, as they would fail or count wrongly in it: meshes read their
ranks from tensors, stages are deep copies, peft moves modules to devices, parameters on the meta device change their
dtype in place, and DTensor finds shapes by fake tensors of its own, as large as the full tensor, which no rank
holds."""


class FakeWorld(Distributed):
    """``Distributed`` for a single rank; a context manager, inside which process groups are fake.

    Args:
        rank: which of the ranks this process stands for.
        dims: the degree of each mesh axis.
        ranks_per_node: how many ranks share a machine.
    """

    def __init__(self, rank: int, dims: ParallelDims, ranks_per_node: int) -> None:
        local = min(dims.size, ranks_per_node)
        super().__init__(RankInfo(rank, dims.size, rank % local, local), HOST, 60.0, dims)
        self.dp_ranks = _FakeDataParallelRanks(self)

    def __enter__(self) -> Self:
        if self.size > 1:
            self.ensure_process_group()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def ensure_process_group(self) -> None:
        """Make the fake group of all ranks; it also stands in for the group of a single process."""
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=self.rank, world_size=self.size, store=FakeStore())

    def set_group_timeouts(self) -> None:
        """Nobody is waited for."""

    def barrier(self, what: str) -> None:
        """Nobody is waited for."""

    def sum_all(self, values: list[float]) -> list[float]:
        return [value * self.size for value in values]

    def begin_sum_counts(self, values: list[int]) -> Callable[[], list[int]]:
        return lambda: [value * self.size for value in values]

    def max(self, value: int) -> int:
        return value

    def gather(self, value: Any) -> list[Any] | None:
        return [value] * self.size if self.is_rank0 else None

    def all_gather(self, value: T) -> list[T]:
        return [value] * self.size

    def from_rank0(self, make: Any, what: str) -> Any:
        return make()


class _FakeDataParallelRanks(DataParallelRanks):
    """The data-parallel ranks of a ``FakeWorld``, each of which would contribute what this one does."""

    def sum_of_leaders(self, value: float) -> float:
        return value * self.size

    def sum_counts(self, values: list[int]) -> list[int]:
        return [value * self.size for value in values]

    def gather_from_leaders(self, value: Any) -> list[Any] | None:
        return [value] * self.size


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Context in which every tensor that torch makes is one without memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    init, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def init_without_messages(replica: DistributedDataParallel, *args: Any, **options: Any) -> None:
        init(replica, *args, **{**options, "init_sync": False})  # it would read what the other ranks send
        replica.reduction = _FakeReduction()
        register(replica, None, replica.reduction)

    def reduce_in_bf16(replica: DistributedDataParallel, state: object, hook: object) -> None:
        replica.reduction.dtype = torch.bfloat16  # drawbar registers no other hook than bf16 compression

    DistributedDataParallel.__init__ = init_without_messages
    DistributedDataParallel.register_comm_hook = reduce_in_bf16
    kept = [(owner, name, getattr(owner, name)) for owner, name in _ON_REAL_TENSORS]
    for owner, name, function in kept:
        setattr(owner, name, _on_real_tensors(function))
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            yield mode
    finally:
        DistributedDataParallel.__init__ = init
        DistributedDataParallel.register_comm_hook = register
        for owner, name, function in kept:
            setattr(owner, name, function)


def _on_real_tensors(method: Callable[..., T]) -> Callable[..., T]:
    """The function, wrapped to run outside all dispatch modes, and so on real tensors."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


class _FakeReduction:
    """DDP communication hook that does not wait: torch's own waits for a result, which a fake group never gives."""

    dtype: torch.dtype | None = None
    """The dtype that gradients are sent in; None for their own."""

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "fake_reduction"  # torch asks a hook, which is a function, for both

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer if self.dtype is None else buffer.to(self.dtype)
        dist.all_reduce(sent)
        if sent is not buffer:
            buffer.copy_(sent)
        done: Future[torch.Tensor] = Future()
        done.set_result(buffer)
        return done
