"""Imports of torch and transformers, as fast as they can be."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in here: without the garbage collector, and what is imported is never looked at by it again.

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
