"""How a run computes its cross-entropy: from the logits of all positions, or in the model's head (``LossHead``)."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError
from drawbar.models.loss_head import (
    LABELS,
    POSITIONS,
    CrossEntropy,
    LogitOps,
    UnknownHead,
    give_loss_head,
    liger_cross_entropy,
    ops_after_head,
)
from drawbar.parallel.chunked_loss import LossTargets, chunked_cross_entropy
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task


def choose_cross_entropy(task: Task, config: RunConfig, model: nn.Module, modules: Sequence[nn.Module]) -> str:
    """Resolve ``task.cross_entropy``, and if the result is not ``plain``, give the model a head that computes the loss.

    Args:
        model: the full model.
        modules: this rank's part of the model: ``model`` itself, or pipeline stages.

    Returns:
        ``plain``, ``chunked`` or ``liger``.

    Raises:
        UserError: the setting is not supported for this run.
    """
    wanted: str = getattr(config.task, "cross_entropy", "plain")
    if wanted == "plain":
        return wanted
    try:
        ops = _find_logit_ops(task, config, model)
    except UnknownHead as reason:
        if wanted == "auto":
            logger.info("the loss is computed from all logits: %s", reason)
            return "plain"
        raise UserError(
            f"the loss cannot be computed in the head: {reason}",
            where="task.cross_entropy",
            remedy="set task.cross_entropy=auto or plain",
        ) from reason
    assert isinstance(task, PretrainedTask), "other tasks have no LossHead"
    chosen: CrossEntropy = partial(chunked_cross_entropy, compiled=config.parallel.compile, terms=task.loss_terms)
    if wanted == "liger":
        chosen = liger_cross_entropy(ops, task.loss_terms)
    for module in modules:
        give_loss_head(module, chosen, ops)
    return "liger" if wanted == "liger" else "chunked"


def _find_logit_ops(task: Task, config: RunConfig, model: nn.Module) -> LogitOps:
    """The operators that the model applies to its logits. Raises UnknownHead, with the reason, if its head cannot
    compute the loss."""
    parallel = config.parallel
    # a user-defined forward or loss may use the logits; `vocabulary_parallel` is false for such tasks
    if not isinstance(task, PretrainedTask) or not task.vocabulary_parallel:
        raise UnknownHead(f"{type(task).__name__} defines its own forward or loss")
    if parallel.features.many_devices:
        raise UnknownHead("the strategy splits batches by rows over its devices, and cannot split a head's targets")
    if parallel.features.has_engine and parallel.tensor > 1:
        raise UnknownHead(f"the tensor parallelism of {parallel.strategy} uses its own heads")
    ops = ops_after_head(model)
    if ops.has_buffers and parallel.tensor > 1:
        raise UnknownHead("the model adds a bias for each token to its logits, and ranks share the vocabulary")
    return ops


def maybe_with_targets(task: Task, batch: Batch, loss_in_head: bool) -> Batch:
    """The batch, with the targets for the model's ``LossHead`` if it has one."""
    if not loss_in_head or is_for_head(batch):
        return batch
    assert isinstance(task, PretrainedTask), "other tasks have no LossHead"
    positions_N, labels_BL = LossTargets.of(task.position_labels(batch), IGNORED_LABEL)
    return type(batch)({**batch, POSITIONS: positions_N, LABELS: labels_BL}, batch.ids)


def is_for_head(batch: Batch) -> bool:
    """Whether the batch has targets for the head, so that the model returns the loss."""
    return POSITIONS in batch
