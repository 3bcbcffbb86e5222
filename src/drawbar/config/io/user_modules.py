"""Imports objects that a user names as ``package.module:name``."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from drawbar.config.io.user_code import DRAWBAR, import_user_module, is_installed, is_user_code
from drawbar.config.schema.section import SectionDefinitionError
from drawbar.errors import UserError, nearest
from drawbar.util.registry import Registry

__all__ = ["PydanticUserError", "explain_refused_option"]


def explain_refused_option(error: PydanticUserError) -> str:
    """Explain why a class of options cannot be defined, with the names of class and field if known. (pydantic's message
    has many lines, some of them about pydantic itself.)"""
    name, annotations = "a class of options", dict[str, Any]()
    if isinstance(error, SectionDefinitionError):  # else it is a user's model that is not a TaskConfig
        name, annotations = error.class_name, error.annotations
    reason = error.message.strip().splitlines()[0]
    unannotated = re.match(r"A non-annotated attribute was detected: `(\w+) = ", reason)
    if unannotated:
        field = unannotated[1]
        return (
            f"{name}.{field} has no type, so it is not an option: write `{field}: TYPE = ...`; "
            f"or, if it is not meant as an option, `{field}: ClassVar = ...`; and put imports outside the class"
        )
    found = re.search(r"Unable to generate pydantic-core schema for (.+?)\. Set `arbitrary", reason)
    if found:
        field = _unreadable_field(annotations)
        return (
            f"{name}{f'.{field}' if field else ''} has a type that cannot be read from YAML: {found[1]}; declare it as "
            "text or a number, and create the object from that in the task"
        )
    return f"{name} cannot be defined: {reason}"


def _unreadable_field(annotations: dict[str, Any]) -> str | None:
    """The first field with a type that pydantic does not support."""
    for field, annotation in annotations.items():
        try:
            TypeAdapter(annotation)
        except PydanticUserError:
            return field
    return None


T = TypeVar("T")

_PACKAGES = {"PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "yaml": "pyyaml"}
"""Names to install, by import name, of packages where these differ."""


def cause(error: BaseException) -> str:
    """The error, the line of the user's file that led to it, and what to install if a module is missing."""
    advice = missing_module(error)
    what = explain_refused_option(error) if isinstance(error, PydanticUserError) else f"{type(error).__name__}: {error}"
    found = raised_at(error)
    place = f" ({found[0]}:{found[1]})" if found else ""
    return f"{what}{place}" + (f"; {advice}" if advice else "")


def raised_at(error: BaseException) -> tuple[Path, int] | None:
    """File and line of the innermost frame in the user's code, else in an installed library; never in drawbar."""
    frames = [(Path(frame.filename), frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if file.is_absolute() and is_user_code(file)]
    libraries = [(file, line) for file, line in frames if is_installed(file) and not file.is_relative_to(DRAWBAR)]
    found = own or libraries
    return found[-1] if found else None


def missing_module(error: BaseException) -> str | None:
    """The remedy for a missing module; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.partition(".")[0]
    if find_spec(name) is not None:  # the package is installed; only a module inside it is missing
        return None
    here = Path.cwd()
    own = [path.stem for path in here.glob("*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    near = nearest(name, own)
    package = _PACKAGES.get(name, name)
    advice = f"it is your own, start in its folder, or set PYTHONPATH to that; else `pip install {package}`"
    return f"did you mean {near}? If {advice}" if near else f"if {advice}"


def find_by_name(
    registry: Registry[T], name: str, where: str, form: str, accepts: Callable[[Any], bool] = callable
) -> T:
    """The implementation that a setting names: one of a registry, or the user's own as ``package.module:NAME``.

    Args:
        form: the kind of NAME: ``Class``, ``function`` or ``strategy``.
        accepts: tests whether an object is such a class, function or strategy.

    Raises:
        UserError: the name is unknown, it is something else, or the user's own cannot be imported.
    """
    if ":" in name:
        found: T = import_user_object(name, registry.kind, where, form)
    else:
        try:
            found = registry.get(name, where)
        except UserError as error:
            error.remedy = f"{error.remedy}; your own is package.module:{form}"
            raise
    if accepts(found):
        return found
    raise UserError(
        f"the {registry.kind} {name!r} is not a {form.lower()}, but of type {type(found).__name__}",
        where=where,
        remedy=f"name a {form.lower()}, as package.module:{form}",
    )


def find_class(registry: Registry[type[T]], base: type, name: str, where: str) -> type[T]:
    """The class that a setting names; see ``find_by_name``. Also raises ``UserError`` if it is not a ``base``."""
    found = find_by_name(registry, name, where, "Class")
    if isinstance(found, type) and issubclass(found, base):
        return found
    raise UserError(
        f"{name} is not a subclass of drawbar.{base.__name__}",
        where=where,
        remedy="name a subclass, as package.module:Class",
    )


def import_user_object(name: str, kind: str, where: str, form: str) -> Any:
    """Import an object that a user names as ``package.module:NAME``; see ``find_by_name``."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_user_module(module_name)
    except Exception as error:
        raise UserError(
            f"the {kind} {name!r} cannot be imported: {cause(error)}",
            where=where,
            remedy=f"give package.module:{form} of a module on PYTHONPATH or in the current folder, free of errors",
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        near = nearest(attribute, [known for known in vars(module) if not known.startswith("_")])
        hint = f"; did you mean {module_name}:{near}?" if near else ""
        raise UserError(
            f"the {kind} {name!r} is not a {form.lower()}: the module has no {attribute!r}{hint}",
            where=where,
            remedy=f"name a {form.lower()} of {module_name}, as package.module:{form}",
        )
    return found


def make_with_options(factory: Callable[..., T], options: Mapping[str, Any], what: str, where: str) -> T:
    """Create an object of a class that a setting names, with its options as keyword arguments.

    Args:
        what: for messages: ``the tracker wandb``.

    Raises:
        UserError: the class does not accept these options, or rejects their values.
    """
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        taken = ", ".join(str(parameter) for parameter in inspect.signature(factory).parameters.values())
        raise UserError(
            f"{what} cannot be created with these options: {error}",
            where=where,
            remedy=f"it takes: {taken or 'no options'}",
        ) from error
    try:
        return factory(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{what} cannot be created: {cause(error)}", where=where, remedy="correct its options, or the class"
        ) from error
