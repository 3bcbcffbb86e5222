"""Scores of tags: a list of tags a record, one for each word.

Predictions may be shorter than their references, where a long record was cut off: each missing tag counts as ``O``.
"""

import re
from typing import Any

OUTSIDE = "O"
ENTITY_TAG = re.compile(r"O|[BI](-.+)?")


def is_entity_tag(tag: Any) -> bool:
    """Whether ``entity_f1`` understands this tag: ``O``, ``B-TYPE`` or ``I-TYPE``; the type may be left out."""
    return isinstance(tag, str) and ENTITY_TAG.fullmatch(tag) is not None


ENTITY_SCORES = ("entity_precision", "entity_recall", "entity_f1", "tag_accuracy")


def entity_f1(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities, 0 to 1, over all records together (micro average).

    By the rules of conlleval, which are those of seqeval's default mode: ``B-X`` begins an entity; ``I-X`` continues
    one of type X, and after ``O`` or another type it begins one. An entity is found if its type, its first and its last
    word are right. See https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt.

    Returns:
        One for each of ``ENTITY_SCORES``.

    Raises:
        ValueError: a tag is not one of BIO, or a prediction is longer than its reference.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    pairs = _aligned(predictions, references)
    for tag in (tag for pair in pairs for tags in pair for tag in tags):
        if not is_entity_tag(tag):
            raise ValueError(f"the tag {tag!r} is not O, B-TYPE or I-TYPE: use tag_accuracy, or convert the tags")
    found, true = ([pair[side] for pair in pairs] for side in (0, 1))
    precision, recall, f1, _ = precision_recall_fscore_support(true, found, average="micro", zero_division=0)
    return {
        "entity_precision": float(precision),
        "entity_recall": float(recall),
        "entity_f1": float(f1),
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
