"""Secrets, which no file of a run may hold: a configuration is written to run directories and job scripts."""

import re
from typing import Any, TypeVar

T = TypeVar("T")

SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""A variable or an option whose name contains one of these words holds a secret."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def refuse_secrets(options: T) -> T:
    """The options of a tracker or a callback as they are. Raises ValueError where one looks like a secret."""
    _search(options, "")
    return options


def _search(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _search(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            _search(inner, name)
    elif isinstance(value, str) and (SECRET.search(name) or _PASSWORD_IN_URL.search(value)):
        raise ValueError(
            f"{name} looks like a secret, and the file of a configuration is no place for one; set it in the "
            "environment, where the library looks for it (such as WANDB_API_KEY)"
        )
