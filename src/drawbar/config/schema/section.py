"""What every section of the configuration is made of: a strict, closed and frozen model, and types for its fields."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.errors import PydanticUserError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


def expand_path(text: str) -> str:
    """``~``, ``$NAME`` and ``${NAME}`` written out. Raises ValueError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set")
        return os.environ[name]

    expanded = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    return str(Path(expanded).expanduser()) if expanded.startswith("~") else expanded


PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
"""A path, or a name that may be one; ``~``, ``$NAME`` and ``${NAME}`` are expanded when the configuration is read."""


def text_of(words: str, pattern: str, max_length: int | None = None) -> Any:
    """What a text must be made of, as a pattern, and in ``words`` for people: "text of letters and digits"."""
    return Field(pattern=pattern, max_length=max_length, json_schema_extra={"$comment": words})


Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Separator = Annotated[str, text_of("one character, and no quote", r'^[^"\r\n]$')]


class SectionDefinitionError(PydanticUserError):
    """The error of a section's class that pydantic refuses to define, with the class's name and annotations."""

    def __init__(self, error: PydanticUserError, class_name: str, annotations: dict[str, Any]) -> None:
        super().__init__(error.message, code=error.code)
        self.class_name = class_name
        self.annotations = annotations


class SectionType(ModelMetaclass):
    """The metaclass of sections: it adds to pydantic's error which class it is about."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        try:
            return super().__new__(mcs, name, bases, namespace, **keywords)
        except PydanticUserError as error:
            annotations = namespace.get("__annotations__", {})
            raise SectionDefinitionError(error, namespace.get("__qualname__", name), annotations) from error


class Section(BaseModel, metaclass=SectionType):
    """One section of the configuration: strict, closed and frozen."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )
