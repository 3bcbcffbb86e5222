"""``eval.mode``: whether a smaller or a larger score is better, for the best checkpoint and for early stopping."""

from drawbar.config.schema.run_config import EvalSection
from drawbar.errors import UserError
from drawbar.metrics.metric_registry import best_is
from drawbar.runtime.log import logger

_WORDS = {"min": "smallest", "max": "largest"}


def resolve_mode(section: EvalSection, stored_mode: str | None) -> EvalSection:
    """The section with ``auto`` resolved to ``min`` or ``max``; unchanged if neither the run nor the metric decides.

    Args:
        stored_mode: the ``eval.mode`` stored in an existing run; None for a new run.
    """
    usual = best_is(section.metric)
    mode = (stored_mode or "auto") if section.mode == "auto" else section.mode
    if mode == "auto":
        mode = usual or "auto"
    if usual is not None and mode != usual:
        logger.warning(
            "eval.mode is %s: the checkpoint with the %s %s is kept as the best one, which is the worst; without "
            "eval.mode a new run, or a fork of this one, keeps the %s",
            *(mode, _WORDS[mode], section.metric, _WORDS[usual]),
        )
    return section.model_copy(update={"mode": mode})


def check_mode(section: EvalSection) -> None:
    """Refuse a configuration whose ``eval.mode`` is still undecided.

    Raises:
        UserError: the metric is a user's own, and ``eval.mode`` does not say it.
    """
    if section.mode == "auto":
        raise UserError(
            f"nothing says whether a smaller or a larger {section.metric} is better",
            where="eval.mode",
            remedy="set eval.mode=min or eval.mode=max",
        )
