"""``NodeCheck`` and ``NodeWatch``: launchers of several nodes check one another, before and while the ranks run.

First, every node answers the node check, in the store where torch's launchers will also meet. A node that does not
answer in time is named on every node that did, and the run ends: it never continues with fewer nodes. From then on,
each launcher sends heartbeats, so that a node lost during the run is named, and no process waits for it.
"""

import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drawbar.distributed.watchdog import NODE
from drawbar.errors import ExitCode, UserError
from drawbar.launch.findings import (
    NODE_IS_LOST,
    Finding,
    Gpus,
    Level,
    NodeFacts,
    bad_nodes,
    look_at_gpus,
    of_clocks,
    of_nodes,
    problem,
    record_bad_nodes,
    restart_number,
)
from drawbar.launch.rendezvous import Rendezvous

LOST_SECONDS = 60
"""Seconds without a heartbeat after which a node counts as lost and the others end."""
_POLL, _BEAT = 0.05, 1.0
"""Seconds. As there is one heartbeat per second, ``LOST_SECONDS`` and ``_SUSPICION`` are also numbers of heartbeats."""
_LINGER_SECONDS = 5.0
"""Seconds that the first node keeps the store up, so that the others can read a failed check."""
_SUSPICION = 5
"""Seconds without a heartbeat after which a node is reported, once a rank has lost its connection to a peer."""
_CONNECT_SECONDS = 5
"""Timeout in seconds for one attempt to connect, and for an answer from the store."""


