"""JSON from files that are not trusted, and for other programs to read. What parsers take differently is not accepted
(a key twice in one object) and not written (NaN and infinities)."""

import json
import math
from collections.abc import Callable
from typing import Any


def read_json(text: str | bytes, make: Callable[[dict[str, Any]], Any] = lambda fields: fields) -> Any:
    """What the text says.

    Args:
        make: what an object becomes, beginning with the innermost ones.

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
    """The record as one line of JSON in UTF-8, with the line's end.

    Arrays and numpy's numbers become lists and numbers, dates and other objects texts, and numbers that are not finite
    what :func:`json_number` says.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # it holds a number that is not finite
        text = json.dumps(_with_finite_numbers(record), ensure_ascii=False, allow_nan=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        return f"{json.dumps(json.loads(text))}\n".encode()


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and numpy's numbers as lists and numbers, all else (dates, say) as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _with_finite_numbers(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {_with_finite_numbers(key): _with_finite_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(item) for item in value]
    return _with_finite_numbers(_plain(value))
