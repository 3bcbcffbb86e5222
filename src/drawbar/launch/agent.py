"""Runs several processes on this machine, and on others, with torch's own elastic launcher (what ``torchrun`` runs).

drawbar's process on a node (the node's launcher) calls :func:`run_processes`. It watches its ranks (``Observer``), and
names the one that failed *first* (``explain``), not one that lost its connection as a result.
"""

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.metrics import api as timing
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drawbar.config.schema.run_config import LaunchSection
from drawbar.distributed.interrupt import (
    ECHO_SECONDS,
    INTERRUPT_SIGNALS,
    REQUEUE_SIGNALS,
    exit_code_of,
    exit_message,
    exit_now,
    handle,
)
from drawbar.distributed.pulse import PULSE, Kind
from drawbar.distributed.rank_info import node_name
from drawbar.errors import ExitCode, UserError
from drawbar.launch.autopsy import write_autopsy
from drawbar.launch.failures import ERROR_FILE, End, explain, report_failure
from drawbar.launch.node_check import NodeCheck
from drawbar.launch.observer import Observer, WatchedRank
from drawbar.launch.observer import __file__ as observer_file
from drawbar.launch.rendezvous import Rendezvous
from drawbar.launch.warm_process import STATUS_VARIABLE, ForkedRank, WarmProcess, become_launcher
from drawbar.runtime.torch_internals import subprocess_handler
from drawbar.util.run_dir import newest_step


def run_processes(
    arguments: list[str],
    nproc: int,
    rendezvous: Rendezvous | None = None,
    launch: LaunchSection | None = None,
    node_check: NodeCheck | None = None,
    warm_process: WarmProcess | None = None,
    run_dir: Path | None = None,
    again: list[str] | None = None,
) -> int:
    """Run ``python ARGUMENTS`` as ``nproc`` ranks on this machine and return the exit code of the run.

    Without a ``rendezvous``, torch's store listens on a port that the operating system chooses, so two runs never meet.
    With one, every node calls this, runs the ``node_check``, and waits ``launch.timeout`` seconds for the others. The
    ``warm_process`` forks the ranks if it can. If the ranks train a run, ``run_dir`` is its directory, for an autopsy;
    on a single node, they start again if one is lost (``launch.restarts``), with the arguments ``again`` if given.
    """
    become_launcher(nproc)
    logging.disable()  # drawbar prints its own messages instead of torch's
    launch = launch or LaunchSection()
    run = partial(_run_once, nproc=nproc, rendezvous=rendezvous, launch=launch, node_check=node_check, run_dir=run_dir)
    try:
        end = run(arguments, warm_process=warm_process)
        if run_dir is None or (rendezvous is not None and rendezvous.nodes > 1):
            return end.code
        restarts, newest = 0, -1
        while end.lost_a_rank:
            restarts = 1 if newest_step(run_dir) > newest else restarts + 1
            if restarts > launch.restarts:
                break
            newest = newest_step(run_dir)
            print(f"{run_dir}: starting the ranks again ({restarts} of {launch.restarts})", file=sys.stderr)
            end = run(again or arguments)
    except SignalException as error:
        return _leave(error.sigval, trains=run_dir is not None)
    return end.code


def _run_once(
    arguments: list[str],
    *,
    nproc: int,
    rendezvous: Rendezvous | None,
    launch: LaunchSection,
    node_check: NodeCheck | None,
    run_dir: Path | None,
    warm_process: WarmProcess | None = None,
) -> End:
    """Start the ranks, and wait until all have ended. Prints how they have ended if they fail."""
    several_nodes = rendezvous is not None and rendezvous.nodes > 1
    observer = Observer(launch.limits, launch.timeout, node_name() if several_nodes else "")
    with tempfile.TemporaryDirectory(prefix="drawbar-") as folder:
        status = Path(folder) / "status"
        os.environ[STATUS_VARIABLE] = str(status)
        _handle_signals(folder, observer)
        own = rendezvous or Rendezvous(Path(folder).name, "127.0.0.1:0", nodes=1, node=0, address="127.0.0.1")
        config = _launch_config(own, nproc, launch.timeout, folder)
        try:
            checked = node_check.run(rendezvous) if rendezvous and node_check else contextlib.nullcontext()
            with checked, _ranks_of(warm_process, observer, folder):
                elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            return _report(explain(error.failures, observer), observer, run_dir)
        except RendezvousError as error:
            if observer.verdict is None:
                raise _parted(own, launch.timeout, has_met=bool(observer.ranks)) from error
            return _report(End(ExitCode.FAILED, f"error: {observer.verdict}", is_abnormal=True), observer, run_dir)
        except SignalException as error:
            code = int(status.read_text()) if status.exists() else exit_code_of(error.sigval)
            if observer.verdict is not None:
                return _report(End(code, f"error: {observer.verdict}", is_abnormal=True), observer, run_dir)
            return End(code if status.exists() else _leave(error.sigval, trains=run_dir is not None))
    return End(ExitCode.DONE)


def _parted(own: Rendezvous, timeout: float, *, has_met: bool) -> UserError:
    """The error of a node that is without the others: they did not come, or the first one, which hosts the store where
    they met, has gone."""
    what = "lost its connection to the first node, whose launcher has ended"
    remedy = "look in the log for what the other nodes report"
    if not has_met:
        what = f"did not meet all the others at {own.endpoint} within {timeout:.0f}s"
        remedy += "; to wait longer, set launch.timeout=SECONDS"
    return UserError(f"node {own.node + 1} of {own.nodes} {what}", remedy=remedy, exit_code=ExitCode.FAILED)


def _leave(received: signal.Signals, *, trains: bool) -> int:
    """Print that a signal came when nothing could be saved. Returns the exit code."""
    print(exit_message(received, trains), file=sys.stderr)
    return exit_code_of(received)


