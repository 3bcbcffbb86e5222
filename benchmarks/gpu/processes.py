"""Processes that measure one setting: fresh ones on a GPU, and on a CPU forks, which need not import torch anew."""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call, MeasurementFailed, TookTooLong, in_fresh_process, load_function
from benchmarks.common.options import Run

PRELOADED = ("drawbar.train.trainer", "transformers.models.llama.modeling_llama", "torch._dynamo")
"""What most forks need."""


def may_have_gpus() -> bool:
    """Whether there is a driver. Nothing is asked of it: a process that has asked cannot fork others that use it."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def choose_run() -> Run:
    """How settings are run on this machine."""
    return in_fresh_process if may_have_gpus() else in_fork


def guarded(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a function. That the memory does not suffice, or drawbar refuses the settings, is a result."""
    import torch

    from drawbar.errors import UserError

    try:
        found: dict[str, Any] = load_function(function)(**arguments)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)[:300]}
    except UserError as error:
        return {"refused": error.what}
    return found


def in_fork(call: Call) -> dict[str, Any]:
    """What the function returns in a fork of this process, which has then imported what most of them need.

    Raises:
        MeasurementFailed: see there.
    """
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = multiprocessing.get_context("fork").Process(target=partial(_run, call, folder))
        process.start()
        try:
            process.join(call.timeout)
            ended = process.exitcode
        finally:
            if process.exitcode is None:
                with suppress(ProcessLookupError):  # it is no leader yet
                    os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it has started
                process.kill()
                process.join()
        log = (folder / "log").read_text(errors="replace")[-3000:] if (folder / "log").exists() else ""
        if ended is None:
            raise TookTooLong(f"{call.function} took too long:\n{log}")
        if ended:
            raise MeasurementFailed(f"{call.function} ended with {ended}:\n{log}")
        found: dict[str, Any] = json.loads((folder / "result").read_text())
        return found


def _run(call: Call, folder: Path) -> None:
    os.setsid()
    log = (folder / "log").open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = log
    os.environ.update(call.environment)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    code = 0
    try:
        found = load_function(call.function)(**call.arguments)
        (folder / "result").write_text(json.dumps({**found, "spawned": time.time()}))
    except BaseException:  # noqa: BLE001 - whatever it is, the log has it
        traceback.print_exc()
        code = 1
    log.flush()
    os._exit(code)  # without waiting for what libraries would do at the end
