"""The error of a task's method that returns something else than it should."""

from collections.abc import Callable
from typing import Any

from drawbar.errors import UserError


def fault(task: Any, method: str, what: str, remedy: str) -> UserError:
    """The error of a method that returns something else than it should."""
    return UserError(f"{type(task).__name__}.{method} {what}", where=place(getattr(type(task), method)), remedy=remedy)


def place(method: Callable[..., Any]) -> str | None:
    """File and line of a method; None for one that has none."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
