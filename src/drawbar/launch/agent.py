"""Runs several processes on this machine, and on others, with torch's own elastic launcher (what ``torchrun`` runs).

drawbar's process on a node (the node's launcher) calls :func:`run_processes`; each rank calls :func:`report_failure`
before it exits with an error, so that the node's launcher can name the rank that failed *first*, not one that lost its
connection as a result.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.metrics import api as timing
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drawbar.distributed.interrupt import (
    ECHO_SECONDS,
    INTERRUPT_SIGNALS,
    REQUEUE_SIGNALS,
    exit_code_of,
    exit_message,
    exit_now,
    handle,
)
from drawbar.distributed.watchdog import JOINED
from drawbar.errors import ExitCode, UserError, visible
from drawbar.launch.node_check import NodeCheck
from drawbar.launch.rendezvous import Rendezvous
from drawbar.launch.warm_process import STATUS_VARIABLE, ForkedRank, WarmProcess, become_launcher
from drawbar.runtime.torch_internals import subprocess_handler
from drawbar.util.atomic_files import replacing

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_QUIET_CODES = (ExitCode.REQUEUE, ExitCode.INTERRUPTED)
_LOST_PEER = re.compile(r"connection (was likely )?(closed|reset)|broken pipe|remote process", re.IGNORECASE)
"""Matches the messages of gloo, NCCL and torch's store when the other end is gone."""


def run_processes(
    arguments: list[str],
    nproc: int,
    rendezvous: Rendezvous | None = None,
    timeout: float = 600,
    node_check: NodeCheck | None = None,
    warm_process: WarmProcess | None = None,
    *,
    trains: bool = True,
) -> int:
    """Run ``python ARGUMENTS`` as ``nproc`` ranks on this machine and return the exit code of the run.

    Without a ``rendezvous``, torch's store listens on a port that the operating system chooses, so two runs never meet.
    With one, every node calls this, runs the ``node_check``, and waits ``timeout`` seconds for the others. The
    ``warm_process`` forks the ranks if it can. ``trains`` says whether the ranks train a run, for the message after a
    signal.
    """
    become_launcher(nproc)
    logging.disable()  # drawbar prints its own messages instead of torch's
    with tempfile.TemporaryDirectory(prefix="drawbar-") as folder:
        status = Path(folder) / "status"
        os.environ[STATUS_VARIABLE] = str(status)
        ranks: list[_Rank] = []
        _handle_signals(folder, ranks)
        own = rendezvous or Rendezvous(Path(folder).name, "127.0.0.1:0", nodes=1, node=0, address="127.0.0.1")
        config = _launch_config(own, nproc, timeout, folder)
        try:
            checked = node_check.run(rendezvous) if rendezvous and node_check else contextlib.nullcontext()
            with checked, _ranks_of(warm_process, ranks, folder):
                elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            return _explain(error.failures, own.nodes)
        except RendezvousError as error:
            raise UserError(
                f"node {own.node + 1} of {own.nodes} did not meet all the others at {own.endpoint} within "
                f"{timeout:.0f}s",
                remedy="look in the log for what the other nodes report; to wait longer, set launch.timeout=SECONDS",
                exit_code=ExitCode.FAILED,
            ) from error
        except SignalException as error:
            if status.exists():
                return int(status.read_text())
            print(exit_message(error.sigval, trains), file=sys.stderr)
            return exit_code_of(error.sigval)
    return ExitCode.DONE


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
    """A rank, with the methods of ``Popen`` that torch's launcher uses. One that exits successfully before it has met
    the others counts as failed: nothing was done, and the others would wait for it."""

    def __init__(self, process: ForkedRank | subprocess.Popen, environment: dict[str, str]) -> None:
        self.pid = process.pid
        self._process, self._environment = process, environment

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the rank; None while it runs."""
        code = self._process.poll()
        if code != ExitCode.DONE or os.path.exists(self._environment[JOINED]):
            return code
        error = UserError(
            "this process ended with exit code 0 before it had met the others, so nothing was done",
            remedy="make sure that the program starts its run on every rank: all ranks run the same command",
        )
        report_failure(error, self._environment.get(_ERROR_FILE))
        return ExitCode.FAILED

    def wait(self, timeout: float | None = None) -> int | None:
        """The same as ``poll``, once the rank has ended. Raises ``subprocess.TimeoutExpired`` if that takes longer."""
        self._process.wait(timeout)
        return self.poll()


@contextlib.contextmanager
def _ranks_of(warm_process: WarmProcess | None, ranks: list[_Rank], folder: str) -> Iterator[None]:
    """Context in which torch's elastic launcher takes its ranks from ``warm_process``, and adds them to ``ranks``.
    torch has no option for this."""
    start = subprocess_handler.Popen

    def fork_or_start(args: tuple[str, ...], env: dict[str, str], **options: Any) -> _Rank:
        env = {**env, JOINED: os.path.join(folder, f"joined-{len(ranks)}")}
        forked = None if warm_process is None else warm_process.fork(args[2:], env)  # args: python, -u, …
        ranks.append(_Rank(forked or start(args, env=env, **options), env))
        return ranks[-1]

    subprocess_handler.Popen = fork_or_start
    try:
        yield
    finally:
        subprocess_handler.Popen = start


def _handle_signals(folder: str, ranks: Sequence[_Rank]) -> None:
    """Forward the first signal to the ranks, which save and end; at the second, exit at once: the ranks then end, too.

    Torch's launcher would kill ranks that take longer than 30 s to save. A scheduler kills them after its grace period,
    a user with a second signal, and ranks that wait for a lost rank end by themselves.
    """
    told = -math.inf

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if frame is not None and frame.f_code.co_filename == timing.__file__:
            # torch times its functions there, and would raise its own error instead of this exception
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        told = time.monotonic()
        handle(leave_at_once, *REQUEUE_SIGNALS, *INTERRUPT_SIGNALS)
        _signal_and_wait([rank.pid for rank in ranks], number)
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


def _signal_and_wait(pids: Sequence[int], number: int) -> None:
    """Send a signal to the sessions of these children, and wait until they have ended. They are not reaped, as
    this interrupts code that may hold the lock of a ``Popen``."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # raises if another may have its number now
            os.killpg(pid, number)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _explain(failures: dict[int, ProcessFailure], nodes: int) -> int:
    """Print the failure that came first, and return the exit code of the run."""
    rank, first = min(failures.items(), key=lambda item: _time_of(item[1]))
    if first.exitcode in _QUIET_CODES:
        return first.exitcode
    if first.exitcode < 0:
        number = -first.exitcode
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        print(f"error: rank {rank} was killed by {name}", file=sys.stderr)
        if name == "SIGKILL":
            print("  fix:   if the machine ran out of memory, lower train.micro_batch", file=sys.stderr)
        return ExitCode.FAILED
    message = first.error_file_data.get("message")
    if not isinstance(message, dict):
        print(f"error: rank {rank} ended with exit code {first.exitcode} and no message", file=sys.stderr)
        return ExitCode.FAILED
    if message["extraInfo"].get("user_error"):
        origin = "" if first.exitcode == ExitCode.WRONG_REQUEST else f"rank {rank}: "
        print(f"error: {origin}{message['message']}", file=sys.stderr)
        return first.exitcode
    if message["extraInfo"].get("lost_peer") and nodes > 1:  # and no rank here failed before it
        print(f"error: rank {rank} lost its connection to a rank on another node, which had ended", file=sys.stderr)
        print(f"  rank {rank}: {message['message']}", file=sys.stderr)
        print("  fix:   look for that node's error; the log of this rank shows what failed here", file=sys.stderr)
        return ExitCode.FAILED
    text = f"error: rank {rank} failed first: {message['message']}\n{message['extraInfo']['py_callstack']}"
    print(visible(text), file=sys.stderr)
    return ExitCode.FAILED


