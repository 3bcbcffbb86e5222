"""Scores of labels and of numbers, against values worked out by hand and the properties that they must have."""

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawbar.metrics.metric_registry import BUILT_IN_METRICS
from drawbar.metrics.scores import positive_class, with_task_classes

pytestmark = pytest.mark.filterwarnings("error")

LABELS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=30)
SETS = st.frozensets(st.sampled_from("abcd")).map(sorted)
LABEL_SETS = st.lists(st.tuples(SETS, SETS), min_size=1, max_size=20)
BOUNDED = ["accuracy", *(f"{s}{a}" for s in ("precision", "recall", "f1") for a in ("", "_macro", "_micro"))]
NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def score(name: str, predictions: list[Any], references: list[Any]) -> float:
    value = BUILT_IN_METRICS[name](predictions, references)
    assert type(value) is float
    return value


# Class a: 2 of 3 found, 2 of 3 predictions right; b: 1 of 2 and 1 of 2; c: 0 of 1 and 0 of 1.
THREE = (["a", "a", "b", "b", "a", "c"], ["a", "a", "a", "b", "b", "c"])


def test_three_classes() -> None:
    predictions, references = THREE
    assert score("accuracy", predictions, references) == pytest.approx(4 / 6)
    for name in ("precision", "recall", "f1"):
        assert score(f"{name}_macro", predictions, references) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
        assert score(f"{name}_micro", predictions, references) == pytest.approx(4 / 6)
        assert score(name, predictions, references) == score(f"{name}_macro", predictions, references)


def test_macro_precision_and_recall_are_not_swapped() -> None:
    predictions, references = ["a", "a", "a", "b"], ["a", "b", "b", "b"]
    assert score("precision_macro", predictions, references) == pytest.approx((1 / 3 + 1) / 2)
    assert score("recall_macro", predictions, references) == pytest.approx((1 + 1 / 3) / 2)
    assert score("f1_macro", predictions, references) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("no", "yes"), [(0, 1), (False, True), ("0", "1"), ("no", "yes"), ("negative", "positive"), (-1, 1), (0.0, 1.0)]
)
def test_binary_scores_the_last_class(no: Any, yes: Any) -> None:
    references = [yes, yes, yes, no, no, no]
    predictions = [yes, no, no, yes, no, no]  # 1 found, 2 missed, 1 false alarm
    for suffix in ("", "_binary"):
        assert score(f"precision{suffix}", predictions, references) == pytest.approx(1 / 2)
        assert score(f"recall{suffix}", predictions, references) == pytest.approx(1 / 3)
        assert score(f"f1{suffix}", predictions, references) == pytest.approx(2 / 5)
    # (1 * 2 - 1 * 2) / sqrt(2 * 3 * 3 * 4)
    assert score("mcc", predictions, references) == pytest.approx(0)


@pytest.mark.parametrize(
    ("predictions", "references", "positive"),
    [
        ([0, 0], [0, 0], 1),  # not 0, though nothing else occurs
        ([True], [True], 1),
        (["a", "b"], ["a", "a"], "b"),  # one class in the references: the predictions count
        (["c", "b"], ["a", "b"], "b"),  # two classes: they do not
        ([2, 1], [1, 2], 2),
    ],
)
def test_the_positive_class(predictions: list[Any], references: list[Any], positive: Any) -> None:
    assert positive_class(predictions, references) == positive


@pytest.mark.parametrize(
    ("classes", "positive"), [(["neg", "pos"], "pos"), ([0, 1], 1), ([1, 2, "none"], None), (["9", "10"], "10")]
)
def test_the_classes_of_the_task_come_first(classes: list[Any], positive: Any) -> None:
    """A split of one class has no other score than a larger one."""
    metrics = with_task_classes({name: BUILT_IN_METRICS[name] for name in ("f1", "f1_macro", "accuracy")}, classes)
    references = [classes[0]] * 3
    assert metrics["accuracy"](references, references) == 1
    if positive is None:
        assert metrics["f1"](references, references) == metrics["f1_macro"](references, references) == 1
    else:
        assert positive_class(references, references, classes) == positive
        assert metrics["f1"](references, references) == 0


