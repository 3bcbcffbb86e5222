"""Imports of torch and transformers, as fast as they can be."""

import gc
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