@dataclass(frozen=True)
class NodeCheck:
    """One node's part in the node check: ``run`` compares this node with the others.

    Args:
        config: the text of the whole configuration.
        device: the setting.
        run_dir: where bad nodes are recorded.
        seconds: how long the nodes wait for one another.
    """

    config: str
    device: str
    run_dir: Path
    seconds: float

    def run(self, rendezvous: Rendezvous) -> "NodeWatch":
        """Answer, and wait for the result.

        Raises:
            UserError: with exit code 1, on every node that answered: a node did not answer, or does not fit the others.
        """
        os.environ[NODE] = own = rendezvous.name(rendezvous.node)
        facts = collect_facts(own, self.config, self.device)
        store = self._connect(rendezvous)
        try:
            said = replace(facts, time=time.time())  # set now, as connecting may have waited for the first node
            store.set(f"here/{rendezvous.node}", json.dumps(asdict(said)))
            is_first = rendezvous.node == 0
            found = self._collect_answers(store, rendezvous) if is_first else self._await_result(store, rendezvous)
        except (dist.DistError, RuntimeError) as error:
            raise self._first_node_unreachable(rendezvous, f"disconnected: {error}") from error
        if problems := _problems(found):
            what = "\n".join(finding.what for finding in problems)
            raise UserError(
                f"{rendezvous.name(0)} reports that the nodes cannot train together:\n{what}",
                where=f"job {rendezvous.launch_id}",
                remedy=_remedy(problems),
                exit_code=ExitCode.FAILED,
            )
        if rendezvous.node == 0:
            for warning in found:
                print(f"warning: {warning.what}", file=sys.stderr, flush=True)
            print(f"drawbar: the {rendezvous.nodes} nodes have answered: {', '.join(rendezvous.names)}", flush=True)
        return NodeWatch(store, rendezvous, self.run_dir)

    def _connect(self, rendezvous: Rendezvous) -> dist.TCPStore:
        gone = self._first_node_unreachable(rendezvous, f"did not answer within {self.seconds:.0f} s")
        if rendezvous.node == 0:
            return self._listen_at(rendezvous)

        def give_up() -> None:  # torch waits forever if another program listens at the endpoint
            self._record_first_node(rendezvous)
            print(f"error: {gone}", file=sys.stderr, flush=True)
            os._exit(ExitCode.FAILED)

        deadline = threading.Timer(self.seconds + 2 * _CONNECT_SECONDS, give_up)
        deadline.daemon = True
        deadline.start()
        try:
            if not _wait(lambda: _is_open(rendezvous), self.seconds):
                raise dist.DistNetworkError("nobody listens there")
            return _connect_once(rendezvous)
        except (dist.DistError, RuntimeError) as error:
            self._record_first_node(rendezvous)
            raise gone from error
        finally:
            deadline.cancel()

    def _listen_at(self, rendezvous: Rendezvous) -> dist.TCPStore:
        host, _, port = rendezvous.endpoint.rpartition(":")
        try:  # multi-tenant: torch's launcher in this process will find it, and share it
            return dist.TCPStore(host, int(port), is_master=True, multi_tenant=True, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as error:
            raise UserError(
                f"the first node, {rendezvous.name(0)}, cannot listen at {rendezvous.endpoint}: {error}",
                remedy="submit again: another program took the port in the meantime",
                exit_code=ExitCode.FAILED,
            ) from error

    def _collect_answers(self, store: dist.Store, rendezvous: Rendezvous) -> list[Finding]:
        """On the first node: wait for all answers, judge them, and publish the findings."""
        answers: dict[int, NodeFacts] = {}
        heard: dict[int, float] = {}
        end = time.monotonic() + self.seconds
        while len(answers) < rendezvous.nodes and time.monotonic() < end:
            for node in range(rendezvous.nodes):
                if node not in answers and store.check([f"here/{node}"]):
                    heard[node] = time.time()
                    answers[node] = NodeFacts.from_json(json.loads(store.get(f"here/{node}")))
            time.sleep(_POLL)
        there, absent = sorted(answers), sorted(set(range(rendezvous.nodes)) - set(answers))
        said = [answers[node] for node in there]
        found = [
            problem(name, f"node {name} did not answer within {self.seconds:.0f} s")
            for name in map(rendezvous.name, absent)
        ]
        found += [*of_nodes(said), *of_clocks(said, [heard[node] for node in there])]
        problems = _problems(found)
        if bad := _bad_nodes(problems):
            record_bad_nodes(self.run_dir, rendezvous.launch_id, bad)
        store.set("verdict", json.dumps([asdict(finding) for finding in found]))
        if problems:
            others = [f"has_result/{node}" for node in there if node != 0]
            _wait(lambda: not others or store.check(others), _LINGER_SECONDS)
        return found

    def _await_result(self, store: dist.Store, rendezvous: Rendezvous) -> list[Finding]:
        """On the other nodes: wait for the findings."""
        if not _wait(lambda: store.check(["verdict"]), self.seconds + _LINGER_SECONDS):
            raise self._first_node_unreachable(rendezvous, f"sent no result for {self.seconds + _LINGER_SECONDS:.0f} s")
        found = [Finding.from_json(values) for values in json.loads(store.get("verdict"))]
        store.set(f"has_result/{rendezvous.node}", "")
        return found

    def _first_node_unreachable(self, rendezvous: Rendezvous, what: str) -> UserError:
        return UserError(
            f"node {rendezvous.name(rendezvous.node)}: the first node, {rendezvous.name(0)}, {what}",
            where=rendezvous.endpoint,
            remedy=f"look in the log for what {rendezvous.name(0)} reports; can this node reach it (cluster.interface)?"
            " To wait longer at the node check, set launch.roll_call_seconds=N",
            exit_code=ExitCode.FAILED,
        )

    def _record_first_node(self, rendezvous: Rendezvous) -> None:
        """Record the first node as bad, unless it has already recorded this node as bad."""
        if rendezvous.name(rendezvous.node) not in bad_nodes(self.run_dir, rendezvous.launch_id, restart_number()):
            reason = f"node {rendezvous.name(0)} did not answer within {self.seconds:.0f} s"
            record_bad_nodes(self.run_dir, rendezvous.launch_id, {rendezvous.name(0): reason})


def collect_facts(name: str, config: str, device: str) -> NodeFacts:
    """What this node reports in the node check. Args: config: the text of the configuration; device: the setting."""
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    gpus = look_at_gpus(os.environ) if count and torch.version.cuda else Gpus()
    versions = {"drawbar": version("drawbar"), "torch": torch.__version__, "Python": platform.python_version()}
    versions["the NVIDIA driver"] = gpus.driver
    return NodeFacts(name, versions, hashlib.sha256(config.encode()).hexdigest()[:16], count, gpus)


class NodeWatch:
    """Heartbeats between launchers, from the node check until this launcher ends: the first node watches all others,
    and the others watch the first. A context manager.

    Args:
        store: on the first node this is the server, also of torch's launcher: keep it until that launcher has ended.
        run_dir: where a lost node is recorded.
    """

    def __init__(self, store: dist.Store, rendezvous: Rendezvous, run_dir: Path) -> None:
        self._store = store
        self._rendezvous = rendezvous
        self._run_dir = run_dir
        watched = range(1, rendezvous.nodes) if rendezvous.node == 0 else [0]
        # Silence is counted in beats of this node, and not timed: time in which the job is suspended must not count
        self._silent = dict.fromkeys(watched, 0)
        self._last = dict.fromkeys(watched, b"")
        self._departed: set[int] = set()
        self._beats = 0
        self._over = threading.Event()

    def __enter__(self) -> Self:
        # not a daemon, which would abort the process if it called the store when the interpreter exits
        threading.Thread(target=self._watch, name="heartbeats").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failed = isinstance(error, ChildFailedError)
        if isinstance(error, ChildFailedError) and any(map(_is_peer_failure, error.failures.values())):
            self._report_silent_nodes()
        self._over.set()
        self._leave(linger=failed)

    def _leave(self, linger: bool) -> None:
        """Tell the others that this node is not lost. The store ends with the first node, so that node may linger."""
        with suppress(dist.DistError, RuntimeError):  # without the first node, there is no store
            self._store.set(f"left/{self._rendezvous.node}", "")
        if linger and self._rendezvous.node == 0:
            time.sleep(3 * _BEAT)

    def _report_silent_nodes(self) -> None:
        """After a rank lost its connection to a peer: report which node no longer sends heartbeats."""
        enough = self._beats + 4  # four more beats of the watching thread, which may be slow
        _wait(lambda: self._beats >= enough, LOST_SECONDS)
        _wait(lambda: self._lost(_SUSPICION) or not self._lost(2), LOST_SECONDS)  # until no node is in doubt
        self._report_lost(self._lost(_SUSPICION))

    def _watch(self) -> None:
        """At every beat, announce this node, and check which of the others are there."""
        store: dist.Store | None = None
        while not self._over.wait(_BEAT):
            try:
                if store is None:
                    store = _reconnect(self._rendezvous)  # a connection of its own: calls of the main thread may block
                store.set(f"beat/{self._rendezvous.node}", str(self._beats))
                silent = {node for node in self._silent if not self._is_there(store, node)}
                self._end_with_first_node(store)
            except (dist.DistError, RuntimeError):
                store, silent = None, {0} - self._departed
            for node in self._silent:
                self._silent[node] = self._silent[node] + 1 if node in silent else 0
            self._beats += 1
            if lost := self._lost(LOST_SECONDS):
                self._report_lost(lost)
                self._leave(linger=True)
                os._exit(ExitCode.FAILED)  # the ranks' own watchdogs end them

    def _is_there(self, store: dist.Store, node: int) -> bool:
        """Whether a node has sent a heartbeat since the last check, or has left properly."""
        if store.check([f"left/{node}"]):
            self._departed.add(node)
        if node in self._departed:
            return True
        before = self._last[node]
        self._last[node] = store.get(f"beat/{node}") if store.check([f"beat/{node}"]) else b""
        return self._last[node] != before

    def _end_with_first_node(self, store: dist.Store) -> None:
        """End this process if the first node has found a lost node, for which the ranks here might wait a long time."""
        if self._rendezvous.node != 0 and store.check(["lost"]):
            print(f"error: {store.get('lost').decode()}", file=sys.stderr, flush=True)
            os._exit(ExitCode.FAILED)

    def _lost(self, beats: int) -> list[int]:
        return [node for node, silent in self._silent.items() if silent >= beats]

    def _report_lost(self, lost: list[int]) -> None:
        reasons = {}
        for node in lost:
            name, seconds = self._rendezvous.name(node), self._silent[node] * _BEAT
            reasons[name] = f"node {name} {NODE_IS_LOST}: it has sent no heartbeat for {seconds:.0f} s"
            print(f"error: {reasons[name]}", file=sys.stderr, flush=True)
        if not reasons:
            return
        record_bad_nodes(self._run_dir, self._rendezvous.launch_id, reasons)
        if self._rendezvous.node == 0:
            self._store.set("lost", "; ".join(reasons.values()))


def _is_peer_failure(failure: ProcessFailure) -> bool:
    message = failure.error_file_data.get("message")
    return isinstance(message, dict) and bool(message["extraInfo"].get("lost_peer"))


def _is_open(rendezvous: Rendezvous) -> bool:
    """Whether a program listens at the endpoint. torch could wait for that, but fills the log and ignores signals."""
    host, _, port = rendezvous.endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _reconnect(rendezvous: Rendezvous) -> dist.TCPStore:
    if not _is_open(rendezvous):
        raise dist.DistNetworkError(f"nobody listens at {rendezvous.endpoint}")
    return _connect_once(rendezvous)


def _connect_once(rendezvous: Rendezvous) -> dist.TCPStore:
    host, _, port = rendezvous.endpoint.rpartition(":")
    return dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
    )


def _problems(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level is Level.PROBLEM]


def _bad_nodes(problems: Sequence[Finding]) -> dict[str, str]:
    """What is wrong with each node that another one could replace."""
    return {finding.where: finding.what for finding in problems if finding.where}


def _remedy(problems: Sequence[Finding]) -> str:
    remedies = list(dict.fromkeys(finding.remedy for finding in problems if finding.remedy))
    if bad := _bad_nodes(problems):
        names = ",".join(bad)
        remedies.append(
            f"look in the log for what {names} reports; to continue without: cluster.options={{exclude: '{names}'}},"
            " or cluster.exclude_bad_nodes=true for the next time; to wait longer at the node check, set "
            "launch.roll_call_seconds=N"
        )
    return "; or ".join(remedies)


def _wait(ready: Callable[[], object], seconds: float) -> bool:
    """Poll until ``ready()`` is true; False if that takes longer than ``seconds``."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True
