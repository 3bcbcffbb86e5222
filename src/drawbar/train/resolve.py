"""Resolves the requested configuration to what is trained: each ``auto`` that depends on neither data nor model, and
the original choices that a resumed run keeps.

Two settings remain open: the columns to read (``build_task``), and whether rows need padding (``choose_padding_free``,
``with_rows_alone``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.checkpoint.format import RESOLVED
from drawbar.checkpoint.read import read_state
from drawbar.config.schema.run_config import EvalSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.build import check_machine
from drawbar.metrics.metric_registry import best_is
from drawbar.parallel.precision import choose_precision
from drawbar.runtime.log import logger
from drawbar.train.rundir import RunStart, without_data_rebuild

_WORDS = {"min": "smallest", "max": "largest"}


@dataclass(frozen=True)
class ResolvedConfig:
    """The two configurations of a run."""

    written: RunConfig
    """For ``config.yaml``: as requested, so ``auto`` stays ``auto``."""
    trained: RunConfig
    """The configuration that this process trains."""


def resolve(config: RunConfig, start: RunStart, world: Distributed) -> ResolvedConfig:
    """Resolve a configuration for the start of a run, on the devices and processes of ``world``. Collective.

    Raises:
        UserError: settings do not combine here, a compiler or a library is missing, or the checkpoint of the start is
            damaged.
    """
    config = config.model_copy(update={"eval": resolve_mode(config.eval, start.eval_mode)})
    trained = config
    if config.data.rebuild and world.from_rank0((config.run_dir / "config.yaml").exists, "looking for the run"):
        logger.info("data.rebuild is ignored, as the run exists already; `drawbar prepare` encodes its data again")
        trained = without_data_rebuild(config)
    if start.checkpoint is not None and not start.forked:
        trained = _with_original_choices(trained, start.checkpoint, world)
    return ResolvedConfig(config, check_machine(trained, world))


def resolve_mode(section: EvalSection, stored_mode: str | None) -> EvalSection:
    """The section with ``eval.mode: auto`` resolved to ``min`` or ``max``; unchanged if neither the run nor the metric
    determines it.

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


def _with_original_choices(config: RunConfig, checkpoint: Path, world: Distributed) -> RunConfig:
    """The configuration with the run's original choices in place of ``auto``: its dtypes and, if it started with them,
    plain cross-entropy and padding, so that a newer drawbar does not change how an older run computes. A run that
    started with a loss in the head, or without padding, stays at ``auto`` and keeps it if device and strategy allow it.
    """
    state = world.from_rank0(lambda: read_state(checkpoint), f"reading {checkpoint}")
    before = state[RESOLVED]
    muon = config.optim.muon_precision
    padded = config.data.padding_free == "auto" and not before["padding_free"]
    begun = config.model_copy(
        update={
            "precision": before["precision"] if config.precision == "auto" else config.precision,
            "optim": config.optim.model_copy(
                update={"muon_precision": before["muon_precision"]} if muon == "auto" else {}
            ),
            "data": config.data.model_copy(update={"padding_free": False} if padded else {}),
        }
    )
    begun = with_cross_entropy_of(begun, state)
    fastest = choose_precision(config.precision, world.device)
    if begun.precision != fastest:
        logger.warning("precision: %s, as the run began; here %s would be faster", begun.precision, fastest)
    return begun


def with_cross_entropy_of(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """The configuration with ``task.cross_entropy: plain`` in place of ``auto`` if a checkpoint's run was plain:
    other implementations add up the same loss in another order.

    Args:
        state: the checkpoint's state.
    """
    begun = state[RESOLVED]["cross_entropy"]
    if begun != "plain" or getattr(config.task, "cross_entropy", None) != "auto":
        return config
    return config.model_copy(update={"task": config.task.model_copy(update={"cross_entropy": "plain"})})
