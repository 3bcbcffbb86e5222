"""Strict JSON: reads files that are not trusted, and writes files for other programs. A key that
is twice in one object is refused when it is read (NaN and infinities are taken, as by Python's ``json``); NaN and
infinities are not written."""

import json
import math
from collections.abc import Callable
from typing import Any


def read_json(text: str | bytes, make: Callable[[dict[str, Any]], Any] = lambda fields: fields) -> Any:
    """Parse a JSON text.

    Args:
        make: converts each JSON object to the value to return in its place, inner objects first.

    Raises:
        ValueError: it is no JSON in UTF-8, has a key twice in one object, or is nested too deeply to be read.
    """

    def read_object(pairs: list[tuple[str, Any]]) -> Any:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("it has a key twice in one object")
        return make(fields)

    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=read_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_number(value: float) -> float | str:
    """The value itself, or ``"nan"``, ``"inf"`` or ``"-inf"``, for which JSON has no number."""
    return value if isinstance(value, int) or math.isfinite(value) else str(float(value))


def json_line(record: Any) -> bytes:
    """The record as one line of JSON in UTF-8, with a newline at the end.

    Arrays and numpy's numbers become lists and numbers; dates and other objects become text; numbers that are not
    finite become text as in :func:`json_number`.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # it holds a number that is not finite
        text = json.dumps(with_finite_numbers(record), ensure_ascii=False, allow_nan=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        return f"{json.dumps(json.loads(text))}\n".encode()


def _plain(value: Any) -> Any:
    """Convert what ``json`` cannot: arrays and numpy's numbers to lists and numbers, all else (dates, say) to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def with_finite_numbers(value: Any) -> Any:
    """The same with texts for numbers that are not finite, for which JSON has none."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {with_finite_numbers(key): with_finite_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_finite_numbers(item) for item in value]
    return with_finite_numbers(_plain(value))
