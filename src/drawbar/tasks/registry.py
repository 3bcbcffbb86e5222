"""From the setting ``task.type`` to a class."""

from drawbar.config.imports import cause, import_user_module
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.classification import SequenceClassification, TokenClassification
from drawbar.tasks.masked_lm import MaskedLM
from drawbar.tasks.seq2seq import Seq2Seq
from drawbar.tasks.task import Task

BUILT_IN: dict[str, type[Task]] = {
    "causal_lm": CausalLM,
    "sequence_classification": SequenceClassification,
    "token_classification": TokenClassification,
    "seq2seq": Seq2Seq,
    "masked_lm": MaskedLM,
}


def task_class(name: str) -> type[Task]:
    """The task of a built-in name or of ``package.module:Class``.

    Raises:
        UserError: there is no such class, or it is no Task.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_user_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"there is no task {name!r}: {cause(error)}",
            where="task.type",
            remedy=f"give {', '.join(BUILT_IN)}, or your own class as package.module:Class",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(
            f"{name} is not a subclass of drawbar.Task",
            where="task.type",
            remedy="name a class that is, as package.module:Class",
        )
    return found
