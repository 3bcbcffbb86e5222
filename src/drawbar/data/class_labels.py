"""Class labels: `datasets` stores them as numbers, and their names in the schema (``ClassLabel``)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from drawbar.data.readers import Record

Feature = Any
"""The type of a value in `datasets`' notation: a dict of features by column, ``{"_type": "List", "feature": …}``, …"""
NO_LABEL = -1
"""The value with which `datasets` marks a missing label."""


class ClassNumber(int):
    """A class number from `datasets` that knows the names of all classes of its column."""

    names: list[str]

    def __new__(cls, number: int, names: list[str]) -> "ClassNumber":
        self = super().__new__(cls, number)
        self.names = names
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ClassNumber, (int(self), self.names)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.names[self]


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Feature]:
    """The features by column in the metadata of an Arrow schema; empty if `datasets` did not write it."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def with_class_numbers(record: Record, features: Mapping[str, Feature]) -> Record:
    """The record with each class number as a ``ClassNumber``, and with None in place of ``NO_LABEL``.

    Args:
        features: the result of ``class_features``.

    Raises:
        ValueError: a number is not a valid class number.
    """
    return {name: _known(value, features[name]) if name in features else value for name, value in record.items()}


def class_features(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """The features of columns with classes, at any depth, with ``ClassNumber`` objects shared by all records."""
    return {name: _with_numbers(feature) for name, feature in features.items() if _has_classes(feature)}


def agreed_names(found: Iterable[list[str] | None]) -> list[str] | None:
    """The class names of a column in several files, if all files that have such names agree; else None."""
    given = [names for names in found if names is not None]
    return given[0] if given and all(names == given[0] for names in given) else None


def class_names(features: Mapping[str, Feature], column: str) -> list[str] | None:
    """The class names of a column, or of the items of its lists; None if it holds no classes.

    Args:
        column: as for ``nested.value_at``.
    """
    feature: Feature = features
    for name in [column] if column in features else column.split("."):
        feature = _inside(feature).get(name)
        while isinstance(feature, list) or _is_list(feature):
            feature = _item(feature)
        if not isinstance(feature, dict):
            return None
    return feature["names"] if _is_class(feature) else None


def _is_class(feature: Feature) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel"


def _is_list(feature: Feature) -> bool:
    return isinstance(feature, dict) and isinstance(feature.get("_type"), str) and "feature" in feature


def _item(feature: Feature) -> Feature:
    """The feature of a list's items."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    return feature["feature"] if _is_list(feature) else feature


def _inside(feature: Feature) -> dict[str, Feature]:
    """The columns inside a column. Older versions of `datasets` store a list of dicts as a dict of lists."""
    inner = _item(feature)
    return inner if isinstance(inner, dict) else {}


def _has_classes(feature: Feature) -> bool:
    if _is_class(feature):
        return True
    if isinstance(feature, list) or _is_list(feature):
        return _has_classes(_item(feature))
    return isinstance(feature, dict) and any(map(_has_classes, feature.values()))


def _with_numbers(feature: Feature) -> Feature:
    if _is_class(feature):
        names = feature["names"]
        return {**feature, "numbers": [ClassNumber(number, names) for number in range(len(names))]}
    if isinstance(feature, list):
        return [_with_numbers(item) for item in feature]
    return {name: _with_numbers(inner) for name, inner in feature.items()} if isinstance(feature, dict) else feature


def _known(value: Any, feature: Feature) -> Any:
    if isinstance(value, list):
        return [_known(item, _item(feature)) for item in value]
    if isinstance(value, dict):
        inside = _inside(feature)
        return {name: _known(item, inside.get(name)) for name, item in value.items()}
    if not _is_class(feature) or not isinstance(value, int):
        return value
    names = feature["names"]
    if not NO_LABEL <= value < len(names):
        raise ValueError(f"{value} is not a class number; there are {len(names)} classes ({', '.join(names[:3])}, …)")
    return None if value == NO_LABEL else feature["numbers"][value]
