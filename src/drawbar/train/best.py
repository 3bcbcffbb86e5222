"""Which of two scores is the better one (``eval.mode``): it decides the best checkpoint, and when to stop early."""

from drawbar.config.schema.run_config import EvalSection
from drawbar.errors import UserError
from drawbar.metrics.metric_registry import best_is
from drawbar.runtime.log import logger

_WORDS = {"min": "smallest", "max": "largest"}


def settle_mode(section: EvalSection, begun: str | None) -> EvalSection:
    """The section with ``auto`` resolved to ``min`` or ``max``; unchanged if neither the run nor the metric decides.

    Args:
        begun: the ``eval.mode`` stored in an existing run; None for a new run. Older versions stored ``min`` if
            the user had not set it.
    """
    usual = best_is(section.metric)
    mode = (begun or "auto") if section.mode == "auto" else section.mode
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
    """See that it is known which score is better.

    Raises:
        UserError: the metric is a user's own, and ``eval.mode`` does not say it.
    """
    if section.mode == "auto":
        raise UserError(
            f"nothing says whether a smaller or a larger {section.metric} is better",
            where="eval.mode",
            remedy="set eval.mode=min or eval.mode=max",
        )
