"""Explains in one line why pydantic cannot make a user's class of task options, such as one with a type that it cannot
read."""

import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from drawbar.config.schema.section import SectionDefinitionError

__all__ = ["PydanticUserError", "explain_refused_option"]


def explain_refused_option(error: PydanticUserError) -> str:
    """Text that says why a class of options cannot be made, with the names of class and field as far as they are known.
    (pydantic's own message has many lines, some of them about pydantic itself.)"""
    name, annotations = "a class of options", dict[str, Any]()
    if isinstance(error, SectionDefinitionError):  # else it is a model of the user's that is no TaskConfig
        name, annotations = error.class_name, error.annotations
    reason = error.message.strip().splitlines()[0]
    unannotated = re.match(r"A non-annotated attribute was detected: `(\w+) = ", reason)
    if unannotated:
        field = unannotated[1]
        return (
            f"{name}.{field} has no type, so it is no option: write `{field}: TYPE = ...`; "
            f"for what is no option, `{field}: ClassVar = ...`, and put imports outside of the class"
        )
    found = re.search(r"Unable to generate pydantic-core schema for (.+?)\. Set `arbitrary", reason)
    if found:
        field = _unreadable_field(annotations)
        return (
            f"{name}{f'.{field}' if field else ''} has a type that cannot be read from YAML: {found[1]}; declare it as "
            "text or a number, and make the object from that in the task"
        )
    return f"{name} cannot be made: {reason}"


def _unreadable_field(annotations: dict[str, Any]) -> str | None:
    """The first field with a type that pydantic cannot read by itself."""
    for field, annotation in annotations.items():
        try:
            TypeAdapter(annotation)
        except PydanticUserError:
            return field
    return None
