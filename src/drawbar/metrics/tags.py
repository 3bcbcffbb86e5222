"""Scores of tags: a list of tags a record, one for each word.

Predictions may be shorter than their references, where a long record was cut off: each missing tag counts as ``O``.
"""

import re
from typing import Any

Entity = tuple[str, int, int]
"""Type, first word, and the word after the last."""

OUTSIDE = "O"
ENTITY_TAG = re.compile(r"O|[BI](-.+)?")


def is_entity_tag(tag: Any) -> bool:
    """Whether ``entity_f1`` understands this tag: ``O``, ``B-TYPE`` or ``I-TYPE``; the type may be left out."""
    return isinstance(tag, str) and ENTITY_TAG.fullmatch(tag) is not None


def entities(tags: list[str]) -> set[Entity]:
    """The entities of one record, by the rules of conlleval, which are also those of seqeval's default mode.

    ``B-X`` begins an entity. ``I-X`` continues one of type X; after ``O``, or after another type, it begins one. See
    https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt and `get_entities` in
    https://github.com/chakki-works/seqeval/blob/master/seqeval/metrics/sequence_labeling.py.

    Raises:
        ValueError: a tag is not one of BIO.
    """
    found: set[Entity] = set()
    kind, first = None, 0  # the entity that is open
    for i, tag in enumerate([*tags, OUTSIDE]):
        if not is_entity_tag(tag):
            raise ValueError(f"the tag {tag!r} is not O, B-TYPE or I-TYPE: use tag_accuracy, or convert the tags")
        prefix, _, kind_here = tag.partition("-")
        if prefix == "I" and kind == kind_here:
            continue
        if kind is not None:
            found.add((kind, first, i))
        kind, first = (None if prefix == OUTSIDE else kind_here), i
    return found


ENTITY_SCORES = ("entity_precision", "entity_recall", "entity_f1", "tag_accuracy")


def entity_f1(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities, 0 to 1, over all records together (micro average).

    An entity is found if its type, its first and its last word are right.

    Returns:
        One for each of ``ENTITY_SCORES``.

    Raises:
        ValueError: a tag is not one of BIO, or a prediction is longer than its reference.
    """
    pairs = _aligned(predictions, references)
    found = [(entities(prediction), entities(reference)) for prediction, reference in pairs]
    right = sum(len(prediction & reference) for prediction, reference in found)
    predicted = sum(len(prediction) for prediction, _ in found)
    true = sum(len(reference) for _, reference in found)
    return {
        "entity_precision": right / predicted if predicted else 0.0,
        "entity_recall": right / true if true else 0.0,
        "entity_f1": 2 * right / (predicted + true) if predicted + true else 0.0,
        "tag_accuracy": tag_accuracy(predictions, references),
    }


def tag_accuracy(predictions: list[list[Any]], references: list[list[Any]]) -> float:
    """The share of words, of all records together, whose tag is right; 0 where there are no words."""
    pairs = [pair for lists in _aligned(predictions, references) for pair in zip(*lists, strict=True)]
    return sum(bool(prediction == reference) for prediction, reference in pairs) / len(pairs) if pairs else 0.0


def _aligned(predictions: list[list[Any]], references: list[list[Any]]) -> list[tuple[list[Any], list[Any]]]:
    """Each prediction, filled up to the length of its reference, with that reference."""
    pairs = []
    for prediction, reference in zip(predictions, references, strict=True):
        if not (isinstance(prediction, list) and isinstance(reference, list)):
            raise ValueError("it is for a list of tags a record")
        missing = len(reference) - len(prediction)
        if missing < 0:
            raise ValueError(f"a prediction has {len(prediction)} tags, and its reference {len(reference)}")
        pairs.append((prediction + [OUTSIDE] * missing, reference))
    return pairs
