"""From the setting ``task.type`` to a class."""

from drawbar.config.io.user_modules import find_by_name
from drawbar.config.schema.task_sections import TASKS
from drawbar.errors import UserError
from drawbar.tasks.task import Task


def task_class(name: str) -> type[Task]:
    """The task of a name, or of ``package.module:Class``.

    Raises:
        UserError: there is no such class, or it is no Task.
    """
    found = find_by_name(TASKS, name, "task.type", "Class")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(
            f"{name} is not a subclass of drawbar.Task",
            where="task.type",
            remedy="name a class that is, as package.module:Class",
        )
    return found


def is_named(task: Task) -> bool:
    """Whether ``task.type`` names this task's class: a script may train a class of its own under another's name."""
    name = task.config.type
    return name not in TASKS.names() or task_class(name) is type(task)
