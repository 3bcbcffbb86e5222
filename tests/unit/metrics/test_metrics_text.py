"""Scores of texts, against values worked out by hand and the libraries themselves."""

import math
import random
from typing import Any

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.metrics.metric_registry import BUILT_IN_METRICS

WORDS = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat"]), min_size=4, max_size=10).map(" ".join)
PREDICTIONS = ["the cat sat on the mat today", "a dog ran in the big park", ""]
REFERENCES = ["the cat sat on a mat today", "a dog ran home", "not empty at all"]


def scores(name: str, predictions: list[Any], references: list[Any]) -> dict[str, float]:
    value = BUILT_IN_METRICS[name](predictions, references)
    result = value if isinstance(value, dict) else {name: value}
    assert all(type(number) is float for number in result.values())
    return result


@pytest.mark.parametrize(
    ("prediction", "reference", "same"),
    [
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("a  b", "a b", 0),
        ("b", ["a", " b"], 1),  # any of several
        ("c", ["a", "b"], 0),
        (["a", "b"], ["a", "b"], 1),
        (["b", "a"], ["a", "b"], 0),
        (3, 3, 1),
        ("3", 3, 0),
    ],
)
def test_exact_match(prediction: Any, reference: Any, same: float) -> None:
    assert scores("exact_match", [prediction, "x"], [reference, "y"]) == {"exact_match": same / 2}


def test_bleu_by_hand() -> None:
    # Matches of 1 to 4 words: 4 of 5, 3 of 4, 2 of 3, 1 of 2; as long as its reference, so no penalty.
    expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert scores("bleu", ["a b c d e"], ["a b c d f"])["bleu"] == pytest.approx(expected)
    # All right, but 4 words for 6.
    assert scores("bleu", ["a b c d"], ["a b c d e f"])["bleu"] == pytest.approx(100 * math.exp(1 - 6 / 4))


@pytest.mark.parametrize(("name", "library"), [("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)])
def test_corpus_scores_are_those_of_sacrebleu(name: str, library: Any) -> None:
    expected = library(PREDICTIONS, [REFERENCES]).score
    assert 0 < expected < 100
    assert scores(name, PREDICTIONS, REFERENCES) == {name: pytest.approx(expected)}
    several = [[REFERENCES[0], PREDICTIONS[0]], REFERENCES[1], [REFERENCES[2]]]
    padded = [REFERENCES, [PREDICTIONS[0], None, None]]
    assert scores(name, PREDICTIONS, several) == {name: pytest.approx(library(PREDICTIONS, padded).score)}
    assert scores(name, PREDICTIONS, several)[name] > expected


def test_rouge_by_hand() -> None:
    # Common words 3 of 4 and 3 of 6; pairs of words 1 of 3 and 1 of 5; longest common sequence "the cat mat".
    result = scores("rouge", ["the cat mat park"], ["the cat on a big mat"])
    assert result == {
        "rouge1": pytest.approx(2 * 3 / (4 + 6)),
        "rouge2": pytest.approx(2 * 1 / (3 + 5)),
        "rougeL": pytest.approx(2 * 3 / (4 + 6)),
        "rougeLsum": pytest.approx(2 * 3 / (4 + 6)),
    }


def test_rouge_sum_takes_lines_for_sentences() -> None:
    result = scores("rouge", ["a dog ran\nthe cat sat"], ["the cat sat\na dog ran"])
    assert result["rougeLsum"] == pytest.approx(1)
    assert result["rougeL"] == pytest.approx(1 / 2)


def test_rouge_is_the_mean_of_the_library_without_stemming() -> None:
    predictions, references = ["the cats sat", "a dog", ""], ["the cat sat", "the dog ran", "x"]
    from rouge_score.rouge_scorer import RougeScorer  # here: it takes seconds to import

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    each = [scorer.score(r, p)["rougeL"].fmeasure for p, r in zip(predictions, references, strict=True)]
    assert scores("rouge", predictions, references)["rougeL"] == pytest.approx(sum(each) / 3)
    assert each[0] == pytest.approx(2 / 3)


def test_rouge_writes_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        scores("rouge", ["a"], ["a"])
    assert not caplog.records


def test_rouge_takes_the_best_reference() -> None:
    assert scores("rouge", ["the cat"], [["a dog", "the cat"]])["rouge1"] == 1


@pytest.mark.parametrize("name", ["bleu", "chrf", "rouge"])
def test_items_that_are_no_text(name: str) -> None:
    for predictions, references in [
        ([3], ["a"]),
        (["a"], [3]),
        (["a"], [[]]),
        (["a"], [[3]]),
        (["a", None], ["a", "b"]),
    ]:
        with pytest.raises(ValueError, match="text"):
            BUILT_IN_METRICS[name](predictions, references)


@pytest.mark.parametrize(("name", "best"), [("exact_match", 1), ("bleu", 100), ("chrf", 100), ("rouge", 1)])
@settings(max_examples=25, deadline=None)
@given(references=st.lists(WORDS, min_size=1, max_size=6), predictions=st.lists(WORDS, min_size=6, max_size=6))
def test_the_best_score_and_any_order(name: str, best: float, references: list[str], predictions: list[str]) -> None:
    for value in scores(name, references, references).values():
        assert value == pytest.approx(best)
    pairs = list(zip(predictions, references, strict=False))
    shuffled = random.Random(1).sample(pairs, len(pairs))
    one = scores(name, [p for p, _ in pairs], [r for _, r in pairs])
    other = scores(name, [p for p, _ in shuffled], [r for _, r in shuffled])
    assert other == {key: pytest.approx(value) for key, value in one.items()}
    assert all(0 <= value <= best + 1e-9 for value in one.values())
