"""The labels of a classifier: validation, equality of spellings, and their order in the model's outputs."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from drawbar.data.class_labels import ClassNumber
from drawbar.errors import UserError
from drawbar.metrics.scores import size_or_letters
from drawbar.runtime.log import logger

MOST_LABELS = 1000
SHOWN_LABELS = 20
_LEAVE_OUT = "or leave bad records out: data.on_bad_record=skip"


def check_label(label: Any, column: str) -> Any:
    """The label of a record, if it is valid.

    Raises:
        UserError: it is a list, missing, empty, NaN, or anything else that is not a class name.
    """
    if not isinstance(label, str | int | float):
        raise UserError(
            f"{column!r} holds {str(label)[:60]!r} ({type(label).__name__}), which is no label",
            remedy=f"correct the record: a label is a text, a number, true or false; {_LEAVE_OUT}",
        )
    if isinstance(label, str) and not label.strip():
        raise UserError(f"{column!r} holds an empty label", remedy=f"add the label to the record; {_LEAVE_OUT}")
    # a text "nan" may be a class: it is the code of a language
    if isinstance(label, float) and not math.isfinite(label):
        raise UserError(
            f"{column!r} holds {label}, which is no label",
            remedy=f"write the label into the record, as NaN often stands for one that is missing; {_LEAVE_OUT}",
        )
    return label


def display_label(label: Any) -> Any:
    """The label as people write it: that of a class is its name."""
    return label.name if isinstance(label, ClassNumber) else label


def label_key(label: Any) -> str:
    """Equal labels have equal keys: ``1``, ``1.0``, ``"1"``, ``"1.0"`` and ``true`` are one label."""
    label = display_label(label)
    if isinstance(label, str):
        if label.lower() in ("true", "false"):
            return "1" if label.lower() == "true" else "0"
        whole = re.fullmatch(r"(-?\d+)\.0", label)  # a whole number in a column that once held floats
        return str(int(whole[1])) if whole else label
    return str(label) if isinstance(label, float) and not label.is_integer() else str(int(label))


class Labels:
    """The labels of a task, in the order of its model's outputs.

    A record may give a class by name or by its number in the training data, unless some class name equals the
    number of a class.

    Args:
        names: the labels.
        classes: the names of the training data's classes, in the order of their numbers; None if no file says them.
        suggests_regression: whether the error of an unknown label may suggest ``task.problem=regression``.
    """

    def __init__(self, names: list[Any], classes: list[str] | None = None, suggests_regression: bool = False) -> None:
        self.names = names
        self._suggests_regression = suggests_regression
        self._outputs = {label_key(name): output for output, name in enumerate(names)}
        self._keys_of_names = frozenset(self._outputs)
        keys = [label_key(name) for name in classes or []]
        self._by_name_or_number = bool(keys) and not set(keys) & _numbers(keys)
        """Whether a record may give a class by its number, too: no class name could be mistaken for a number."""
        for number, key in enumerate(keys if self._by_name_or_number else []):
            output = self._outputs.get(key, self._outputs.get(str(number)))
            if output is not None:
                self._outputs[key] = self._outputs[str(number)] = output

    def output_of(self, label: Any) -> int:
        """The index of the model's output for a label.

        Raises:
            UserError: there is no such label.
        """
        by_number = isinstance(label, ClassNumber) and self._are_numbers(label.names)
        try:
            return self._outputs[str(int(label)) if by_number else label_key(label)]
        except KeyError as error:
            raise UserError(
                f"the label {display_label(label)!r} is none of the task's: {describe_labels(self.names)}",
                remedy="correct the record, or list all labels in task.labels"
                + ("; where the labels are numbers to learn, use task.problem=regression" if self._numeric else ""),
            ) from error

    @property
    def _numeric(self) -> bool:
        """Whether the labels look like numbers to learn: more than the two of yes and no, and all of them numbers."""
        return self._suggests_regression and len(self.names) > 2 and all(map(_is_number, self.names))

    def _are_numbers(self, classes: list[str]) -> bool:
        """Whether the task's labels are the numbers of these classes, and not their names: ``labels: [0, 1]``."""
        if self._by_name_or_number or not self._keys_of_names <= _numbers(classes):
            return False
        return not self._keys_of_names <= {label_key(name) for name in classes}

    def named(self, outputs: list[float]) -> dict[str, float]:
        """One number for each output of the model, by its label as a text: JSON has no other keys."""
        return {str(name): number for name, number in zip(self.names, outputs, strict=True)}

    def canonical(self, label: Any) -> Any:
        """The label as the task spells it."""
        return self.names[self.output_of(label)]

    def model_fields(self) -> dict[str, Any]:
        """What the model's config says of them."""
        id2label = {number: str(name) for number, name in enumerate(self.names)}
        return {"id2label": id2label, "label2id": {name: number for number, name in id2label.items()}}


def _numbers(classes: Collection[str]) -> set[str]:
    """The keys of the numbers of these classes."""
    return {str(number) for number in range(len(classes))}


def check_listed(labels: list[Any]) -> list[Any]:
    """The labels of the setting ``task.labels``, each of which occurs once.

    Raises:
        UserError: two of them are the same label.
    """
    first: dict[str, Any] = {}
    for label in labels:
        if label_key(label) in first:
            raise UserError(
                f"{first[label_key(label)]!r} and {label!r} are the same label",
                where="task.labels",
                remedy="list every label once",
            )
        first[label_key(label)] = label
    return labels


