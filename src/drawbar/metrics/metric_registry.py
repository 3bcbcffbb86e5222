"""From the names in ``task.metrics`` to functions, and from those to one flat dict of scores."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, SupportsFloat

from drawbar.config.io.user_modules import cause, find_by_name
from drawbar.errors import UserError
from drawbar.metrics.scores import (
    CLASSIFICATION,
    ENTITY_SCORES,
    ROUGE_SCORES,
    bleu,
    chrf,
    entity_f1,
    exact_match,
    mae,
    mse,
    pearson,
    rouge,
    spearman,
    tag_accuracy,
)
from drawbar.util.registry import Registry

Metric = Callable[[list[Any], list[Any]], dict[str, float] | float]
"""(predictions, references) → one score, or several by name. Item i of both lists belongs to record i."""

BUILT_IN_METRICS: dict[str, Metric] = {
    **CLASSIFICATION,
    "mse": mse,
    "mae": mae,
    "pearson": pearson,
    "spearman": spearman,
    "exact_match": exact_match,
    "bleu": bleu,
    "chrf": chrf,
    "rouge": rouge,
    "entity_f1": entity_f1,
    "tag_accuracy": tag_accuracy,
}
METRICS: Registry[Metric] = Registry("metric", "drawbar.metrics", BUILT_IN_METRICS)
"""Names for ``task.metrics``. A function of your own is also found as ``package.module:function``."""

SMALLER_IS_BETTER = frozenset({"loss", "perplexity", "bits_per_byte", "mse", "mae"})
LARGER_IS_BETTER = frozenset({*BUILT_IN_METRICS, *ROUGE_SCORES, *ENTITY_SCORES}) - SMALLER_IS_BETTER
"""Scores of the built-in metrics by name; ``SMALLER_IS_BETTER`` also has those that tasks compute from the loss."""

SETTING = "task.metrics"


def best_is(score: str) -> Literal["min", "max"] | None:
    """Whether the smallest or the largest is the best of this score; None where its name does not say it. ``NAME/loss``
    is the loss of one source."""
    score = score.rpartition("/")[2]
    if score in SMALLER_IS_BETTER:
        return "min"
    return "max" if score in LARGER_IS_BETTER else None


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """The metrics of these names: built-in ones, or your own as ``package.module:function``.

    Raises:
        UserError: there is no such metric, or your own cannot be imported or called.
    """
    return {name: find_by_name(METRICS, name, SETTING, "function") for name in names}


def compute(
    metrics: dict[str, Metric], predictions: list[Any], references: list[Any], taken: Collection[str] = ()
) -> dict[str, float]:
    """All scores, in one flat dict.

    A metric that returns a number gives it its own name (a function of yours: the function's name); one that returns
    a dict gives the keys of the dict.

    Args:
        metrics: the functions by name.
        predictions: one for each record.
        references: what they are compared with.
        taken: the scores that the task computes from the loss.

    Raises:
        UserError: a metric fails, returns something else, or gives a score that another one or the task gives too.
        ValueError: the lists are empty or differ in length.
    """
    if not predictions or len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    scores: dict[str, float] = {}
    origins: dict[str, str] = {}
    for name, metric in metrics.items():
        for key, value in _scores_of(name, metric, predictions, references).items():
            if key in taken:
                raise UserError(
                    f"the metric {name} gives a score called {key}, which the task itself computes from the loss",
                    where=SETTING,
                    remedy="rename the score that your function gives",
                )
            if key in scores:
                raise UserError(
                    f"the metrics {origins[key]} and {name} both give a score called {key}",
                    where=SETTING,
                    remedy="leave out one of them, or rename the score that your own function gives",
                )
            scores[key], origins[key] = value, name
    return scores


def _scores_of(name: str, metric: Metric, predictions: list[Any], references: list[Any]) -> dict[str, float]:
    try:
        result = metric(predictions, references)
    except UserError:
        raise
    except Exception as error:
        # What a built-in metric raises is a sentence for the user already.
        reason = error if name in BUILT_IN_METRICS and isinstance(error, ValueError) else cause(error)
        raise UserError(f"the metric {name} failed: {reason}", where=SETTING, remedy=_remedy(name)) from error
    scores = result if isinstance(result, dict) else {name.rpartition(":")[2]: result}
    return {_checked_key(name, key): _checked_value(name, key, value) for key, value in scores.items()}


def _checked_key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise UserError(f"the metric {name} gives a score called {key!r}", where=SETTING, remedy="return names as text")
    return key


def _checked_value(name: str, key: str, value: Any) -> float:
    """A plain float of a Python or numpy number, or of a tensor with one element."""
    try:
        if isinstance(value, SupportsFloat):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor with several elements
        pass
    raise UserError(
        f"the metric {name} gives {key} = {value!r}, which is no number",
        where=SETTING,
        remedy="return a number, or a dict of numbers by name",
    )


def _remedy(name: str) -> str:
    if name in BUILT_IN_METRICS:
        return "choose a metric that fits what the task predicts"
    return "correct the function; it gets (predictions, references), two lists with one item for each record"
