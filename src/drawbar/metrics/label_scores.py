"""Scores of labels: one label a record, or a list of labels a record (multi-label).

scikit-learn computes all but ``accuracy`` (https://scikit-learn.org/stable/modules/model_evaluation.html). What would
be a division by zero is 0.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

Score = Literal["precision", "recall", "f1"]
Average = Literal["binary", "macro", "micro", "samples"]
Labels = list[Any]

SCORES: tuple[Score, ...] = ("precision", "recall", "f1")
AVERAGES: tuple[Average, ...] = ("binary", "macro", "micro", "samples")


def accuracy(predictions: Labels, references: Labels) -> float:
    """The share of records whose label is right. Multi-label: whose set of labels is exactly right."""
    pairs = list(zip(predictions, references, strict=True))
    if _is_multi_label(predictions, references):
        return sum(set(prediction) == set(reference) for prediction, reference in pairs) / len(pairs)
    return sum(bool(prediction == reference) for prediction, reference in pairs) / len(pairs)


def mcc(predictions: Labels, references: Labels) -> float:
    """Matthews' correlation coefficient, from -1 to 1; 0 where the predictions or the references are all one class."""
    from sklearn.metrics import matthews_corrcoef

    if _is_multi_label(predictions, references):
        raise ValueError("it is for one label a record, and these are lists of labels")
    classes = sorted({*predictions, *references}, key=size_or_letters)
    if len(classes) == 1:
        return 0.0  # scikit-learn says the same, and warns
    return float(matthews_corrcoef(_numbers(references, classes), _numbers(predictions, classes)))


def class_score(
    predictions: Labels,
    references: Labels,
    *,
    score: Score,
    average: Average | None,
    task_classes: Collection[Any] | None = None,
) -> float:
    """Precision, recall or F1.

    Args:
        predictions: a label for each record, or a list of labels for each (multi-label).
        references: the same.
        score: which of the three.
        average: ``binary``: of the positive class, see :func:`positive_class`; ``macro``: the mean over the classes
            that occur; ``micro``: of all decisions together; ``samples``: the mean over the records, multi-label only.
            None: ``binary`` for single labels of at most two classes, else ``macro``.
        task_classes: all classes of the task, which decide whether there are two and which is the positive one. The
            classes of the references do, if it is None or lacks one of these.

    Raises:
        ValueError: ``binary`` with more than two classes or with lists of labels; ``samples`` with single labels.
    """
    if _is_multi_label(predictions, references):
        if average == "binary":
            raise ValueError(f"it is for one label a record, and these are lists: use {score}_macro or {score}_micro")
        return _multi_label_score(predictions, references, score, average or "macro")
    if average == "samples":
        raise ValueError(f"it is for lists of labels, and these are single labels: use {score}_macro or {score}_micro")
    if average is None:
        average = "binary" if len(_known_classes(references, task_classes)) <= 2 else "macro"
    if average == "binary":
        positive = positive_class(predictions, references, task_classes)
        found, true = ([int(label == positive) for label in labels] for labels in (predictions, references))
        # The macro average over class 1 alone is its score; "binary" would be an error where class 1 does not occur.
        return _score(found, true, score, labels=[1], average="macro")
    classes = sorted({*predictions, *references}, key=size_or_letters)
    return _score(_numbers(predictions, classes), _numbers(references, classes), score, average=average)


def positive_class(predictions: Labels, references: Labels, task_classes: Collection[Any] | None = None) -> Any:
    """The class that ``binary`` scores: 1 or True for labels that are 0 and 1, otherwise the last in sorted order
    (numbers by size, then texts by letters).

    The classes of the task decide, so that the answer is the same at every evaluation. Where they are not known, the
    references do; the predictions count only where the references are all one class.

    Raises:
        ValueError: there are more than two classes.
    """
    classes = _known_classes(references, task_classes)
    if len(classes) > 2:
        raise ValueError(f"it is for two classes, and there are {len(classes)}: use the macro or micro average")
    if len(classes) == 1:
        classes |= set(predictions)
    return 1 if classes <= {0, 1} else max(classes, key=size_or_letters)


def _known_classes(references: Labels, task_classes: Collection[Any] | None) -> set[Any]:
    """The task's classes; those of the references where a user's own task compares other labels than the task has."""
    found = set(references)
    return found if task_classes is None or not found <= {*task_classes} else {*task_classes}


def with_task_classes(metrics: Mapping[str, Callable[..., Any]], classes: Collection[Any]) -> dict[str, Any]:
    """The metrics, of which precision, recall and F1 know all classes of the task, also those that a split lacks."""
    return {
        name: partial(metric, task_classes=classes)
        if isinstance(metric, partial) and metric.func is class_score
        else metric
        for name, metric in metrics.items()
    }


def size_or_letters(label: Any) -> tuple[int, float, str]:
    """The key of the order of labels: numbers, and texts that are one, by size, then other texts by letters."""
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    return (0, number, str(label)) if math.isfinite(number) else (1, 0.0, str(label))


def _multi_label_score(predictions: Labels, references: Labels, score: Score, average: Average) -> float:
    classes = sorted(set().union(*predictions, *references), key=size_or_letters)
    if not classes:
        return 0.0  # nobody has a label, which scikit-learn cannot express
    # One more column than classes, which is not scored: scikit-learn takes a single column for single labels.
    found, true = (
        np.array([[*(label in item for label in classes), False] for item in items], dtype=int)
        for items in (predictions, references)
    )
    return _score(found, true, score, labels=range(len(classes)), average=average)


def _score(predictions: Any, references: Any, score: Score, **options: Any) -> float:
    from sklearn.metrics import precision_recall_fscore_support

    values = precision_recall_fscore_support(references, predictions, zero_division=0.0, **options)
    return float(values[SCORES.index(score)])


def _numbers(labels: Labels, classes: Labels) -> list[int]:
    """Labels as places in ``classes``, since scikit-learn takes floats for targets of a regression."""
    place = {label: i for i, label in enumerate(classes)}
    return [place[label] for label in labels]


def _is_multi_label(predictions: Labels, references: Labels) -> bool:
    """Whether the items are lists of labels.

    Raises:
        ValueError: only some are; or they are sequences of tags, which as sets of labels would get a wrong score.
    """
    lists = [isinstance(item, list | tuple | set | frozenset) for item in (*predictions, *references)]
    if any(lists) and not all(lists):
        raise ValueError("some items are lists of labels and some are single labels")
    # A model that chooses a set of labels never repeats one; a tagger does.
    if any(lists) and any(_repeats(item) for item in predictions):
        raise ValueError("a prediction repeats a label, so these are tags of words: use tag_accuracy or entity_f1")
    return any(lists)


def _repeats(labels: Iterable[Any]) -> bool:
    labels = list(labels)
    return len(set(labels)) < len(labels)


CLASSIFICATION: dict[str, Callable[[Labels, Labels], float]] = {
    "accuracy": accuracy,
    "mcc": mcc,
    **{score: partial(class_score, score=score, average=None) for score in SCORES},
    **{f"{s}_{average}": partial(class_score, score=s, average=average) for s, average in product(SCORES, AVERAGES)},
}
"""``f1`` and, by its average, ``f1_macro``; the same for precision and recall."""
