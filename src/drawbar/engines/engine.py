"""One optimizer step under any strategy: the interface between the training loop and the parallelism strategies.

The trainer hands over micro-batches and gets a :class:`StepResult`; it never names a strategy. The engine owns the loss
contract: gradients are those of ``sum(loss) / sum(num_targets)`` over the global batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.engines.executors import count_targets
from drawbar.engines.parts import EngineParts
from drawbar.engines.results import EngineState, EvalResult, StepResult, saved_values
from drawbar.errors import UserError
from drawbar.models.heads import longest_input
from drawbar.models.lora import FrozenBaseInfo, saved_tensors
from drawbar.optim.schedules import learning_rate_scale
from drawbar.optim.state import check_optimizer_state
from drawbar.parallel.buffers import copy_buffers, share_buffers
from drawbar.parallel.fsdp import free_gathered
from drawbar.parallel.weights import check_weights
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch, PredictFunction
from drawbar.tasks.task import Task


@final
class Engine:
    """Trains and evaluates a task under the strategy that its parts were built for.

    Args:
        task: the task to train.
        config: the run's configuration, with ``parallel.strategy`` and dtypes resolved.
        world: the processes of the run, already connected.
        parts: from the strategy's builder.
        total_steps: optimizer steps of the whole run, for the schedule; must be set before the first step.
    """

    def __init__(
        self, task: Task, config: RunConfig, world: Distributed, parts: EngineParts, total_steps: int = 0
    ) -> None:
        self.task = task
        self.config = config
        self.world = world
        self.total_steps = total_steps
        self.step = 0
        self.max_positions = longest_input(parts.model.meta_model)
        """Maximum input length, in tokens, that the model has positions for; None if unlimited."""
        self.parts = parts
        self.executor = parts.executor
        self.updater = parts.updater
        self._local = parts.model
        self._state = parts.state
        self.approve: Callable[[torch.Tensor, torch.Tensor], bool] | None = None
        """(loss, gradient norm) of a step, both 0-d → whether to update the weights; the same on every rank. Also asked
        where fp16 overflows because the loss is not finite. Another library's engine (``Strategy.has_engine``) updates
        the weights in any case."""
        world.set_group_timeouts()  # all process groups are there now

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model: all of it, shards, or stages."""
        return self._local.module

    @property
    def base(self) -> FrozenBaseInfo | None:
        """See :class:`LocalModel`; the same on all ranks."""
        return self._local.base

    @property
    def cross_entropy(self) -> str:
        """How the loss is computed: the setting ``task.cross_entropy``, with ``auto`` resolved."""
        return self._local.cross_entropy

    @property
    def meta_model(self) -> nn.Module:
        """The model with all names and full shapes, possibly without values."""
        return self._local.meta_model

    def train_step(self, micro_batches: list[MicroBatch[Batch]], num_targets: float | None = None) -> StepResult:
        """Forward, backward, reduce, clip and update for one global batch.

        Args:
            micro_batches: this rank's share of the global batch.
            num_targets: number of targets in the global batch; if None, the ranks count them together here.
        """
        lr = self.config.optim.lr * learning_rate_scale(self.step, self.total_steps, self.config.optim)
        # count the targets of the global batch before the first backward, so that nothing is rescaled after it
        if num_targets is None:
            num_targets = self.world.dp_ranks.sum_of_leaders(count_targets(self.task, micro_batches))
        divisor = num_targets or 1.0  # a batch without targets has no loss and no gradient
        # executors average over the ranks that see different tokens; the loss contract requires the sum
        scale = self.updater.loss_scale * self.world.dp_ranks.size * self.world.dims.cp / divisor
        restore_buffers = None if self.approve is None else copy_buffers(self.module)
        if self.task.uses_step_mean:
            micro_batches = self._with_step_mean(micro_batches)
        loss_sum = self.executor.forward_backward(micro_batches, scale)
        loss = self.world.dp_ranks.sum_tensor(loss_sum.clone()) / divisor
        self.world.set_activity("optimizer")
        approves = partial(self._approves, loss)
        update = self.updater.step(lr, approves)
        rejected = update.rejected or (update.skipped and not math.isfinite(loss) and not approves(update.grad_norm))
        if rejected and restore_buffers is not None:
            restore_buffers()
        self.step += 1
        skipped = update.skipped and not rejected
        return StepResult(loss, update.grad_norm, num_targets, lr, skipped, rejected, own_loss=loss_sum)

    def _with_step_mean(self, micro_batches: list[MicroBatch[Batch]]) -> list[MicroBatch[Batch]]:
        """The micro-batches with the field ``step_mean``: see ``Task.step_values``. Collective."""
        self.world.set_activity("forward")
        values: list[float] = []
        with self.executor.inference() as model:
            for micro in micro_batches:
                found = self.task.step_values(model, micro.batch.to(self.world.device))
                values += [] if micro.is_padding else found
        total, count = (self.world.dp_ranks.sum_of_leaders(one) for one in (math.fsum(values), len(values)))
        mean = {"step_mean": torch.tensor(total / max(count, 1), dtype=torch.float32)}
        batches = [Batch({**micro.batch, **mean}, micro.batch.ids) for micro in micro_batches]
        return [replace(micro, batch=batch) for micro, batch in zip(micro_batches, batches, strict=True)]

    def _approves(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        return self.approve is None or self.approve(loss, grad_norm)

    def share_buffers(self) -> None:
        """Synchronize the buffers that training changes, before an evaluation; those of pipeline stages are left
        unchanged. Collective."""
        share_buffers(self.module, self._local.replica_groups)

    def check_savable(self) -> None:
        """Raise UserError if a resumed run could not load the model's buffers, or if, after a step, the state of the
        user's optimizer cannot be saved."""
        self._local.check_buffers(self.task)
        if ":" in self.config.optim.name:
            self._state.local_optimizer_boxes()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for evaluation or prediction steps: the weights are their moving averages, if the run keeps
        such, and parameters that FSDP keeps gathered are freed on exit."""
        average = self.parts.average
        with nullcontext() if average is None else average.in_place_of_weights(), free_gathered(self.module):
            yield

    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss and predictions of this rank's batch, without gradients. All ranks must call it equally often."""
        num_targets = self.task.num_targets(batch)
        loss, predictions = self.executor.evaluate(batch)
        return EvalResult(loss=loss, num_targets=num_targets, predictions=predictions)

    def predict_step(self, batch: Batch, predict_fn: PredictFunction) -> list[Any]:
        """The result of ``predict_fn`` (such as predictions) for this rank's batch. Labels are not needed."""
        with self.executor.inference() as model:
            return predict_fn(model, batch.to(self.world.device))

    def check_writes_text(self) -> None:
        """Raise UserError if the model has no ``generate``."""
        with self.executor.inference() as model:
            if not hasattr(model, "generate"):
                raise UserError(
                    f"{type(model).__name__} cannot generate text: it has no generate()",
                    where="RUN",
                    remedy="name the run of a language model; `drawbar eval` works for any",
                )

    def inference(self) -> AbstractContextManager[Any]:
        """Context manager that yields the model for predicting and generating: in evaluation mode, without
        gradients."""
        return self.executor.inference()

    def state(self) -> EngineState:
        """A copy of the full state, in host memory on rank 0; without tensors on other ranks. Collective."""
        self.share_buffers()
        optimizer = self._state.optimizer()
        values = saved_values(self.step, self.config, self.updater.scaler_state())
        return EngineState(model=self._state.model(), optimizer=optimizer, values=values)

    def load(self, state: EngineState) -> None:
        """Load a state saved under any strategy and world size. Raises ``UserError`` for another model or optimizer."""
        saved = state.values["optimizer"]
        if saved != self.config.optim.name:
            raise UserError(
                f"the checkpoint's optimizer state is that of {saved}, not of {self.config.optim.name}",
                where="optim.name",
                remedy="resume with the optimizer that wrote it, or start from its weights with --fork NEWNAME",
            )
        trained = {name for name, parameter in self._local.meta_model.named_parameters() if parameter.requires_grad}
        check_optimizer_state(trained, state.optimizer, saved)
        self.load_model(state.model)
        self._state.load_optimizer(state.optimizer)
        self.step = state.values["step"]
        self.updater.load_scaler_state(state.values["scaler"])
        if state.values["precision"] != self.config.precision:
            logger.warning("saved with precision %s, resumed with %s", state.values["precision"], self.config.precision)

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load only the weights, for evaluation, generation and forks. Raises ``UserError`` for another model."""
        check_weights(saved_tensors(self._local.meta_model, self.config), tensors)
        self._state.load_model(tensors)

    def close(self) -> None:
        """Free the engine's resources."""
        self.updater.close()

    # for parity, between backward and update

    @contextmanager
    def inspecting(self, inspect: Callable[[], None]) -> Iterator[None]:
        """Call ``inspect()`` in each step within this context, when gradients are reduced but not yet clipped or used.
        With torch's updater, ``inspect`` is not called in skipped steps."""
        kept = self.approve

        def inspect_first(loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
            inspect()
            return kept is None or kept(loss, grad_norm)

        self.approve = inspect_first
        try:
            yield
        finally:
            self.approve = kept

    def gradients(self) -> dict[str, torch.Tensor]:
        """The full gradients by parameter name, before clipping, in host memory on rank 0; empty on other ranks.
        Collective, between backward and update."""
        return self._state.gradients()

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        """See :class:`StateAccess`."""
        return self._state.equal_on_replicas()

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        """See :class:`StateAccess`."""
        return self._state.gradients_equal_on_replicas()
