"""Folders that are to hold a model."""

import json
from pathlib import Path

from drawbar.errors import UserError

CONFIG = "config.json"


def check_model_folder(name: str) -> None:
    """See that ``name``, where it is a folder and no name of the Hub, has a ``config.json`` that can be read.

    Without that file transformers does not find what else is in the folder, such as a tokenizer: ``config.json`` says
    what to look for.

    Raises:
        UserError: the folder is empty, or has no such file, or one that is no JSON object.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    path = folder / CONFIG
    if not path.is_file():
        what = f"has no {CONFIG}" if any(folder.iterdir()) else "is empty"
        raise UserError(
            f"the folder {name} {what}",
            where="task.model",
            remedy=f"name the folder that the model was saved to: it holds {CONFIG} and safetensors files",
        )
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        at = f", line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
        kind = "cannot be read" if isinstance(error, OSError) else "is not JSON"
        raise _broken(f"{path} {kind}{at}") from error
    if not isinstance(found, dict):
        raise _broken(f"{path} is not a JSON object, but a {type(found).__name__}")


def _broken(what: str) -> UserError:
    return UserError(
        what, where="task.model", remedy="mend the file, or save or fetch the model anew: it may be cut short"
    )