def _time_of(failure: ProcessFailure) -> float:
    """When a rank failed, in seconds; infinity for a rank without an error file that ended by SIGTERM or after saving:
    the launcher had stopped it because another rank had failed."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return math.inf if failure.exitcode in (-signal.SIGTERM, *_QUIET_CODES) else failure.timestamp
    return float(message["extraInfo"].get("exact_time", failure.timestamp))


def report_failure(error: BaseException, path: str | None = None) -> bool:
    """Write the error to the file that the elastic launcher reads: ``path``, or the one named in the environment. False
    if there is no such launcher."""
    if lost_peer := _is_peer_failure(error):
        time.sleep(2)  # let the launcher first notice the rank that died: it then ends this one as well
    path = path or os.environ.get(_ERROR_FILE)
    if not path or path == os.devnull:
        return False
    now = time.time()
    user_error = isinstance(error, UserError)
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(now)),
        "exact_time": now,
        "user_error": user_error,
        "lost_peer": lost_peer,
    }
    message = str(error) if user_error else f"{type(error).__name__}: {error}"
    with replacing(Path(path), durable=False) as file:
        file.write(json.dumps({"message": {"message": message, "extraInfo": extra}}).encode())
    return True


def report_status(code: int) -> None:
    """Leave the exit code of a node's first rank for the launcher, which loses it when a signal ends the run."""
    path = os.environ.get(STATUS_VARIABLE)
    if path is not None and os.environ.get("LOCAL_RANK") == "0":
        # whole or not at all, as torch's launcher fails on half a file. The launcher and its folder may be gone
        with contextlib.suppress(OSError), replacing(Path(path), durable=False) as file:
            file.write(str(int(code)).encode())


def _is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and _LOST_PEER.search(str(cause)):  # torch's DistError is one
            return True
        cause = cause.__cause__
    return False
