"""From the setting ``task.type`` to a class."""

from drawbar.config.io.user_modules import find_class
from drawbar.config.schema.task_sections import TASKS
from drawbar.tasks.task import Task


def task_class(name: str) -> type[Task]:
    """The task of a name, or of ``package.module:Class``.

    Raises:
        UserError: there is no such class, or it is not a Task.
    """
    return find_class(TASKS, Task, name, "task.type")


def is_named(task: Task) -> bool:
    """Whether ``task.type`` names this task's class: a script may train its own class under another's name."""
    name = task.config.type
    if name in TASKS:
        return task_class(name) is type(task)
    return name.rpartition(":")[2] == type(task).__qualname__
