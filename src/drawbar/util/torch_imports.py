"""Imports of torch and transformers: as fast as they can be, and without noise."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context for imports: the garbage collector is off, and never looks at what was imported here again.

    Nearly all of the million objects that torch and transformers make stay to the end of the process. Looking for
    garbage among them takes a fourth of the time of a start, and the time of every full collection after it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Context in which a package that is not imported yet seems not to be installed.

    For torchao: where it is installed, transformers imports it, which takes half a second, and it asks CUDA for devices
    meanwhile. A process that has done so cannot fork ranks.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def silence_ranks() -> None:
    """Leave out the warnings of torch's C++ code in this process and in the ranks that it starts. Python's filters do
    not reach them: every rank would print that DDP found no unused parameters, and, with a stack, that the store is
    gone. Call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def silence_torchao() -> None:
    """Leave out what torchao says of itself when transformers imports it, which it does wherever torchao is installed:
    that libraries for GPUs cannot be loaded, where torch is built for CPUs alone, that it registers enums in an old
    way, and that a docstring has an invalid escape sequence. Whatever else the two loggers say stays."""
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning, r".*\btorchao\b")
    logging.getLogger("torchao").addFilter(_keeps_unless_missing_library)
    logging.getLogger("torch.utils._pytree").addFilter(_keeps_unless_torchao_enum)


def _keeps_unless_missing_library(record: logging.LogRecord) -> bool:
    torch = sys.modules.get("torch")  # which torchao has imported
    has_cuda = torch is not None and torch.version.cuda is not None
    return has_cuda or not record.getMessage().startswith("Failed to load ")


def _keeps_unless_torchao_enum(record: logging.LogRecord) -> bool:
    named = record.args if isinstance(record.args, tuple) else ()
    from_torchao = any(getattr(one, "__module__", "").startswith("torchao.") for one in named)
    return not (from_torchao and "Enum subclass" in str(record.msg))
