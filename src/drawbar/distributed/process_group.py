"""The processes of a run: connecting them, and the few collectives that are not part of a strategy.

Everything here is a no-op for a single process. Small messages (stop flags, target counts, scores) use gloo on the
host, so that they never wait for the GPU. They wait without a deadline for a rank that is working
(:meth:`Distributed.working`); the engines' collectives have the timeout ``launch.timeout``, so ranks synchronize here
first.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import LimitsSection
from drawbar.distributed import pulse
from drawbar.distributed.interrupt import heard_inside_calls
from drawbar.distributed.liveness import Liveness
from drawbar.distributed.pulse import Kind
from drawbar.distributed.rank_info import RankInfo, has_launcher, node_name, who_set_rank
from drawbar.distributed.watchdog import LAUNCHER, ProcessId, Watchdog
from drawbar.errors import ExitCode, UserError
from drawbar.runtime import torch_internals
from drawbar.runtime.log import logger, told_while_waiting

_stores: list[dist.Store] = []
"""The rendezvous store, and one ``PrefixStore`` of it per ``Distributed`` that was entered."""


def prefixed_store(timeout: timedelta) -> dist.Store:
    """A ``PrefixStore`` for one :class:`Distributed`, so that a second one in this process does not see the keys of the
    first.

    Raises:
        UserError: this process already has a process group.
    """
    if dist.is_initialized():
        raise UserError(
            "this process has a process group already: that of a run that has failed here, or one of the script's own",
            where="torch.distributed",
            remedy="after a failed run, restart the script; do not create a process group before a run",
            exit_code=ExitCode.FAILED,
        )
    if not _stores:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        _stores.append(store)
    own = dist.PrefixStore(f"world-{len(_stores)}", _stores[0])
    _stores.append(own)
    return own


T = TypeVar("T")

_Item = tuple[str, torch.Size, torch.dtype]
"""A tensor to send: its name, shape and dtype."""

_LAUNCHER_SECONDS = 10.0
"""How long to wait for the other ranks of the same launcher before printing a message."""
_FOREVER = timedelta(days=3650)
"""Timeout for gloo when :class:`Liveness` decides how long a rank waits."""


class Distributed:
    """The process group of a run, as a context manager that destroys it on exit, unless there is an error.

    Args:
        rank_info: global and local rank of this process, and the world sizes.
        device: this process's device, for its model, batches and the engines' collectives (nccl on CUDA, else gloo).
        timeout: seconds without a heartbeat from a peer after which waiting for it fails.
        dims: the degree of each mesh axis; by default, all ranks are data-parallel.
        limits: how long a peer may work without progress before waiting for it fails, too.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        device: torch.device,
        timeout: float,
        dims: ParallelDims | None = None,
        limits: LimitsSection | None = None,
    ) -> None:
        pulse.begin()
        self.rank_info = rank_info
        self.device = device
        self.dims = dims or ParallelDims(dp_replicate=rank_info.world_size)
        self.dp_ranks = DataParallelRanks(self)
        self.timeout = timedelta(seconds=timeout)
        self.nodes: tuple[str, ...] = (node_name(),)
        """The name of each rank's node."""
        self.meshes: dict[ParallelDims, DeviceMesh] = {}
        """See ``mesh_of``."""
        self.second_groups: dict[str, dist.ProcessGroup] = {}
        """See ``another_group``."""
        self._control: dist.ProcessGroup | None = None
        self._store: dist.Store = dist.HashStore()
        self._watchdog = Watchdog()
        self._limits = limits or LimitsSection()
        self._liveness = Liveness(self._store, self.rank, self.size, timeout, self._limits)

    def set_dims(self, dims: ParallelDims) -> None:
        """Set the degrees of the strategy. Only dp_replicate and dp_shard may change; every rank keeps its dp_rank."""
        assert (dims.dp_size, dims.dp_rank(self.rank)) == (self.dp_ranks.size, self.dp_ranks.rank)
        self.dims = dims

    @property
    def rank(self) -> int:
        """The global rank of this process, from 0."""
        return self.rank_info.rank

    @property
    def size(self) -> int:
        """Number of processes of the run."""
        return self.rank_info.world_size

    @property
    def is_rank0(self) -> bool:
        return self.rank_info.is_rank0

    @property
    def store(self) -> dist.Store:
        """The rendezvous store, for communication that must work even when collectives do not."""
        return self._store

    def __enter__(self) -> Self:
        if self.size == 1:
            return self
        if has_launcher():
            self._watchdog.start()
        on_cuda = self.device.type == "cuda"
        # torch has no timeout if a foreign program listens on MASTER_PORT; otherwise torch fails before this timer
        seconds = (self._meeting_time + self.timeout).total_seconds() + 5
        deadline = threading.Timer(seconds, self._give_up)
        deadline.daemon = True
        deadline.start()
        # without a launcher the variables may be left over from another run, and no other rank may come
        patience = _LAUNCHER_SECONDS if has_launcher() else 0.5
        try:
            with heard_inside_calls(), told_while_waiting(self._whom_it_waits_for, patience, self._tell):
                ranks = self._meet(on_cuda)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise self._rendezvous_error(f"{self._describe_absent()}{error}") from error
        finally:
            deadline.cancel()
        self._watchdog.watch_ranks(process_id for process_id, _ in ranks)
        self.nodes = tuple(name for _, name in ranks)
        return self

    def _meet(self, on_cuda: bool) -> list[tuple[ProcessId, str]]:
        """Create the groups, and find out the process and node of each rank."""
        self._store = prefixed_store(self.timeout)
        self._store.set(f"came/{self.rank}", node_name())
        if self._store.add("came", 1) == self.size:
            self._store.set("all came", "")
        self._liveness = Liveness(self._store, self.rank, self.size, self.timeout.total_seconds(), self._limits)
        self._liveness.publish_first()
        self._liveness.set_activity("meeting the other ranks", Kind.WAITING)
        self._store.wait(["all came"], self._meeting_time)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",  # gloo for tensors offloaded to the host
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=self.device if on_cuda else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=self.timeout, group_desc="control")
        self._liveness.set_activity("starting")
        self._liveness.start()
        return self.all_gather((self._watchdog.process_id, node_name()))

    @property
    def _meeting_time(self) -> timedelta:
        """How long to wait for all ranks. One that drawbar's launcher has started may be importing the user's code;
        one of another launcher may never have been started."""
        return max(self.timeout, timedelta(seconds=self._limits.start)) if LAUNCHER in os.environ else self.timeout

    def ensure_process_group(self) -> None:
        """Create a process group of one process, for strategies that need one. Several processes already have one."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=self.timeout)

    def set_group_timeouts(self) -> None:
        """Set the run's timeout for all process groups, including those of meshes and libraries: torch's default is 10
        or 30 min. A rank waits there for one that may be at work in its step."""
        # new in torch 2.14; the older function may be removed
        set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else torch_internals._set_pg_timeout
        for group in torch_internals._world.pg_map:
            set_timeout(max(self.timeout, timedelta(seconds=self._limits.step or 0)), group)

    def _whom_it_waits_for(self) -> str:
        others = [rank for rank in range(self.size) if rank != self.rank]
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"rank{'s' * (len(others) > 1)} {_ranges(others)} at {place}, as {who_set_rank()}"

    def _tell(self, text: str) -> None:
        if self.is_rank0:
            logger.warning("rank 0 %s", text)
        elif not has_launcher():  # it may be alone, and ranks other than 0 have no console
            print(f"warning: rank {self.rank} {text}", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        error = self._rendezvous_error("nobody answers at MASTER_ADDR and MASTER_PORT")
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(ExitCode.FAILED)

    def _describe_absent(self) -> str:
        """``ranks 2, 3 did not come: ``; empty if all came, or if it is unknown."""
        try:
            absent = [rank for rank in range(self.size) if not self._store.check([f"came/{rank}"])]
        except (dist.DistError, RuntimeError):
            return ""
        if not absent or self.rank in absent:
            return ""
        return f"rank{'s' * (len(absent) > 1)} {_ranges(absent)} did not come: "

    def _rendezvous_error(self, reason: str) -> UserError:
        return UserError(
            f"rank {self.rank} could not meet the other {self.size - 1} processes: {reason}",
            where=f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}",
            remedy="check that every process was started, with the same MASTER_ADDR and MASTER_PORT, and that no other "
            f"program uses that port; {who_set_rank()}: unset them to run alone",
            exit_code=ExitCode.FAILED,
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # after an error the peers may be gone, and a graceful shutdown would wait for them
        if kind is None and dist.is_initialized():
            self.barrier("the end of the run")
            self._watchdog.stop()
            _retired_groups.append(dist.group.WORLD)
            dist.destroy_process_group()
            self._liveness.set_activity("done", Kind.ENDED)
        self._liveness.stop()

    def lost_a_rank(self) -> bool:
        """Whether a rank on this machine is gone, so that the run cannot continue."""
        return self._watchdog.lost_a_rank()

    def is_busy(self) -> bool:
        """Whether this rank must finish some work before it may end after the loss of another rank."""
        return self._watchdog.is_busy()

    def end_only_after(self, is_busy: Callable[[], bool]) -> None:
        """If another rank is lost, delay the end of this one until ``is_busy()`` is false, so that it finishes its
        work."""
        self._watchdog.is_busy = is_busy

    def set_activity(self, activity: str, kind: Kind | None = None) -> None:
        """Set this rank's activity, for the error messages of ranks that wait for it."""
        self._liveness.set_activity(activity, kind)

    def describe(self) -> str:
        """This rank and its activity, as in ``rank 1 on node-b (step 5, forward)``; empty for a single process."""
        on_node = f" on {self.nodes[self.rank]}" if len(set(self.nodes)) > 1 else ""
        return f"rank {self.rank}{on_node} ({self._liveness.activity})" if self.size > 1 else ""

    def begin_step(self, step: int) -> None:
        """Set the step that the following activities belong to; 0 before the first one, or before the run is built
        again."""
        self._liveness.begin_step(step)

    def working(self, activity: str, kind: Kind | None = None) -> AbstractContextManager[None]:
        """Context manager for work that may take this rank longer than ``launch.timeout``: the others wait for it as
        long as ``launch.limits`` allows, in their next barrier, host sum, gather or ``from_rank0`` of this class. None
        of these may run inside."""
        return self._liveness.working(activity, kind)

    @contextmanager
    def barrier_after(self, activity: str, kind: Kind | None = None) -> Iterator[None]:
        """Context manager for long independent work on each rank, with a barrier on exit. Every rank must enter it."""
        with self.working(activity, kind):
            yield
        self.barrier(activity)

    def barrier(self, what: str) -> None:
        """Wait for every process; for one that is ``working``, as long as it takes.

        Raises:
            UserError: some sent no heartbeat within the timeout; the message names them.
        """
        if self.size > 1:
            self._wait_for_all(what)

    def _wait_for_all(self, what: str | None = None) -> None:
        assert self._control is not None
        options = dist.BarrierOptions()
        options.timeout = _FOREVER
        self._liveness.wait(self._control.barrier(options), what)

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce over all processes, in place; waits as a barrier does."""
        self._liveness.wait(self._begin_reduce(tensor, operation), None)
        return tensor

    def _begin_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        assert self._control is not None
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = _FOREVER
        return self._control.allreduce([tensor], options)

    def sum(self, value: float) -> float:
        """The sum of a host number over all processes, in float64."""
        return self.sum_all([value])[0]

    def sum_all(self, values: list[float]) -> list[float]:
        """The sums of host numbers over all processes, item by item, in float64."""
        if self.size == 1:
            return values
        return self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM).tolist()

    def sum_counts(self, values: list[int]) -> list[int]:
        """The sums of host integers over all processes, item by item."""
        return self.begin_sum_counts(values)()

    def begin_sum_counts(self, values: list[int]) -> Callable[[], list[int]]:
        """The same, without waiting: the returned function waits for the sums. It need not be called."""
        if self.size == 1:
            return lambda: values
        tensor = torch.tensor(values, dtype=torch.int64)
        work = self._begin_reduce(tensor, dist.ReduceOp.SUM)

        def sums() -> list[int]:
            self._liveness.wait(work, None)
            return tensor.tolist()

        return sums

    def max(self, value: int) -> int:
        """The maximum of a host number over all processes."""
        if self.size == 1:
            return value
        return int(self._reduce(torch.tensor(value, dtype=torch.int64), dist.ReduceOp.MAX))

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a device tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's value, in rank order, on rank 0; None on other ranks."""
        if self.size == 1:
            return [value]
        self._wait_for_all()
        values: list[Any] | None = [None] * self.size if self.is_rank0 else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Every process's value, in rank order, on every process."""
        values = [value] * self.size
        if self.size > 1:
            self._wait_for_all()
            dist.all_gather_object(values, value, group=self._control)
        return values

    def lowest_rank_with_same(self, view: object) -> int:
        """The lowest rank whose ``view`` equals this rank's. If ``view`` identifies the files that a rank sees, only
        the returned rank needs to check them."""
        return self.all_gather(view).index(view)

    def gather_dict(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather every process's host tensors on rank 0; an empty dict on others. Rank 0 receives from one rank after
        another. If several processes have a tensor of the same name, that of the lowest rank is used.
        """
        if self.size == 1:
            return tensors
        listed = self.gather(_listed(tensors))
        wanted: list[list[_Item]] = []
        seen: set[str] = set()
        for items in listed or []:
            wanted.append([item for item in items if item[0] not in seen])
            seen |= {name for name, *_ in items}
        wanted = self.from_rank0(lambda: wanted, "listing the tensors")
        found = dict(tensors) if self.is_rank0 else {}
        for rank in range(1, self.size):
            if self.is_rank0:
                found |= self._receive(wanted[rank], rank)
            elif self.rank == rank:
                self._send(tensors, wanted[rank], 0)
            self.barrier(f"sending rank 0 the tensors of rank {rank}")  # the others wait here: recv has a deadline
        return found

    def _send(self, tensors: dict[str, torch.Tensor], items: list[_Item], target: int) -> None:
        for name, *_ in items:
            self.set_activity(f"sending {name}")
            dist.send(tensors[name].contiguous(), dst=target, group=self._control)

    def _receive(self, items: list[_Item], source: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, shape, dtype in items:
            self.set_activity(f"receiving {name}")
            found[name] = torch.empty(shape, dtype=dtype)
            dist.recv(found[name], src=source, group=self._control)
        return found

    def from_rank0(self, make: Callable[[], T], what: str) -> T:
        """Call ``make`` on rank 0, for as long as it takes, and broadcast the result to every process.

        Args:
            what: the activity of rank 0, for messages on the waiting ranks: ``building the tokenizer``.

        Raises:
            UserError: ``make`` raised it; on every process.
        """
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_rank0:
            with self.working(what):
                try:
                    box[0] = make()
                except UserError as error:
                    box[1] = error
        self.barrier(what)
        dist.broadcast_object_list(box, src=0, group=self._control)
        result, failure = box
        if failure is not None:
            raise failure
        return result


class DataParallelRanks:
    """The data-parallel ranks. Ranks that hold parts of one model read the same rows, and only one contributes, so that
    sums and lists count each row once. Not a process group: every rank of the run calls its methods."""

    def __init__(self, world: Distributed) -> None:
        self._world = world
        self.rank = world.dims.dp_rank(world.rank)
        self.size = world.dims.dp_size
        self.is_dp_leader = world.dims.is_dp_leader(world.rank)

    def working(self, activity: str) -> AbstractContextManager[None]:
        return self._world.working(activity)

    def sum_of_leaders(self, value: float) -> float:
        """The sum over the data-parallel ranks, each counted once; on all ranks."""
        return self._world.sum(value if self.is_dp_leader else 0.0)

    def sum_counts(self, values: list[int]) -> list[int]:
        return self._world.sum_counts(values if self.is_dp_leader else [0] * len(values))

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a device tensor, in place."""
        return self._world.sum_tensor(tensor if self.is_dp_leader else tensor.zero_())

    def max(self, value: int) -> int:
        return self._world.max(value)

    def gather_from_leaders(self, value: Any) -> list[Any] | None:
        """Every data-parallel rank's value, in order, on global rank 0; None elsewhere."""
        gathered = self._world.gather((self.is_dp_leader, value if self.is_dp_leader else None))
        return None if gathered is None else [value for is_leader, value in gathered if is_leader]


def _ranges(ranks: Sequence[int]) -> str:
    """``1–3, 5``"""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(start) if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True))


def _listed(tensors: dict[str, torch.Tensor]) -> list[_Item]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


_retired_groups: list[dist.ProcessGroup | None] = []
"""The groups of ended ``Distributed`` objects, kept so that a DDP replica is never the last to hold one. Whoever is
last joins the group's threads, and such a thread may need the GIL, to drop the work that it has just finished.
Python releases the GIL while it waits, a replica's destructor does not: a deadlock (torch 2.13, busy machine)."""
