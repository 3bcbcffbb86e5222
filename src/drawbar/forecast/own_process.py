"""Runs a function in a process of its own: what torch keeps of a rank's process groups would break those of the
next."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from drawbar.errors import ExitCode, UserError

T = TypeVar("T")


def in_own_process(function: Callable[[], T], what: str, timeout: float) -> T:
    """Run ``function`` in a fork of this process, and return its result, which must pickle.

    Args:
        what: what is forecast, for messages.
        timeout: longest wait for the result, in seconds.

    Raises:
        UserError: the function raised it; or it failed, or took too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, sender), daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise _failed(what, f"gave no answer within {timeout:.0f} s")
        answer = receiver.recv()
    except EOFError as error:
        process.join()
        raise _failed(what, f"its process ended with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, _Crash):
        raise _failed(what, answer.summary)
    return answer


class _Crash:
    """Stands for an exception in the fork that is no UserError, and may not pickle."""

    def __init__(self, summary: str) -> None:
        self.summary = summary


def _run(function: Callable[[], Any], sender: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of torch's about ranks and devices that are not there
    try:
        answer = function()
    except UserError as error:
        answer = UserError(error.what, where=error.where, remedy=error.remedy, exit_code=error.exit_code)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        answer = _Crash(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    sender.send(answer)
    sender.close()


def _failed(what: str, why: str) -> UserError:
    return UserError(
        f"{what} cannot be forecast: {why}",
        where="drawbar plan",
        remedy="try other settings of parallel; or measure it with a run of a few steps (train.steps=3)",
        exit_code=ExitCode.FAILED,
    )
