"""How a rank failed: what it leaves for its launcher, and the one message for all ranks of a launcher."""

import contextlib
import json
import math
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from drawbar.distributed.liveness import is_peer_failure
from drawbar.errors import ExitCode, UserError
from drawbar.launch.observer import QUIET_CODES, Observer
from drawbar.launch.warm_process import STATUS_VARIABLE
from drawbar.util.atomic_files import replacing

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class End:
    """How the ranks of a launcher ended."""

    code: int
    message: str = ""
    """What to print; empty if the ranks have said everything."""
    is_abnormal: bool = False
    """Whether a rank failed in a way that an autopsy may explain."""
    lost_a_rank: bool = False
    """Whether a rank was lost, rather than ended by an error of the user's."""


def explain(failures: Mapping[int, ProcessFailure], observer: Observer) -> End:
    """The exit code of the run, and the message for the failure that came first."""
    rank, first = min(failures.items(), key=lambda item: _time_of(item[1]))
    message = _message_of(first)
    if observer.verdict is not None:
        return _abnormal(observer.verdict)
    if not message and first.exitcode in QUIET_CODES:
        return End(first.exitcode)
    name = observer.name(rank)
    if not message:
        how, remedy = _end_without_message(first)
        return _abnormal(observer.announce(rank, f"{name} {how}", remedy))
    extra, text = message["extraInfo"], message["message"]
    if extra["lost_peer"] and (told := observer.told_by_another_node(wait=True)):
        return _abnormal(told)
    if extra["lost_peer"] and observer.has_other_nodes:  # and no rank here failed before it
        what = f"{name} lost its connection to a rank on another node, which has ended or is silent: {text}"
        remedy = "look for that node's error; the log of this rank shows what failed here"
        return _abnormal(UserError(what, remedy=remedy))
    if extra["user_error"] and first.exitcode == ExitCode.WRONG_REQUEST:
        return End(first.exitcode, f"error: {text}")
    if extra["user_error"]:
        what = f"{extra['origin'] or name}: {text}"
    else:
        what = f"{name} failed first: {text}\n{extra['py_callstack']}"
    return _abnormal(observer.announce(rank, what), first.exitcode, lost_a_rank=extra["lost_a_rank"])


def _abnormal(error: UserError, code: int = ExitCode.FAILED, *, lost_a_rank: bool = True) -> End:
    lost_a_rank = lost_a_rank and code == ExitCode.FAILED  # and not interrupted
    return End(code, f"error: {error}", is_abnormal=True, lost_a_rank=lost_a_rank)


def _end_without_message(failure: ProcessFailure) -> tuple[str, str | None]:
    """What happened to a rank that left no message, and what to do about it."""
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode} and no message", None
    number = -failure.exitcode
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    out_of_memory = "if the machine ran out of memory, lower train.micro_batch"
    return f"was killed by {name}", out_of_memory if name == "SIGKILL" else None


def _message_of(failure: ProcessFailure) -> dict[str, Any]:
    """What ``report_failure`` wrote; empty if the rank wrote nothing."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, dict) else {}


def _time_of(failure: ProcessFailure) -> float:
    """When a rank failed, in seconds; infinity for a rank without an error file that ended by SIGTERM or after saving:
    the launcher had stopped it because another rank had failed."""
    message = _message_of(failure)
    if not message:
        return math.inf if failure.exitcode in (-signal.SIGTERM, *QUIET_CODES) else failure.timestamp
    return float(message["extraInfo"]["exact_time"])


def report_failure(error: BaseException, path: str | None = None, *, lost_a_rank: bool = False) -> bool:
    """Write the error to the file that the elastic launcher reads: ``path``, or the one named in the environment. False
    if there is no such launcher, or it is gone. ``lost_a_rank``: the error is that a rank is gone, as it also is where
    another rank does not answer."""
    if lost_peer := is_peer_failure(error):
        time.sleep(2)  # let the launcher first notice the rank that died: it then ends this one as well
    path = path or os.environ.get(ERROR_FILE)
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
        "lost_a_rank": lost_a_rank or lost_peer,
        "origin": getattr(error, "origin", ""),
    }
    message = str(error) if user_error else f"{type(error).__name__}: {error}".removesuffix(": ")
    try:
        with replacing(Path(path), durable=False) as file:
            file.write(json.dumps({"message": {"message": message, "extraInfo": extra}}).encode())
    except OSError:  # the launcher and its folder may be gone
        return False
    return True


def report_status(code: int) -> None:
    """Leave the exit code of a node's first rank for the launcher, which loses it when a signal ends the run."""
    path = os.environ.get(STATUS_VARIABLE)
    if path is not None and os.environ.get("LOCAL_RANK") == "0":
        # whole or not at all, as torch's launcher fails on half a file. The launcher and its folder may be gone
        with contextlib.suppress(OSError), replacing(Path(path), durable=False) as file:
            file.write(str(int(code)).encode())
