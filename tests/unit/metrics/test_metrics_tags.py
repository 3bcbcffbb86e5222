"""Entities in tags, by conlleval's rules."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.metrics.metric_registry import BUILT_IN_METRICS
from drawbar.metrics.scores import entity_f1, is_entity_tag, tag_accuracy

Entity = tuple[str, int, int]
"""Type, first word, and the word after the last."""


def entities(tags: list[str]) -> set[Entity]:
    """The entities of one record, by the rules of conlleval (https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt).

    ``B-X`` begins an entity. ``I-X`` continues one of type X; after ``O``, or after another type, it begins one.
    """
    found: set[Entity] = set()
    kind, first = None, 0  # the entity that is open
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind_here = tag.partition("-")
        if prefix == "I" and kind == kind_here:
            continue
        if kind is not None:
            found.add((kind, first, i))
        kind, first = (None if prefix == "O" else kind_here), i
    return found


TAG_LISTS = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), max_size=12)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("", set()),
        ("O O", set()),
        ("B-X", {("X", 0, 1)}),
        ("O B-X I-X", {("X", 1, 3)}),  # to the end
        ("O I-X I-X O", {("X", 1, 3)}),  # I after O begins one
        ("I-X", {("X", 0, 1)}),  # and at the start
        ("B-X B-X", {("X", 0, 1), ("X", 1, 2)}),  # neighbours
        ("I-X B-X I-X", {("X", 0, 1), ("X", 1, 3)}),
        ("B-X I-Y I-Y", {("X", 0, 1), ("Y", 1, 3)}),  # another type begins one
        ("I-X I-Y I-X", {("X", 0, 1), ("Y", 1, 2), ("X", 2, 3)}),
        ("B-X O I-X", {("X", 0, 1), ("X", 2, 3)}),  # a gap ends one
        ("B-X-Y I-X-Y", {("X-Y", 0, 2)}),  # a hyphen in the type
        ("B I I O B", {("", 0, 3), ("", 4, 5)}),  # no types
    ],
)
def test_entities(tags: str, found: set[Any]) -> None:
    assert entities(tags.split()) == found


def test_the_example_of_seqeval() -> None:
    """The values of its README: https://github.com/chakki-works/seqeval."""
    references = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predictions = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_f1(predictions, references) == {
        "entity_precision": 0.5,
        "entity_recall": 0.5,
        "entity_f1": 0.5,
        "tag_accuracy": 0.8,
    }


def test_all_records_count_together() -> None:
    references = [["B-X", "B-Y", "B-X"], ["B-X"]]
    predictions = [["B-X", "O", "O"], ["B-Y"]]  # 1 right of 2 predicted and 4 true
    scores = entity_f1(predictions, references)
    assert scores == {"entity_precision": 1 / 2, "entity_recall": 1 / 4, "entity_f1": 1 / 3, "tag_accuracy": 1 / 4}


def test_an_entity_ends_with_its_record() -> None:
    assert entity_f1([["B-X"], ["I-X"]], [["B-X"], ["B-X"]])["entity_f1"] == 1


def test_missing_tags_are_outside() -> None:
    references = [["B-X", "I-X", "O", "B-Y"]]
    cut, whole = [["B-X", "I-X"]], [["B-X", "I-X", "O", "O"]]
    assert entity_f1(cut, references) == entity_f1(whole, references)
    assert entity_f1(cut, references)["tag_accuracy"] == 3 / 4
    assert cut == [["B-X", "I-X"]]  # the caller's list is as it was


def test_no_entities_is_zero() -> None:
    assert entity_f1([["O"], []], [["O"], []]) == {
        "entity_precision": 0.0,
        "entity_recall": 0.0,
        "entity_f1": 0.0,
        "tag_accuracy": 1.0,
    }
    assert tag_accuracy([[]], [[]]) == 0.0


def test_tag_accuracy_takes_any_tags() -> None:
    assert BUILT_IN_METRICS["tag_accuracy"]([["NN", "VB"], [3]], [["NN", "NN"], [3]]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("tag", ["NN", "E-X", "B-", "BX", "o", "", 3, None])
def test_other_tags_are_refused(tag: Any) -> None:
    assert not is_entity_tag(tag)
    with pytest.raises(ValueError, match="is not O, B-TYPE or I-TYPE"):
        entity_f1([[tag]], [["O"]])


def test_a_prediction_that_does_not_fit_its_record() -> None:
    with pytest.raises(ValueError, match="2 tags, and its reference 1"):
        entity_f1([["O", "O"]], [["O"]])
    with pytest.raises(ValueError, match="list of tags"):
        entity_f1(["O"], ["O"])  # type: ignore[list-item]


@given(lengths=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["X", "Y", None]))))
def test_entities_written_as_tags_are_found_again(lengths: list[tuple[int, str | None]]) -> None:
    tags: list[str] = []
    written = set()
    for length, kind in lengths:
        if kind is not None:
            written.add((kind, len(tags), len(tags) + length))
        tags += ["O"] * length if kind is None else [f"B-{kind}", *[f"I-{kind}"] * (length - 1)]
    assert entities(tags) == written


@given(tags=TAG_LISTS)
def test_entities_cover_the_tagged_words_once(tags: list[str]) -> None:
    covered = [i for _, first, end in entities(tags) for i in range(first, end)]
    assert sorted(covered) == [i for i, tag in enumerate(tags) if tag != "O"]


@given(pairs=st.lists(st.tuples(TAG_LISTS, TAG_LISTS), min_size=1, max_size=6))
def test_scores_are_those_of_the_entities(pairs: list[tuple[list[str], list[str]]]) -> None:
    predictions, references = [p[: len(r)] for p, r in pairs], [r for _, r in pairs]
    found = [(entities(p), entities(r)) for p, r in zip(predictions, references, strict=True)]
    right = sum(len(p & r) for p, r in found)
    predicted, true = sum(len(p) for p, _ in found), sum(len(r) for _, r in found)
    scores = entity_f1(predictions, references)
    assert scores["entity_precision"] == (right / predicted if predicted else 0)
    assert scores["entity_recall"] == (right / true if true else 0)
    assert scores["entity_f1"] == pytest.approx(2 * right / (predicted + true) if predicted + true else 0)


@given(pairs=st.lists(st.tuples(TAG_LISTS, TAG_LISTS), min_size=1, max_size=6))
def test_order_of_the_records_means_nothing(pairs: list[tuple[list[str], list[str]]]) -> None:
    predictions, references = [p[: len(r)] for p, r in pairs], [r for _, r in pairs]
    scores = entity_f1(predictions, references)
    assert scores == entity_f1(predictions[::-1], references[::-1])
    assert all(0 <= value <= 1 for value in scores.values())
    assert entity_f1(references, references)["entity_f1"] == (1 if any(map(entities, references)) else 0)
