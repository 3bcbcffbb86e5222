"""Text generation with models whose forward is collective."""

from functools import partial
from typing import Any


def synchronize_generate(model: Any) -> None:
    """Make ``model.generate`` continue until the texts of all ranks are finished, in place: a rank whose texts are
    finished must still take part in the others' forwards, which gather parameters."""
    if hasattr(model, "generate"):
        model.generate = partial(model.generate, synced_gpus=True)
