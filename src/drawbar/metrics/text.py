"""Scores of texts. A reference is one text, or a list of texts any of which would do."""

from collections.abc import Sequence
from typing import Any

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
