"""Checks that a task's options, stored in a run's ``config.yaml``, are read back as they were: resuming and evaluating
read them there."""

import json
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError


def check_stored(options: BaseModel) -> None:
    """Refuse an option that is not read back from ``config.yaml`` as it was written there.

    Raises:
        ValueError: it names the option.
    """
    stored: dict[str, Any] = {}
    for name in (*type(options).model_fields, *type(options).model_computed_fields):
        stored |= _stored(options, name)
    try:
        read = type(options).model_validate_json(json.dumps(stored))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = str(found["loc"][0]) if found["loc"] else type(options).__name__
        raise ValueError(_not_the_same(options, name, f"is refused when it is read: {found['msg']}")) from error
    for name in type(options).model_fields:
        again = getattr(read, name)
        if not _equal(again, getattr(options, name)):
            raise ValueError(_not_the_same(options, name, f"is read back as {again!r:.60}"))


def _stored(options: BaseModel, name: str) -> dict[str, Any]:
    """The option by name as ``config.yaml`` holds it; empty if the class excludes the field from dumps."""
    try:
        return options.model_dump(mode="json", include={name}, warnings=False)
    except PydanticSerializationError as error:
        value = getattr(options, name)
        raise ValueError(
            f"the option {name} is {value!r:.60}, of the type {type(value).__name__}, which the run's config.yaml "
            "cannot hold; let it be a text, a number, a list or a mapping, and make the object of it in the task"
        ) from error


def _not_the_same(options: BaseModel, name: str, what: str) -> str:
    value, remedy = "", "make it a plain property"
    if name in type(options).model_fields:
        value = f" is {getattr(options, name)!r:.60}, which"
        remedy = "give it the type that its value has, as in `str | None`"
    return f"the option {name}{value} is written to the run's config.yaml and {what}; {remedy}"


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - such as arrays, which have no single answer
        return False