def test_references_that_are_no_classes_of_the_task_decide_themselves() -> None:
    metrics = with_task_classes({"f1": BUILT_IN_METRICS["f1"]}, ["red", "green", "blue"])
    assert metrics["f1"](["no", "yes", "no"], ["no", "yes", "yes"]) == pytest.approx(2 / 3)


def test_labels_that_are_numbers_and_texts() -> None:
    references, predictions = [1, 2, "none", 2], [1, 2, "none", 1]
    for name in ("f1_macro", "f1_micro", "f1", "mcc"):
        assert 0 < score(name, predictions, references) < 1
    lists = [[label] for label in references]
    assert score("f1_micro", [[label] for label in predictions], lists) == pytest.approx(3 / 4)
    assert positive_class(["none"], [1]) == "none"


def test_references_decide_whether_f1_is_binary() -> None:
    """Otherwise the meaning of the score would change from one evaluation to the next."""
    assert score("f1", ["a", "b", "c"], ["a", "b", "b"]) == pytest.approx(2 / 3)


def test_mcc() -> None:
    # tp 2, tn 1, fp 1, fn 0: (2 * 1 - 0) / sqrt(3 * 2 * 2 * 1)
    assert score("mcc", [1, 1, 1, 0], [1, 1, 0, 0]) == pytest.approx(2 / math.sqrt(12))
    assert score("mcc", [0, 0, 1], [1, 1, 0]) == pytest.approx(-1)
    assert score("mcc", ["a", "b", "c"], ["a", "b", "c"]) == pytest.approx(1)


def test_nothing_to_divide_by_is_zero_without_a_warning() -> None:
    for name in ("precision", "recall", "f1"):
        assert score(name, [0, 0], [0, 0]) == 0
        assert score(f"{name}_macro", ["a", "a"], ["b", "b"]) == 0
        for average in ("macro", "micro", "samples"):
            assert score(f"{name}_{average}", [[], []], [[], []]) == 0
            assert score(f"{name}_{average}", [["a"], []], [[], []]) == 0
    assert score("mcc", [1, 1], [1, 1]) == 0
    assert score("mcc", [1, 1], [1, 0]) == 0


def test_multi_label_with_one_class() -> None:
    """scikit-learn would take the only column for single labels, and score their absence too."""
    for average in ("macro", "micro"):
        assert score(f"precision_{average}", [["a"], ["a"], []], [["a"], [], []]) == 1 / 2
        assert score(f"recall_{average}", [["a"], ["a"], []], [["a"], [], []]) == 1
    assert score("precision_samples", [["a"], ["a"], []], [["a"], [], []]) == pytest.approx(1 / 3)


@pytest.mark.exhaustive
@given(pairs=LABEL_SETS)
def test_multi_label_is_what_scikit_learn_says(pairs: list[tuple[list[str], list[str]]]) -> None:
    predictions, references = [p for p, _ in pairs], [r for _, r in pairs]
    classes = sorted(set().union(*predictions, *references))
    assume(len(classes) > 1)
    from sklearn.metrics import precision_recall_fscore_support  # here: it takes seconds to import
    from sklearn.preprocessing import MultiLabelBinarizer

    found, true = (MultiLabelBinarizer(classes=classes).fit_transform(items) for items in (predictions, references))
    for average in ("macro", "micro", "samples"):
        expected = precision_recall_fscore_support(true, found, average=average, zero_division=0)
        got = [score(f"{name}_{average}", predictions, references) for name in ("precision", "recall", "f1")]
        assert got == pytest.approx(expected[:3])


def test_multi_label() -> None:
    references = [["a", "b"], ["b"], [], ["c", "a"]]
    predictions = [["b", "a"], ["a"], ["c"], ["c"]]
    assert score("accuracy", predictions, references) == 1 / 4  # the order of the labels means nothing
    assert score("precision_micro", predictions, references) == pytest.approx(3 / 5)
    assert score("recall_micro", predictions, references) == pytest.approx(3 / 5)
    # a: 1 of 2 predicted and of 2 true; b: 1 of 1 and of 2; c: 1 of 2 and of 1
    assert score("precision_macro", predictions, references) == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    assert score("recall_macro", predictions, references) == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    assert score("recall", predictions, references) == score("recall_macro", predictions, references)
    # records: 2 of 2, 0 of 1, none true, 1 of 2
    assert score("recall_samples", predictions, references) == pytest.approx((1 + 0 + 0 + 1 / 2) / 4)
    assert score("precision_samples", predictions, references) == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert score("f1_samples", predictions, references) == pytest.approx((1 + 0 + 0 + 2 / 3) / 4)


