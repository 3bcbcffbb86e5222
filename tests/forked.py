"""Ranks that torch's elastic launcher and DeepSpeed's fork off their own process, where torch and transformers are
imported already: a new interpreter needs 4 s of CPU time for that. Else they are as new ones: the environment that they
are given, signals at their defaults, nothing open but the standard streams.

Ranks that Slurm and ssh start in tests are new interpreters, and so are those of a launcher that is one.
"""

import atexit
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

DRAWBAR = ["-m", "drawbar"]
TORCHRUN = ["-m", "torch.distributed.run"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner"]
_DEEPSPEED_NODE = ["-m", "deepspeed.launcher.launch"]
"""What ``deepspeed`` starts on each node."""
_PYTHONPATH = os.environ.get("PYTHONPATH")
"""What this interpreter has looked for."""

# names of events that nobody reads; torch's own function looks at each of some thousand modules, twice for an event
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def fork_ranks() -> None:
    """From now on, in this process; not where there are GPUs, since a process that has looked at one cannot fork."""
    if not torch.cuda.is_available():
        subprocess_handler.Popen = _Forked


def run_python(command: list[str]) -> None:
    """What ``python COMMAND`` does, for the modules above and for ``SCRIPT ARGUMENTS``."""
    command = command[command[0] == "-P" :]
    if command[:2] == DRAWBAR:
        sys.argv = command[1:]
        from drawbar.cli import run

        run()
    elif command[:2] == TORCHRUN:
        sys.argv = command[1:]
        from torch.distributed.run import main

        main()
    elif command[:2] in (DEEPSPEED, _DEEPSPEED_NODE):
        sys.argv = command[1:]
        launcher: Any = importlib.import_module(command[1])
        if not torch.cuda.is_available():
            launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Forked})
        launcher.main()
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


class _Forked(subprocess.Popen[bytes]):
    """``python -u COMMAND``."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        _, _, _, _, _, environment, *_, new_session, _ = others
        assert tuple(args[:2]) == (sys.executable, "-u"), args
        if environment.get("PYTHONPATH") != _PYTHONPATH:  # it may hold what only a new interpreter looks for
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        self._child_created = True
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # the child would write it again
        self.pid = os.fork()
        if self.pid == 0:
            if new_session:
                os.setsid()
            _be_a_rank(list(args[2:]), environment)


def _be_a_rank(command: list[str], environment: dict[str, str]) -> None:
    code = 1
    try:
        _become_new(environment)
        run_python(command)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_new(environment: dict[str, str]) -> None:
    gc.freeze()  # what the launcher holds stays: it would close its files again, when their numbers are others'
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    atexit._clear()  # the launcher's temporary folders are not a rank's to remove
    logging.disable(logging.NOTSET)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    here = os.getcwd()
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "/") == here:
            del sys.modules[name]  # the user's own: it may have looked at the launcher's environment
