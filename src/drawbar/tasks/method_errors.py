"""Errors about a task's methods, which name the method and its source line."""

import inspect
from types import CodeType
from typing import Any

from drawbar.errors import UserError


def method_error(task: Any, method: str, what: str, remedy: str) -> UserError:
    """The error for a method that returns something invalid."""
    return UserError(f"{type(task).__name__}.{method} {what}", where=place(getattr(type(task), method)), remedy=remedy)


def call_for_attribute(task: Any, method: str, attribute: str) -> Any:
    """Call a method without arguments, whose result the task keeps as an attribute.

    Raises:
        UserError: the method uses that attribute, and so calls itself without end.
    """
    try:
        return getattr(task, method)()
    except RecursionError as error:
        remedy = f"do not use self.{attribute} in this method: the attribute is what the method returns"
        raise method_error(task, method, "calls itself without end", remedy) from error


def is_user_defined(task: Any, *methods: str) -> bool:
    """Whether one of these methods is defined by the user, and not by drawbar."""
    return any(not getattr(type(task), name).__module__.startswith("drawbar.") for name in methods)


def undefined_method_error(task: Any, method: str, remedy: str) -> UserError:
    """The error of a task whose class does not define a method that it must define."""
    task_type = type(task)
    try:
        where = f"{inspect.getsourcefile(task_type)}:{inspect.getsourcelines(task_type)[1]}"
    except (OSError, TypeError):  # of a class that was typed into an interpreter
        where = f"{task_type.__module__}.{task_type.__qualname__}"
    return UserError(f"the task {task_type.__name__} does not define {method}()", where=where, remedy=remedy)


def place(method: Any) -> str | None:
    """File and line of a method; None for one that has none."""
    code = code_of_method(method)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def code_of_method(method: Any) -> CodeType | None:
    """The code that the user wrote, also of a static or decorated method (``@torch.no_grad()``)."""
    return getattr(inspect.unwrap(method), "__code__", None)