@pytest.mark.parametrize(
    ("name", "predictions", "references", "says"),
    [
        ("f1_binary", ["a"] * 3, ["a", "b", "c"], "two classes, and there are 3"),
        ("f1_binary", [["a"]], [["a"]], "one label a record"),
        ("f1_samples", ["a"], ["a"], "lists of labels"),
        ("mcc", [["a"]], [["a"]], "one label a record"),
        ("accuracy", ["a"], [["a"]], "some are single labels"),
        ("accuracy", [["O", "O"]], [["O", "B"]], "tag_accuracy"),
        ("mse", [[1.0]], [[1.0]], "one number a record"),
    ],
)
def test_items_of_another_kind(name: str, predictions: list[Any], references: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BUILT_IN_METRICS[name](predictions, references)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=30)
@given(pairs=LABELS | LABEL_SETS, seed=st.integers(0, 100))
def test_shares_are_between_0_and_1_in_any_order(name: str, pairs: list[tuple[Any, Any]], seed: int) -> None:
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    value = score(name, [p for p, _ in pairs], [r for _, r in pairs])
    assert 0 <= value <= 1
    assert score(name, [p for p, _ in shuffled], [r for _, r in shuffled]) == value


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=30)
@given(references=st.lists(st.sampled_from("abc"), min_size=1) | st.lists(SETS.filter(bool), min_size=1))
def test_perfect_labels_score_1(name: str, references: list[Any]) -> None:
    assert score(name, references, list(references)) == 1


@given(pairs=LABELS)
def test_micro_average_of_single_labels_is_accuracy(pairs: list[tuple[str, str]]) -> None:
    predictions, references = [p for p, _ in pairs], [r for _, r in pairs]
    assert score("f1_micro", predictions, references) == pytest.approx(score("accuracy", predictions, references))


def test_errors_of_numbers() -> None:
    assert score("mse", [1, 2, 5], [1, 4, 2]) == pytest.approx(13 / 3)
    assert score("mae", [1, 2, 5], [1, 4, 2]) == pytest.approx(5 / 3)
    assert math.isnan(score("mse", [math.nan, 1], [1, 1]))
    assert score("mae", [np.uint8(1)], [np.uint8(2)]) == 1  # not 255


def test_correlations() -> None:
    # Deviations (-1, 0, 1) and (0, 1, -1): -1 / sqrt(2 * 2); the ranks are the values
    assert score("pearson", [1, 2, 3], [2, 3, 1]) == pytest.approx(-1 / 2)
    assert score("spearman", [1, 2, 3], [2, 3, 1]) == pytest.approx(-1 / 2)
    assert score("spearman", [1, 2, 3, 4], [1, 10, 100, 1e6]) == pytest.approx(1)
    assert score("pearson", [1, 2, 3, 4], [1, 10, 100, 1e6]) < 0.9


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("other", [[1, 1, 1], [1, math.nan, 2], [1, math.inf, 2]])
def test_a_correlation_that_is_not_defined_is_nan(name: str, other: list[float]) -> None:
    assert math.isnan(score(name, [1, 2, 3], other))
    assert math.isnan(score(name, other, [1, 2, 3]))
    assert math.isnan(score(name, [1], [1]))


@given(references=NUMBERS, seed=st.integers(0, 100))
def test_numbers_in_any_order(references: list[float], seed: int) -> None:
    predictions = [value / 3 + 1 for value in references]
    order = random.Random(seed).sample(range(len(references)), len(references))
    for name in ("mse", "mae", "pearson", "spearman"):
        assert name in ("pearson", "spearman") or score(name, references, references) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy: nearly constant
            value = score(name, predictions, references)
            shuffled = score(name, [predictions[i] for i in order], [references[i] for i in order])
        assert shuffled == pytest.approx(value, rel=1e-3, abs=1e-3, nan_ok=True)
