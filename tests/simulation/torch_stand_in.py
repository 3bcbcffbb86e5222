"""What torch does in a simulated run: its store, its collectives, and its elastic launcher.

In stacks, this file is one of torch's.
"""

import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as real
from stand_ins import StartedProcess
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from world import Process, Wait, World, current, world

from drawbar.launch.failures import ERROR_FILE
from drawbar.launch.rendezvous import Rendezvous

_LATENCY = 0.0003, 0.004
_GRACE_SECONDS = 30.0
"""How long torch's launcher waits for a rank between SIGTERM and SIGKILL."""
_EXIT_BARRIER_SECONDS = 300.0
_GONE = "Connection closed by peer [10.0.0.1]:4711"


class Network:
    """What the processes of a world share: stores, groups of ranks, and how late messages are."""

    def __init__(self, room: World) -> None:
        self.room = room
        self.stores: list[StoreServer] = []
        self.hosts: dict[str, StoreServer] = {}
        """Launch id → the store where its nodes meet."""
        self.groups: dict[tuple[Any, ...], Group] = {}
        self.late: dict[str, tuple[float, float]] = {}
        """Name of a process → until when its messages are late, and by how many seconds."""
        self.meetings: dict[str, set[int]] = {}
        """Launch id → the nodes that have come, or are ready to leave."""

    def seconds(self, process: Process) -> float:
        until, late = self.late.get(process.name, (0.0, 0.0))
        return self.room.random.uniform(*_LATENCY) + (late if self.room.now < until else 0.0)


def network() -> Network:
    return world().network  # type: ignore[attr-defined,no-any-return]


class StoreServer:
    """The store inside of the first node's launcher."""

    def __init__(self, host: Process) -> None:
        self.host = host
        self.port = 20_000 + len(network().stores)
        network().stores.append(self)
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[Wait]] = {}
        host.at_end.append(self._end)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for wait in self.waiting.pop(key, ()):
            wait.wake()

    def _end(self) -> None:
        for waits in self.waiting.values():
            for wait in waits:
                wait.wake()


class Store:
    """A connection to a store: ``TCPStore``, and ``PrefixStore`` where there is a prefix."""

    def __init__(self, server: StoreServer, prefix: str = "", timeout: timedelta = timedelta(seconds=300)) -> None:
        self.server, self.prefix, self.timeout = server, prefix, timeout

    def _reach(self) -> dict[str, bytes]:
        """The values, after a message to the server has come there. Raises DistNetworkError if that is gone."""
        world().block(None, network().seconds(current()), interruptible=False)
        host = self.server.host
        while host.is_stopped and host.end is None:
            host.waiting.append(wait := world().new_wait())
            world().block(wait, interruptible=False)
        if host.end is not None:
            raise real.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")
        return self.server.values

    def set(self, key: str, value: str | bytes) -> None:
        self._reach()
        self.server.set(self.prefix + key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key], self.timeout)
        return self.server.values[self.prefix + key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        values = self._reach()
        seconds = (timeout or self.timeout).total_seconds()
        for key in (self.prefix + key for key in keys):
            while key not in values:
                self.server.waiting.setdefault(key, []).append(wait := world().new_wait())
                if not world().block(wait, seconds, interruptible=False):
                    raise real.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: /{key}")
                if self.server.host.end is not None:
                    raise real.DistNetworkError(_GONE)

    def check(self, keys: list[str]) -> bool:
        values = self._reach()
        return all(self.prefix + key in values for key in keys)

    def add(self, key: str, amount: int) -> int:
        values = self._reach()
        total = int(values.get(self.prefix + key, b"0")) + amount
        self.server.set(self.prefix + key, str(total).encode())
        return total

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self.server.values[self.prefix + key] for key in keys]

    def delete_key(self, key: str) -> bool:
        return self._reach().pop(self.prefix + key, None) is not None

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        values = self._reach()
        if self.prefix + key not in values:
            self.server.set(self.prefix + key, value.encode())
        return values[self.prefix + key]


