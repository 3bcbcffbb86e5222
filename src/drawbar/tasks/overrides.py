"""What a user overrides in a task: whether it can be called, and how its errors name it."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drawbar.config.io.user_modules import missing_module
from drawbar.errors import UserError
from drawbar.tasks.method_fault import place
from drawbar.tasks.old_names import METHODS as OLD_METHODS
from drawbar.tasks.task import Task

METHODS = tuple(
    name
    for name, value in vars(Task).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in OLD_METHODS
)
"""What a task may override."""


def check_signatures(task_type: type[Task]) -> None:
    """Refuse a method that cannot be called as drawbar calls it.

    Raises:
        UserError: it names the method, and what its arguments should be.
    """
    for name in METHODS:
        method, wanted = getattr(task_type, name), inspect.signature(getattr(Task, name))
        arguments = list(wanted.parameters)
        if not inspect.isfunction(inspect.getattr_static(task_type, name)):
            arguments = arguments[1:]  # a static method, say, gets no self
        try:
            inspect.signature(method).bind(*arguments)  # a value for each argument, by position, as drawbar calls it
        except TypeError as error:
            raise UserError(
                f"{task_type.__name__}.{name} cannot be called with ({', '.join(wanted.parameters)}): {error}",
                where=place(method),
                remedy=f"define it as {name}{wanted}",
            ) from error


@contextmanager
def name_failing_method(task: Task) -> Iterator[None]:
    """An exception out of one of the task's methods, as an error that names it and the line."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):  # too little memory is no fault of the method's
        raise
    except Exception as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        inside = [
            (depth, frame)
            for depth, (frame, _) in enumerate(frames)
            if frame.f_code.co_name in (*METHODS, *OLD_METHODS) and frame.f_locals.get("self") is task
        ]
        if not inside:
            raise
        depth, method = inside[-1]
        calls = traceback.format_list(traceback.StackSummary.extract(iter(frames[depth:])))
        name = f"{type(task).__name__}.{method.f_code.co_name}"
        raise UserError(
            f"{name} fails: {type(error).__name__}: {error}\n{''.join(calls).rstrip()}",
            remedy=missing_module(error) or "mend the method",
        ) from error
