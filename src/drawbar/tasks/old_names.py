"""Names that methods and attributes of ``Task`` had before: they work for one version more, with a warning."""

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from drawbar.config.schema.run_config import RunConfig

METHODS = {
    "weight": "num_targets",
    "find_facts": "find_dataset_metadata",
    "build_structure": "build_meta_model",
    "complete": "postprocess",
}
"""Old name → new one."""


def keep_old_names(task_type: type[Any]) -> None:
    """Let a method that a class (or its mixin) defines under its old name override the new one; and let calls by the
    old name, such as ``super().weight(batch)``, reach the method of the new name."""
    for old, new in METHODS.items():
        definer = next(base for base in task_type.__mro__ if old in vars(base) or new in vars(base))
        own = vars(definer)
        if old in own and new in own:  # ``keep_old_names`` ran on this base class before; or it defines both
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


CLASS_ATTRIBUTES = {"targets": "label_placement"}
"""Old name → new one, of what a class says of itself."""


def keep_old_class_attributes(task_type: type[Any]) -> None:
    """Let an attribute that a class (or its mixin) sets under its old name count under the new one."""
    for old, new in CLASS_ATTRIBUTES.items():
        definer = next(base for base in task_type.__mro__ if old in vars(base) or new in vars(base))
        if new not in vars(definer):
            _warn(f"{definer.__name__}.{old} is called {new} now: rename it", stacklevel=4)
            setattr(task_type, new, vars(definer)[old])


ATTRIBUTES = {"facts": "dataset_metadata", "labelled": "has_labels"}
"""Old name → new one."""


def remove_shadowing_attributes(task_type: type[Any], base: type[Any]) -> None:
    """Replace class attributes such as ``facts = {}`` or ``tokenizer = None``: they would shadow the properties of
    these names, which give what the run has stored. They did no harm while ``Task.__init__`` set attributes."""
    for name in ("tokenizer", "dataset_metadata", *ATTRIBUTES):
        if not hasattr(inspect.getattr_static(task_type, name), "__get__"):
            new = ATTRIBUTES.get(name, name)
            _warn(f"{task_type.__name__}.{name} would hide the run's {new}: remove it from the class", stacklevel=4)
            setattr(task_type, name, vars(base)[name])


def renamed_attribute(old: str) -> Any:
    """A property that stands for the attribute of the new name."""
    new = ATTRIBUTES[old]

    def read(self: Any) -> Any:
        _warn(f"{type(self).__name__}.{old} is called {new} now", stacklevel=3)
        return getattr(self, new)

    def write(self: Any, value: Any) -> None:
        _warn(f"{type(self).__name__}.{old} is called {new} now", stacklevel=3)
        setattr(self, new, value)

    return property(read, write)


def section_of_config(context: Any, name: str) -> Any:
    """A section of the configuration, for a task's ``__init__`` that still takes its argument for a RunConfig."""
    if name not in RunConfig.model_fields:
        raise AttributeError(f"a TaskContext has no {name!r}; the configuration is its run_config")
    _warn(f"a task is built from a TaskContext now, not from a RunConfig: read run_config.{name} of it", stacklevel=4)
    return getattr(context.run_config, name)


def _warn(text: str, stacklevel: int) -> None:
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)  # which Python shows to users, too
