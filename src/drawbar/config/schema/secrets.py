"""Refuses secrets in settings: a configuration is written to run directories and job scripts."""

import re
from typing import Any, TypeVar

T = TypeVar("T")

SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""A variable or an option whose name contains one of these words holds a secret."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_LOGIN_IN_URL = re.compile(r"://[^@\s]*:[^@\s]*@")
_STORE_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]\S*|file:///\S+", re.DOTALL)
_USER_IN_URL = re.compile(r"://[^@]*:[^@]*@|//[^/]*@")
"""A user and a password, which may have a ``/`` in it; or a user alone."""


def refuse_secrets(options: T) -> T:
    """The options of a tracker or a callback as they are. Raises ValueError where one looks like a secret."""
    _search(options, "")
    return options


def check_store_url(url: str) -> str:
    """The URL of a folder in an object store as it is. Raises ValueError, which does not quote it, for what is none, or
    has a password or an option in it."""
    if not _STORE_URL.fullmatch(url):
        raise ValueError("expected a URL such as s3://bucket/folder")
    if _USER_IN_URL.search(url) or "?" in url:
        raise ValueError(
            "there is a password or an option in the URL, and the file of a configuration is no place for one; the "
            "library of the store looks for both in the environment (for s3://: AWS_… and FSSPEC_S3_…)"
        )
    return url


def without_passwords(text: str) -> str:
    """A message that may quote what the user has typed, with ``…`` for users and passwords of URLs."""
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
            f"{name} looks like a secret, and the file of a configuration is no place for one; set it in the "
            "environment, where the library looks for it (such as WANDB_API_KEY)"
        )