class Work:
    """A collective that a rank has begun: ``dist.Work``."""

    def __init__(self, finish: Callable[[list[Any]], object] = lambda payloads: None) -> None:
        self._finish = finish
        self.is_over = False
        self.error: str | None = None
        self.waiting: list[Wait] = []

    def end(self, payloads: list[Any] | None, error: str | None = None) -> None:
        if self.is_over:
            return
        self.is_over, self.error = True, error
        if payloads is not None:
            self._finish(payloads)
        for wait in self.waiting:
            wait.wake()

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_over:
            self.waiting.append(wait := world().new_wait())
            seconds = None if timeout is None else timeout.total_seconds()
            world().block(wait, seconds, interruptible=False)
        if not self.is_over:
            raise RuntimeError("Wait timeout")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


class Collective:
    """The n-th collective of a group: what each rank has begun, and which of that has come to all others."""

    def __init__(self) -> None:
        self.begun: dict[int, tuple[str, bytes, Work]] = {}
        self.came: set[int] = set()

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.begun.values()}


class Group:
    """Ranks that run collectives together. Their n-th ones belong together; where these differ, none ever ends."""

    def __init__(self, size: int) -> None:
        self.members: list[Process | None] = [None] * size
        self.counts = [0] * size
        self.is_broken = False
        self._collectives: list[Collective] = []

    def join(self, rank: int, process: Process) -> None:
        self.members[rank] = process
        process.at_end.append(self.break_up)

    def begin(self, rank: int, kind: str, payload: Any, work: Work, seconds: float) -> Work:
        """Begin the next collective of a rank, which it gives up after some seconds."""
        number, self.counts[rank] = self.counts[rank], self.counts[rank] + 1
        if number == len(self._collectives):
            self._collectives.append(Collective())
        room, late = world(), network().seconds(current())
        if self.is_broken:
            room.after(late, work.end, None, _GONE)
            return work
        self._collectives[number].begun[rank] = kind, pickle.dumps(payload), work
        room.after(late, self._arrive, self._collectives[number], rank)
        if seconds < 1e6:
            room.after(seconds, self._time_out, work, seconds)
        return work

    def _arrive(self, collective: Collective, rank: int) -> None:
        collective.came.add(rank)
        if len(collective.came) == len(self.members) and len(collective.kinds) == 1 and not self.is_broken:
            payloads = [pickle.loads(collective.begun[other][1]) for other in range(len(self.members))]
            for other, process in enumerate(self.members):
                assert process is not None
                world().after(network().seconds(process), collective.begun[other][2].end, payloads)

    def _time_out(self, work: Work, seconds: float) -> None:
        if not work.is_over:
            work.end(None, f"Timed out waiting {seconds * 1000:.0f}ms for recv operation to complete")
            self.break_up()

    def break_up(self) -> None:
        """A connection has closed: whatever has not come to all ranks by now fails on all of them."""
        if self.is_broken:
            return
        self.is_broken = True
        for collective in self._collectives:
            if len(collective.came) < len(self.members) or len(collective.kinds) > 1:
                for _, _, work in collective.begun.values():
                    world().after(world().random.uniform(*_LATENCY), work.end, None, _GONE)


class ProcessGroup:
    """A rank's view of a group."""

    def __init__(self, group: Group, rank: int, timeout: timedelta) -> None:
        self.group, self.rank, self.timeout = group, rank, timeout.total_seconds()

    def barrier(self, options: Any) -> Work:
        return self.group.begin(self.rank, "barrier", None, Work(), options.timeout.total_seconds())

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        (tensor,) = tensors
        seconds = options.timeout.total_seconds() if options is not None else self.timeout
        is_max = options is not None and options.reduceOp == real.ReduceOp.MAX
        work = Work(lambda values: tensor.copy_(torch.tensor(_reduced(values, is_max), dtype=tensor.dtype)))
        return self.group.begin(self.rank, f"allreduce {tuple(tensor.shape)}", tensor.tolist(), work, seconds)

    def exchange(self, kind: str, value: Any) -> list[Any]:
        """Every rank's value."""
        found: list[Any] = []
        self.group.begin(self.rank, kind, value, Work(found.extend), self.timeout).wait()
        return found


