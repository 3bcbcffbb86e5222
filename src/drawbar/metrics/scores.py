"""The built-in scores: of labels (one a record, or a list a record: multi-label), numbers, tags and texts.

scikit-learn computes all of labels but ``accuracy``
(https://scikit-learn.org/stable/modules/model_evaluation.html). What would be a division by zero is 0. Of tags, a
record has a list, one for each word; predictions may be shorter than their references, where a long record was cut off:
each missing tag counts as ``O``. A reference of texts is one text, or a list of texts any of which would do.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


Numbers = list[float]


def mse(predictions: Numbers, references: Numbers) -> float:
    """The mean squared error, in the square of the references' unit."""
    return float(np.mean(np.square(_array(predictions) - _array(references))))


def mae(predictions: Numbers, references: Numbers) -> float:
    """The mean absolute error, in the references' unit."""
    return float(np.mean(np.abs(_array(predictions) - _array(references))))


def pearson(predictions: Numbers, references: Numbers) -> float:
    """The correlation of the values, from -1 to 1; nan where it is not defined, as for a constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, references).statistic) if _both_vary(predictions, references) else float("nan")


def spearman(predictions: Numbers, references: Numbers) -> float:
    """The correlation of the ranks, from -1 to 1; nan where it is not defined, as for a constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, references).statistic) if _both_vary(predictions, references) else float("nan")


def _array(values: Numbers) -> Any:
    """Shape (records,), float64: a difference of unsigned or 16-bit values would overflow."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError("it is for one number a record, and these are lists")
    return array


def _both_vary(predictions: Numbers, references: Numbers) -> bool:
    arrays = (_array(predictions), _array(references))
    return all(bool(np.isfinite(array).all()) and array.min() < array.max() for array in arrays)


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


Texts = Sequence[str]
References = Sequence[str | list[str]]


def exact_match(predictions: list[Any], references: list[Any]) -> float:
    """The share of records whose prediction is a reference; space at both ends of a text does not count.

    A prediction that is a list is compared with a reference that is a list, item by item.
    """
    pairs = list(zip(predictions, references, strict=True))
    return sum(_matches(prediction, reference) for prediction, reference in pairs) / len(pairs)


def bleu(predictions: Texts, references: References) -> float:
    """BLEU of the whole corpus, 0 to 100: sacrebleu's defaults (https://aclanthology.org/W18-6319).

    Tokens are those of mteval-v13a. A corpus without one 4-gram, such as answers of one word, has 0 even if perfect.
    """
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(_texts(predictions), _columns(references)).score)


def chrf(predictions: Texts, references: References) -> float:
    """chrF2 of the whole corpus, 0 to 100: sacrebleu's defaults (https://aclanthology.org/W15-3049)."""
    from sacrebleu import corpus_chrf

    return float(corpus_chrf(_texts(predictions), _columns(references)).score)


ROUGE_SCORES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(predictions: Texts, references: References) -> dict[str, float]:
    """ROUGE F-measures, 0 to 1: the mean over the records (https://aclanthology.org/W04-1013).

    Of several references, the one with the best score counts. ``rougeLsum`` takes each line for a sentence. Words are
    not stemmed. The package rouge-score knows only the letters a-z and digits: a text in another alphabet has 0.

    Returns:
        One for each of ``ROUGE_SCORES``.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    # RougeScorer would choose this tokenizer by itself, but then write a line about it in the log.
    scorer = RougeScorer(list(ROUGE_SCORES), tokenizer=DefaultTokenizer(use_stemmer=False))
    pairs = zip(_choices(references), _texts(predictions), strict=True)
    scores = [scorer.score_multi(texts, prediction) for texts, prediction in pairs]
    return {name: float(sum(score[name].fmeasure for score in scores) / len(scores)) for name in ROUGE_SCORES}


def _matches(prediction: Any, reference: Any) -> bool:
    if isinstance(prediction, str) and isinstance(reference, list):
        return any(_matches(prediction, one) for one in reference)
    if isinstance(prediction, str) and isinstance(reference, str):
        return prediction.strip() == reference.strip()
    return bool(prediction == reference)


def _columns(references: References) -> list[list[str | None]]:
    """sacrebleu's layout: its n-th list has the n-th reference of every record, None where there are fewer."""
    rows = _choices(references)
    return [[row[n] if n < len(row) else None for row in rows] for n in range(max(map(len, rows)))]


def _choices(references: References) -> list[list[str]]:
    rows = [[reference] if isinstance(reference, str) else reference for reference in references]
    for row in rows:
        if not isinstance(row, list) or not row:
            raise ValueError(f"a reference must be a text or a list of texts, not {row!r}")
        _texts(row)
    return rows


def _texts(values: Texts) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"it is for texts, and {value!r} is none")
    return list(values)
