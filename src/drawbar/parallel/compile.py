"""``torch.compile``, block by block: equal blocks are compiled once."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drawbar.errors import UserError
from drawbar.parallel.blocks import Forward, blocks_for, replace_forward
from drawbar.threads import usable_cores

_is_off = ContextVar("compiled blocks are off", default=False)


@contextmanager
def uncompiled_blocks() -> Iterator[None]:
    """Context manager in which compiled blocks and a compiled loss run uncompiled."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def is_uncompiled() -> bool:
    """Whether this is inside ``uncompiled_blocks``."""
    return _is_off.get()


def compile_blocks(model: nn.Module) -> None:
    """Compile each repeated block, in place. A block's hooks (FSDP's) stay outside the compiled code.

    A block is compiled for the sizes of its first call and, when these change, once more for dynamic sizes. With
    sharded matrices (tensor parallelism), torch compiles only fixed sizes: the first eight. Others run uncompiled.

    Raises:
        UserError: the model has no repeated blocks.
    """
    torch.compiler.reset()  # the recompile limit counts over the process: an earlier model must not have used it up
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    replace = partial(_compiled, dynamic=False if is_sharded else None)
    made: dict[type, type] = {}
    for block in blocks_for(model, "parallel.compile"):
        replace_forward(block, replace, made)


def _compiled(forward: Forward, dynamic: bool | None) -> Forward:
    """Only training runs compiled code: generation would recompile for each token, as its cache grows."""
    compiled = torch.compile(forward, dynamic=dynamic)

    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = compiled if self.training and not _is_off.get() else forward
        return run(self, *args, **kwargs)

    return either


class CompileClock:
    """Counts the seconds that torch spends compiling in this process, from its creation on."""

    def __init__(self) -> None:
        from drawbar.runtime.torch_internals import (  # takes seconds to import: only for runs that compile
            on_compile_end,
            on_compile_start,
        )

        self.seconds = 0.0
        self._began = 0.0
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _: object) -> None:
        self.seconds += time.perf_counter() - self._began


def check_compiler(device: torch.device, local_ranks: int) -> None:
    """Compile one addition, to find out before training whether anything is missing.

    Args:
        local_ranks: number of ranks on this machine, which share its cores for compiling unless the environment sets
            the number of compile threads.

    Raises:
        UserError: torch cannot compile on this machine: there is no C++ compiler, or no triton.
    """
    from drawbar.runtime.torch_internals import config as inductor  # slow to import: only for runs that compile

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # otherwise each rank starts a process per core, up to 32
        inductor.compile_threads = min(inductor.compile_threads, max(1, usable_cores() // local_ranks))
    try:
        torch.compile(_add_one)(torch.zeros(1, device=device))
    except (RuntimeError, ImportError, OSError) as error:  # errors of torch itself are RuntimeErrors
        needed = "triton and a C compiler" if device.type == "cuda" else "a C++ compiler such as g++"
        raise UserError(
            f"torch.compile does not work on this machine: {_first_line(error)}",
            where="parallel.compile",
            remedy=f"install {needed}, or set parallel.compile=false",
        ) from error


def _add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