def count_labels(labels: Iterable[Any]) -> dict[Any, int]:
    """How often each label occurs: numbers by size, then texts by letters.

    A label with several spellings is counted under its first one; numbers become all ints or all floats.
    """
    first: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for label in labels:
        key = label_key(label)
        first.setdefault(key, display_label(label))
        counts[key] += 1
    in_order = sorted(first, key=lambda key: size_or_letters(first[key]))
    of_one_kind = _of_one_kind(first.values())
    return {of_one_kind(first[key]): counts[key] for key in in_order}


def _of_one_kind(labels: Collection[Any]) -> Callable[[Any], Any]:
    """The common type of a list of ints and floats: 1 and 2.5 become 1.0 and 2.5, and 1 and 2.0 become 1 and 2."""
    if {type(label) for label in labels} != {int, float}:
        return lambda label: label
    return int if all(float(label).is_integer() for label in labels) else float


def check_found(labels: Collection[Any], column: str) -> None:
    """Check that the values of a column are labels.

    Raises:
        UserError: there are fewer than two, or too many for a column of labels.
    """
    if not 1 < len(labels) <= MOST_LABELS:
        many = f"{len(labels):,} different values" if labels else "no values"
        raise UserError(
            f"{column!r} has {many if len(labels) != 1 else 'only one value'} in the training data",
            where="task.labels",
            remedy="name the column that holds the labels, list them in task.labels, or use task.problem=regression "
            "for numbers",
        )


def warn_of_rare(counts: dict[Any, int], column: str) -> None:
    """Warn if nearly every record has its own class, as with ids or measured numbers: nothing can be learned.

    Args:
        counts: how often each label occurs.
    """
    total = sum(counts.values())
    if len(counts) > SHOWN_LABELS and 2 * len(counts) > total:
        logger.warning(
            "%r has %s different labels in %s: nearly every one is a class of its own, from which little can be "
            "learned; name the column that holds the labels, or use task.problem=regression for numbers",
            *(column, f"{len(counts):,}", f"{total:,}"),
        )


def _is_number(label: Any) -> bool:
    return size_or_letters(label)[0] == 0


def describe_counts(counts: dict[Any, int]) -> str:
    """``bad 1,203, good 977``, of the first labels."""
    return _first([f"{_visible(label)} {count:,}" for label, count in counts.items()])


def describe_labels(labels: Iterable[Any]) -> str:
    """``bad, fair, good``: the first labels, and how many more there are."""
    return _first(list(map(_visible, labels)))


def _first(shown: list[str]) -> str:
    more = len(shown) - SHOWN_LABELS
    return ", ".join(shown[:SHOWN_LABELS]) + (f" and {more:,} more labels" if more > 0 else "")


def _visible(label: Any) -> str:
    """In quotes if it begins or ends with spaces, and with escapes for what does not print."""
    text = str(label)
    return text if text == text.strip() and text.isprintable() else repr(text)


def alike(labels: Iterable[Any]) -> list[list[str]]:
    """Groups of labels that differ only in spaces, case or Unicode form."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        if isinstance(label, str):
            key = " ".join(unicodedata.normalize("NFKC", label).split()).casefold()
            groups.setdefault(key, []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def warn_of_alike(labels: Iterable[Any], column: str) -> None:
    """Warn of labels that differ only in spaces, case or Unicode form: they become separate classes."""
    groups = alike(labels)
    if groups:
        shown = _first([" and ".join(map(ascii, group)) for group in groups])
        logger.warning(
            "labels in %r that differ in spaces, case or the form of their letters alone are classes of their own: %s; "
            "where they mean the same, write them in one way",
            *(column, shown),
        )


def trained_labels(config: Any) -> list[str] | None:
    """The labels that a model was trained for, in the order of its outputs; None if its config (of transformers)
    has no names for them but LABEL_0, LABEL_1, …"""
    of_output = getattr(config, "id2label", None) or {}
    of_name = getattr(config, "label2id", None) or {}
    for names in (of_output, {number: name for name, number in of_name.items()}):
        if set(names) == set(range(len(names))) and not all(re.fullmatch(r"LABEL_\d+", str(n)) for n in names.values()):
            return [str(names[number]) for number in range(len(names))]
    return None


def in_order_of(trained: list[str], labels: list[Any]) -> list[Any] | None:
    """The labels in the order of a model that was trained for them, whatever the case of their letters; None if it
    was trained for others."""
    for key in (label_key, lambda label: label_key(label).casefold()):
        of_key = {key(label): label for label in labels}
        keys = [key(name) for name in trained]
        if len(of_key) == len(labels) and sorted(keys) == sorted(of_key):
            return [of_key[one] for one in keys]
    return None


def ordered_for_model(labels: list[Any], listed: bool, config: Any, model: str) -> list[Any]:
    """The labels in the order of a pretrained model's own head, if that was trained for these labels.

    Another order would permute the head in silence.

    Args:
        listed: whether a user gave them, in the order of the outputs.
        config: the model's, of transformers.
        model: its name, for the log.
    """
    trained = trained_labels(config)
    if trained is None:
        return labels
    ordered = in_order_of(trained, labels)
    if ordered is not None:
        logger.info("labels in the order of the outputs of %s: %s", model, ", ".join(map(str, ordered)))
        return ordered
    are_numbers = [label_key(label) for label in labels] == [str(number) for number in range(len(labels))]
    if len(trained) == len(labels) and not (listed or are_numbers):
        logger.warning(
            "%s was trained for the labels %s, and its outputs now stand for %s: list the labels in that order in "
            "task.labels, where they mean the same",
            model,
            describe_labels(trained),
            describe_labels(labels),
        )
    return labels