def _reduced(values: list[Any], is_max: bool) -> Any:
    if not isinstance(values[0], list):
        return max(values) if is_max else sum(values)
    return [max(column) if is_max else sum(column) for column in zip(*values, strict=True)]


class Dist:
    """``torch.distributed``; what is not here is torch's own."""

    class group:
        WORLD = None

    HashStore = SimpleNamespace
    DistError, DistNetworkError = real.DistError, real.DistNetworkError

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def TCPStore(self, host: str, port: int, *, wait_for_workers: bool, timeout: timedelta) -> Store:
        return Store(self._server(port), timeout=timeout)

    def _server(self, port: int) -> StoreServer:
        server = next(server for server in network().stores if server.port == port)
        if server.host.end is not None:
            raise real.DistNetworkError("The client socket has failed to connect. Connection reset")
        return server

    def rendezvous(self, url: str, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
        environ = current().environ
        server = self._server(int(environ["MASTER_PORT"]))
        yield Store(server, timeout=timeout), int(environ["RANK"]), int(environ["WORLD_SIZE"])

    def PrefixStore(self, prefix: str, store: Store) -> Store:
        return Store(store.server, f"{store.prefix}{prefix}/", store.timeout)

    def is_initialized(self) -> bool:
        return "world group" in current().state

    def init_process_group(
        self, backend: str, *, store: Store, rank: int, world_size: int, timeout: Any, **_: Any
    ) -> None:
        current().state["store"] = store, rank, world_size
        current().state["world group"] = self._join("world", timeout)

    def new_group(self, *, backend: str, timeout: timedelta, group_desc: str) -> ProcessGroup:
        return self._join(group_desc, timeout)

    def _join(self, name: str, timeout: timedelta) -> ProcessGroup:
        store, rank, size = current().state["store"]
        group = network().groups.setdefault((store.server, store.prefix, name), Group(size))
        group.join(rank, current())
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/{other}" for other in range(size)], timeout)
        return ProcessGroup(group, rank, timeout)

    def destroy_process_group(self) -> None:
        current().state.pop("world group", None)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        current().state["world group"].allreduce([tensor], None).wait()

    def gather_object(self, value: Any, values: list[Any] | None, dst: int, group: ProcessGroup) -> None:
        found = group.exchange("gather", value)
        if values is not None:
            values[:] = found

    def all_gather_object(self, values: list[Any], value: Any, group: ProcessGroup) -> None:
        values[:] = group.exchange("all gather", value)

    def broadcast_object_list(self, box: list[Any], src: int, group: ProcessGroup) -> None:
        box[:] = group.exchange("broadcast", box if group.rank == src else None)[src]


class Starter:
    """``subprocess_handler``, whose ``Popen`` drawbar replaces: each launcher has its own."""

    @property
    def Popen(self) -> Any:
        return current().state.get("Popen", start_rank)

    @Popen.setter
    def Popen(self, value: Any) -> None:
        current().state["Popen"] = value


starter = Starter()
DIST = Dist()


def start_rank(args: tuple[str, ...], env: dict[str, str], **options: Any) -> StartedProcess:
    room, launcher = world(), current()
    process = Process(room, f"rank {env['RANK']} of {launcher.name}", launcher.node, room.rank_main, dict(env))  # type: ignore[attr-defined]
    process.rank = int(env["RANK"])
    room.note(launcher.name, f"starts {process.name}")
    return StartedProcess(process)


class Elastic:
    """``elastic_launch``: meets the other nodes, starts the ranks, and ends them all when one has failed."""

    def __init__(self, config: Any, entrypoint: str) -> None:
        self._config = config
        self._ranks: list[StartedProcess] = []
        self._files: dict[int, str] = {}
        """Rank → the file for its error."""

    def __call__(self, *arguments: str) -> dict[int, None]:
        death = signal.SIGTERM
        try:
            self._meet()
            self._start()
            return self._watch()
        except SignalException as error:
            death = error.sigval
            raise
        finally:
            self._close(death)

    def _meet(self) -> None:
        """c10d's rendezvous. Raises RendezvousError if not all nodes come."""
        config, room = self._config, world()
        end = room.now + config.rdzv_configs["join_timeout"]
        self._node = int(current().environ.get("node", "0"))
        if config.rdzv_configs["is_host"]:
            network().hosts[config.run_id] = StoreServer(current())
        came = network().meetings.setdefault(config.run_id, set())
        came.add(self._node)
        while len(came) < config.max_nodes or not self._has_host():
            if room.now > end:
                raise RendezvousTimeoutError
            room.sleep(0.1)

    def _has_host(self) -> bool:
        server = network().hosts.get(self._config.run_id)
        return server is not None and server.host.end is None

    def _start(self) -> None:
        nproc, nodes = self._config.nproc_per_node, self._config.max_nodes
        port = network().hosts[self._config.run_id].port
        for local in range(nproc):
            rank = self._node * nproc + local
            self._files[rank] = f"{self._config.logs_specs.root_log_dir}/error-{local}.json"
            place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": nproc * nodes, "LOCAL_WORLD_SIZE": nproc}
            env = current().environ | {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(port)}
            env |= {"TORCHELASTIC_RUN_ID": self._config.run_id, ERROR_FILE: self._files[rank]}
            self._ranks.append(starter.Popen(("python", "-u"), env=env))

    def _watch(self) -> dict[int, None]:
        while True:
            world().sleep(self._config.monitor_interval)
            codes = dict(zip(self._files, [rank.poll() for rank in self._ranks], strict=True))
            if any(codes.values()):
                failures = self._failures(codes)
                self._close(signal.SIGTERM)
                left = {
                    rank: self._ranks[rank % len(self._ranks)].poll() for rank, code in codes.items() if code is None
                }
                raise ChildFailedError("drawbar", failures | self._failures(left))  # the others count as failed, too
            if None not in codes.values():
                self._leave_together()
                return dict.fromkeys(codes)
            if self._config.max_nodes > 1 and not self._has_host():
                raise RendezvousConnectionError("The connection to the C10d store has failed.")

    def _failures(self, codes: dict[int, int | None]) -> dict[int, ProcessFailure]:
        """Those of the ranks that have failed, with what they have left by now."""
        return {
            rank: ProcessFailure(
                rank % len(self._ranks), self._ranks[rank % len(self._ranks)].pid, code, self._files[rank]
            )
            for rank, code in codes.items()
            if code
        }

    def _leave_together(self) -> None:
        """The barrier at the exit of the agents; whatever happens there is ignored."""
        done = network().meetings.setdefault(f"{self._config.run_id} is over", set())
        done.add(self._node)
        end = world().now + _EXIT_BARRIER_SECONDS
        while len(done) < self._config.max_nodes and world().now < end and self._has_host():
            world().sleep(0.5)

    def _close(self, death: int) -> None:
        """End the ranks that still run."""
        running = [rank for rank in self._ranks if rank.poll() is None]
        for rank in running:
            _send(rank, death)
        end = world().now + _GRACE_SECONDS
        while world().now < end and any(rank.poll() is None for rank in running):
            world().sleep(0.05)
        for rank in running:
            if rank.poll() is None:
                _send(rank, signal.SIGKILL)
                rank.wait()


def _send(rank: StartedProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        world().send(rank.pid, number)


def rendezvous_of(node: int, nodes: int, number: int) -> Rendezvous:
    """The rendezvous of a command on several nodes."""
    names = tuple(f"node-{chr(ord('a') + other)}" for other in range(nodes))
    return Rendezvous(f"drawbar-{number}", f"10.0.0.1:{29500 + number}", nodes, node, f"10.0.0.{node + 1}", names)
