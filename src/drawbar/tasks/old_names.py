"""Names that methods and attributes of ``Task`` had before: they work for one version more, with a warning."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

METHODS = {
    "weight": "num_targets",
    "find_facts": "find_dataset_metadata",
    "build_structure": "build_meta_model",
}
"""Old name → new one."""


def keep_old_names(task_type: type[Any]) -> None:
    """Let a method that a class (or its mixin) defines under its old name override the new one; and let calls by the
    old name, such as ``super().weight(batch)``, reach the method of the new name."""
    for old, new in METHODS.items():
        definer = next(base for base in task_type.__mro__ if old in vars(base) or new in vars(base))
        own = vars(definer)
        if old in own and new in own:  # a base class that was treated before; or it defines both
            if definer is task_type and own[old] is not own[new]:
                _warn(f"{task_type.__name__} has both {old} and {new}: {new} is called, and {old} is not", stacklevel=4)
        elif old in own:
            _warn(f"{definer.__name__}.{old} is called {new} now: rename it", stacklevel=4)
            setattr(task_type, new, own[old])
        else:
            setattr(task_type, old, _called_by_old_name(own[new], old, new))


def _called_by_old_name(method: Any, old: str, new: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        _warn(f"{type(self).__name__}.{old} is called {new} now: call that", stacklevel=3)
        return method.__get__(self, type(self))(*args, **keywords)  # a static method, say, gets no self

    return call


def renamed_attribute(old: str, new: str) -> Any:
    """A property that stands for the attribute of the new name."""

    def read(self: Any) -> Any:
        _warn(f"{type(self).__name__}.{old} is called {new} now", stacklevel=3)
        return getattr(self, new)

    def write(self: Any, value: Any) -> None:
        _warn(f"{type(self).__name__}.{old} is called {new} now", stacklevel=3)
        setattr(self, new, value)

    return property(read, write)


def _warn(text: str, stacklevel: int) -> None:
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)  # which Python shows to users, too
