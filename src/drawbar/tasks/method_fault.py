"""The errors of a task's methods that do something else than they should."""

from collections.abc import Callable
from typing import Any

from drawbar.errors import UserError


def fault(task: Any, method: str, what: str, remedy: str) -> UserError:
    """The error of a method that does something else than it should."""
    return UserError(f"{type(task).__name__}.{method} {what}", where=place(getattr(type(task), method)), remedy=remedy)


def made_by(task: Any, method: str, attribute: str) -> Any:
    """What a method without arguments returns; the task keeps the result as an attribute.

    Raises:
        UserError: the method uses that attribute, and so calls itself without end.
    """
    try:
        return getattr(task, method)()
    except RecursionError as error:
        remedy = f"do not use self.{attribute} in this method: the attribute is what the method returns"
        raise fault(task, method, "calls itself without end", remedy) from error


def place(method: Callable[..., Any]) -> str | None:
    """File and line of a method; None for one that has none."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
