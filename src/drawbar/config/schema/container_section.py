"""What ``cluster`` says of containers: which program runs an image, and which folders it is to see."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator

from drawbar.config.schema.section import PathText, Text, expand_path

Runtime = Literal["apptainer", "singularity", "pyxis"]
RuntimeOrAuto = Literal["auto", "apptainer", "singularity", "pyxis"]

INVALID_IN_BIND = re.compile(r"[,:^\\\x00-\x1f\x7f]|^\s|\s$")
"""Characters that no path in a bind may have: binds are split at commas and colons, and Apptainer loses the others."""
_SQUASHFS = (".sqsh", ".sqfs", ".squashfs")
_NOT_PASSED_TO_CONTAINER = ("PATH", "LD_LIBRARY_PATH", "HOME")


def _bind(text: str) -> str:
    source, *rest = text.split(":")
    target, *options = rest or [source]
    source, target = expand_path(source), expand_path(target)
    for path in (source, target):
        if not path.startswith("/") or INVALID_IN_BIND.search(path):
            raise ValueError(
                f"expected /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro with absolute paths, got {text!r}; no "
                "container program can bind a path with a comma, colon, backslash or ^, or with spaces at its ends"
            )
    if options not in ([], ["ro"], ["rw"]):
        raise ValueError(f"expected ro, rw or nothing after the second colon, got {text!r}")
    return ":".join([source, target, *options])


BindText = Annotated[Text, AfterValidator(_bind)]


def _image(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", text) or text.startswith("-"):
        raise ValueError(f"{text!r} is the name of no image")
    return text


ImageText = Annotated[PathText, AfterValidator(_image)]


def is_file(image: str, runtime: Runtime) -> bool:
    """Whether an image is a file or a folder, and no name in a registry."""
    if "://" in image:
        return False
    return runtime != "pyxis" or image.startswith((".", "/")) or image.endswith(_SQUASHFS)


def choose_runtime(image: str, container: RuntimeOrAuto) -> Runtime:
    """What runs the image. For ``auto``: pyxis, if the name has pyxis's own spelling or is its kind of file; for all
    others Apptainer (or Singularity, on a node that has it in Apptainer's place)."""
    if container != "auto":
        return container
    return "pyxis" if ("#" in image and not image.startswith("/")) or image.endswith(_SQUASHFS) else "apptainer"


def lost_variables(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that a container would not get from outside, as it sets them itself."""
    return [name for name in names if name in _NOT_PASSED_TO_CONTAINER]