def _report(end: End, observer: Observer, run_dir: Path | None) -> End:
    """Print how the ranks ended, and write an autopsy."""
    if end.message:
        print(end.message, file=sys.stderr)
    if end.is_abnormal and run_dir is not None and (observer.guilty or not observer.has_other_nodes):
        autopsy = write_autopsy(run_dir, end.message, observer.ranks, node_name(), has_hung=observer.found_stuck)
        if autopsy is not None:
            print(f"  more:  {autopsy}", file=sys.stderr)
    return end


def _launch_config(rendezvous: Rendezvous, nproc: int, timeout: float, log_dir: str) -> LaunchConfig:
    """The configuration of torch's elastic launcher on this node."""
    return LaunchConfig(
        min_nodes=rendezvous.nodes,
        max_nodes=rendezvous.nodes,
        nproc_per_node=nproc,
        run_id=rendezvous.launch_id,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous.endpoint,
        # torch would guess from host names which node hosts the store
        rdzv_configs={"is_host": rendezvous.node == 0, "read_timeout": int(timeout), "join_timeout": int(timeout)},
        local_addr=rendezvous.address,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        signals_to_handle="SIGQUIT",  # drawbar handles the other signals itself
    )


class _Rank:
    """A rank, with the methods of ``Popen`` that torch's launcher uses. One that exits successfully before its run has
    ended counts as failed: the others would wait for it."""

    def __init__(self, process: ForkedRank | subprocess.Popen, watched: WatchedRank, observer: Observer) -> None:
        self.pid = process.pid
        self._process, self._watched, self._observer = process, watched, observer

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the rank; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._observer.note_end(self._watched, code)
        if code != ExitCode.DONE or self._watched.pulse.kind is Kind.ENDED:
            return code
        report_failure(self._early_end(), str(self._watched.errors), lost_a_rank=self._has_met_the_others())
        return ExitCode.FAILED

    def wait(self, timeout: float | None = None) -> int | None:
        """The same as ``poll``, once the rank has ended. Raises ``subprocess.TimeoutExpired`` if that takes longer."""
        self._process.wait(timeout)
        return self.poll()

    def _has_met_the_others(self) -> bool:
        # a resumed run may evaluate, and wait for that, before its first step
        return self._watched.pulse.step > 0 or self._watched.pulse.kind is not Kind.START

    def _early_end(self) -> UserError:
        if self._has_met_the_others():
            return UserError(
                "this process ended with exit code 0 before its run was complete",
                remedy="look for what ends it, such as os._exit() in the task or a callback",
            )
        return UserError(
            "this process ended with exit code 0 before it had met the others, so nothing was done",
            remedy="make sure that the program starts its run on every rank: all ranks run the same command",
        )


@contextlib.contextmanager
def _ranks_of(warm_process: WarmProcess | None, observer: Observer, folder: str) -> Iterator[None]:
    """Context in which torch's elastic launcher takes its ranks from ``warm_process``, and ``observer`` watches them.
    torch has no option for this."""
    start = subprocess_handler.Popen

    def fork_or_start(args: tuple[str, ...], env: dict[str, str], **options: Any) -> _Rank:
        pulse = Path(folder) / f"rank-{len(observer.ranks)}.pulse"
        env = {**env, PULSE: str(pulse)}
        forked = None if warm_process is None else warm_process.fork(args[2:], env)  # args: python, -u, …
        process = forked or start(args, env=env, **options)
        if observer.has_other_nodes and not observer.ranks:
            observer.share(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        watched = observer.add(int(env["RANK"]), process.pid, pulse, Path(env[ERROR_FILE]))
        return _Rank(process, watched, observer)

    subprocess_handler.Popen = fork_or_start
    observer.start()
    try:
        yield
    finally:
        subprocess_handler.Popen = start
        observer.stop()


def _handle_signals(folder: str, observer: Observer) -> None:
    """Forward the first signal to the ranks, which save and end; at the second, exit at once: the ranks then end, too.

    Torch's launcher would kill ranks that take longer than 30 s to save. A scheduler kills them after its grace period,
    a user with a second signal, the observer if they are stuck, and ranks that wait for a lost rank end by themselves.
    """
    told = -math.inf

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if _must_not_interrupt(frame):
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        told = time.monotonic()
        handle(leave_at_once, *REQUEUE_SIGNALS, *INTERRUPT_SIGNALS)
        _signal_and_wait(observer.ranks, number)
        raise SignalException(f"received signal {number}", sigval=signal.Signals(number))

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        if number in REQUEUE_SIGNALS and time.monotonic() - told < ECHO_SECONDS:
            return  # an echo of the first signal: a scheduler may signal both Apptainer and this process inside
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    def leave_deaf(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        exit_now(number, frame)

    handle(pass_on, *REQUEUE_SIGNALS, *INTERRUPT_SIGNALS, deaf=leave_deaf)


def _must_not_interrupt(frame: FrameType | None) -> bool:
    """Whether a signal has come inside a call that must not raise or wait: where torch times its functions, it would
    raise its own error instead; in the observer, the main thread holds its lock."""
    if frame is not None and frame.f_code.co_filename == timing.__file__:
        return True
    while frame is not None and frame.f_code.co_filename != observer_file:
        frame = frame.f_back
    return frame is not None


def _signal_and_wait(ranks: Sequence[WatchedRank], number: int) -> None:
    """Send a signal to the sessions of these ranks, and wait until they have ended. They are not reaped, as this
    interrupts code that may hold the lock of a ``Popen``."""
    for rank in ranks:
        rank.send(number, os.killpg)
    for rank in ranks:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
