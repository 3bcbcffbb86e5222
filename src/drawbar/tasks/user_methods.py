"""Checks of the methods that a user overrides in a task: construction, signatures, and errors that name the method."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from drawbar.config.io.user_modules import cause, missing_module
from drawbar.errors import UserError, nearest
from drawbar.tasks.method_errors import code_of_method, place
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext

METHODS = tuple(name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_"))
"""The methods that a task may override."""
SIMILAR_NAME = 0.85
"""A name at least this similar counts as misspelled: ``colate`` has 0.92 with ``collate``, and ``decode``, a likely
name for a helper, 0.83 with ``encode``."""


def make_task(task_type: type[Task], context: TaskContext) -> Task:
    """Build a task of this class.

    Raises:
        UserError: its ``__init__`` fails, cannot be called with just a context, or does not call that of ``Task``.
    """
    name, where = f"{task_type.__name__}.__init__", place(task_type.__init__)
    remedy = "define it as __init__(self, context), and begin it with super().__init__(context)"
    try:
        inspect.signature(task_type).bind(context)
    except TypeError as error:
        what = f"{name} cannot be called with (self, context): {error}"
        raise UserError(what, where=where, remedy=remedy) from error
    try:
        task = task_type(context)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} fails: {cause(error)}", where=where, remedy="correct the method") from error
    if not hasattr(task, "task_context"):
        raise UserError(f"{name} does not call that of its base class", where=where, remedy=remedy)
    return task


def check_signatures(task_type: type[Task]) -> None:
    """Refuse a method that cannot be called as drawbar calls it, and one whose name looks misspelled.

    Raises:
        UserError: it names the method, and what its arguments or its name should be.
    """
    _check_names(task_type)
    for name in METHODS:
        method, wanted = getattr(task_type, name), inspect.signature(getattr(Task, name))
        arguments = list(wanted.parameters)
        if not inspect.isfunction(inspect.getattr_static(task_type, name)):
            arguments = arguments[1:]  # a static method gets no self
        try:
            inspect.signature(method).bind(*arguments)  # a value for each argument, by position, as drawbar calls it
        except TypeError as error:
            raise UserError(
                f"{task_type.__name__}.{name} cannot be called with ({', '.join(wanted.parameters)}): {error}",
                where=place(method),
                remedy=f"define it as {name}{wanted}",
            ) from error


def _check_names(task_type: type[Task]) -> None:
    """Refuse a method such as ``colate``: its name is nearly that of a task's method, and nothing in the class calls
    it. A class that has the method of the right name, too, may have a similar one for its own use."""
    inherited = {name for base in task_type.__mro__ if _is_drawbar(base) for name in vars(base)}
    called = {name for base in task_type.__mro__ for code in _codes(base) for name in _names_in(code)}
    for base in task_type.__mro__:
        if not issubclass(base, Task) or _is_drawbar(base):
            continue
        for name, method in vars(base).items():
            if name.startswith("_") or name in inherited | called or not _is_method(method):
                continue
            near = nearest(name, METHODS, cutoff=SIMILAR_NAME)
            if near is not None and near not in vars(base):
                raise UserError(
                    f"{base.__name__}.{name} would never be called: a task has no such method",
                    where=place(method),
                    remedy=f"did you mean {near}? If it is for your own use, give it a name less like that",
                )


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) and code_of_method(value) is not None


def _codes(owner: type) -> list[CodeType]:
    """The code of a class's methods and properties."""
    members = [getattr(value, "fget", None) or getattr(value, "func", None) or value for value in vars(owner).values()]
    return [code for code in map(code_of_method, members) if code is not None]


def _names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, that of its inner functions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


@contextmanager
def name_failing_method(task: Task) -> Iterator[None]:
    """Context that turns an exception (or ``sys.exit()``) in one of the task's methods into a UserError naming method
    and line."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):  # too little memory is not the method's fault
        raise
    except (Exception, SystemExit) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        methods = _methods_by_code(type(task))
        inside = [depth for depth, (frame, _) in enumerate(frames) if frame.f_code in methods]
        if not inside:
            raise
        own = [depth for depth in inside if not _is_drawbar(methods[frames[depth][0].f_code][0])]
        depth = (own or inside)[-1]
        calls = traceback.format_list(traceback.StackSummary.extract(iter(frames[depth:])))
        owner, name = methods[frames[depth][0].f_code]
        inherited = "" if owner is type(task) else f", which {type(task).__name__} inherits,"
        what, remedy = f"{owner.__name__}.{name}{inherited}", "correct the method"
        if not own:
            remedy = "correct what it is given (the model, the records, the batch), or override the method"
            if task.task_context.run_config.parallel.tensor > 1:
                remedy += "; where it works with parallel.tensor=1, this model's layers cannot be cut"
        raise UserError(
            f"{what} fails: {type(error).__name__}: {error}\n{''.join(calls).rstrip()}",
            remedy=missing_module(error) or remedy,
        ) from error


def _is_drawbar(owner: type) -> bool:
    return owner.__module__.startswith("drawbar.")


def _methods_by_code(task_type: type[Task]) -> dict[CodeType, tuple[type, str]]:
    """The class and the name of each method that a task may override, by its code, in the class and in its bases."""
    names: dict[CodeType, tuple[type, str]] = {}
    for base in task_type.__mro__:
        for name in METHODS:
            code = code_of_method(vars(base).get(name))
            if code is not None:
                names[code] = (base, name)
    return names
