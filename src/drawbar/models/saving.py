"""Save models in the format of transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def save_transformers(model: Any, folder: Path, largest_file: str) -> None:
    """``save_pretrained`` of a model that is wrapped in nothing.

    Args:
        largest_file: the most that one file may hold (``5GB``); larger weights are divided into several files.
    """
    with _no_import_of_deepspeed():
        model.save_pretrained(folder, max_shard_size=largest_file)


@contextmanager
def _no_import_of_deepspeed() -> Iterator[None]:
    """accelerate imports DeepSpeed, wherever it is installed, to see whether a model is wrapped in its engine. That
    takes seconds and prints what accelerators there are. While nothing has imported DeepSpeed, no engine exists."""
    try:
        from accelerate.utils import other
    except ImportError:  # transformers then looks for no wrappers of accelerate's
        yield
        return
    question = "is_deepspeed_available"
    before = getattr(other, question, None)
    if before is None or "deepspeed" in sys.modules:
        yield
        return
    setattr(other, question, lambda: False)
    try:
        yield
    finally:
        setattr(other, question, before)
