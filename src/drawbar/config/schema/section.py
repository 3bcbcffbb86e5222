"""What every section of the configuration is made of: a strict, closed and frozen model, and types for its fields."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.errors import PydanticUserError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


T = TypeVar("T")

SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""A variable or an option whose name contains one of these words holds a secret."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_LOGIN_IN_URL = re.compile(r"://[^@\s]*:[^@\s]*@")
_STORE_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]\S*|file:///\S+", re.DOTALL)
_USER_IN_URL = re.compile(r"://[^@]*:[^@]*@|//[^/]*@")
"""A user and a password, which may have a ``/`` in it; or a user alone."""


def refuse_secrets(options: T) -> T:
    """Return the options of a tracker or a callback unchanged. Raises ValueError if one looks like a secret."""
    _search(options, "")
    return options


def check_store_url(url: str) -> str:
    """Return the URL of an object-store folder unchanged. Raises ValueError, without quoting the URL, if it is invalid
    or contains a password or an option."""
    if not _STORE_URL.fullmatch(url):
        raise ValueError("expected a URL such as s3://bucket/folder")
    if _USER_IN_URL.search(url) or "?" in url:
        raise ValueError(
            "the URL contains a password or an option, which do not belong in a configuration file; the store's "
            "library reads both from the environment (for s3://: AWS_… and FSSPEC_S3_…)"
        )
    return url


def without_passwords(text: str) -> str:
    """Replace users and passwords in URLs by ``…``, for messages that quote user input."""
    return _LOGIN_IN_URL.sub("://…@", text)


def _search(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _search(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            _search(inner, name)
    elif isinstance(value, str) and (SECRET.search(name) or _PASSWORD_IN_URL.search(value)):
        raise ValueError(
            f"{name} looks like a secret, which does not belong in a configuration file; set the environment variable "
            "that the library reads (such as WANDB_API_KEY)"
        )


def expand_path(text: str) -> str:
    """Expand ``~``, ``$NAME`` and ``${NAME}``. Raises ValueError if a variable is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set")
        return os.environ[name]

    expanded = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    return str(Path(expanded).expanduser()) if expanded.startswith("~") else expanded


PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
"""A path, or a name that may be a path; ``~``, ``$NAME`` and ``${NAME}`` are expanded on reading the configuration."""


def text_of(words: str, pattern: str, max_length: int | None = None) -> Any:
    """A field whose text must match ``pattern``, which ``words`` describes for people: "letters and digits"."""
    return Field(pattern=pattern, max_length=max_length, json_schema_extra={"$comment": words})


Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=10)]
Text = Annotated[str, Field(min_length=1)]
Separator = Annotated[str, text_of("one character, and no quote", r'^[^"\r\n]$')]


class SectionDefinitionError(PydanticUserError):
    """Pydantic's error about a section class that it refuses to define, with the class's name and annotations."""

    def __init__(self, error: PydanticUserError, class_name: str, annotations: dict[str, Any]) -> None:
        super().__init__(error.message, code=error.code)
        self.class_name = class_name
        self.annotations = annotations


class SectionType(ModelMetaclass):
    """Metaclass of sections: adds the class concerned to pydantic's errors."""

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


_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
Interval = Annotated[str, text_of("a number and a unit: 90s, 30min, 2h or 1d", rf"^[1-9][0-9]*({'|'.join(_SECONDS)})$")]


def interval_seconds(interval: str) -> int:
    """Convert an ``Interval`` to seconds."""
    unit = interval.lstrip("0123456789")
    return int(interval.removesuffix(unit)) * _SECONDS[unit]
