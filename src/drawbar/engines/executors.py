"""Executors run micro-batches through a model: one rank's full or sharded model, or a pipeline of stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.engines.device_copies import DeviceCopies
from drawbar.engines.loss_choice import is_for_head, maybe_with_targets
from drawbar.errors import UserError
from drawbar.parallel.buffers import kept_buffers
from drawbar.parallel.compile import uncompiled_blocks
from drawbar.parallel.context import ContextParallel
from drawbar.parallel.fsdp import free_gathered
from drawbar.parallel.gradients import sum_dtype
from drawbar.parallel.pipeline.inference import PipelineInference
from drawbar.parallel.pipeline.schedule import Inputs, Loss
from drawbar.parallel.precision import autocast, cast_weights_once
from drawbar.parallel.styles import sharded_logits
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import method_error
from drawbar.tasks.task import Task


@dataclass(frozen=True)
class TrainingForward:
    """The module that training forwards call (the model, or its DDP or DeepSpeed wrapper), its loss and backward."""

    module: nn.Module
    loss: Callable[[Batch], torch.Tensor]
    """The sum of a batch's loss (0-d)."""
    synchronizing: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()
    """Context manager for forward and backward of one micro-batch. Its argument is whether this is the last one of the
    step, whose backward reduces the gradients over the replicas."""
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward


class ModelExecutor:
    """Runs micro-batches one by one through this rank's model.

    Args:
        module: this rank's part of the model, for evaluation.
        training_forward: the same for training, with its loss and backward.
        context: context parallelism, if ranks share sequences; else None.
        shards_logits: whether the loss takes logits whose vocabulary is sharded over the tensor-parallel ranks.
        loss_in_head: whether the model computes the loss itself, from targets in the batch.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        training_forward: TrainingForward,
        world: Distributed,
        precision: str,
        context: ContextParallel | None = None,
        shards_logits: bool = False,
        loss_in_head: bool = False,
    ) -> None:
        self.task = task
        self.module = module
        self.training_forward = training_forward
        self.device = world.device
        self.set_activity = world.set_activity
        self.device_copies = DeviceCopies(world.device)
        self.precision = precision
        self.context = context
        self.shards_logits = shards_logits
        self.loss_in_head = loss_in_head

    def forward_backward(self, micro_batches: list[MicroBatch[Batch]], scale: float) -> torch.Tensor:
        self.training_forward.module.train()
        loss_sum = torch.zeros((), device=self.device)
        # before the batches are copied: reading values on a GPU would make the host wait
        ready = [replace(micro, batch=self._for_loss(micro.batch)) for micro in micro_batches]
        batches = self.device_copies.of(ready)
        with cast_weights_once(self.module, self.precision, self.device):
            for index, batch in enumerate(batches):
                micro, last = micro_batches[index], index == len(micro_batches) - 1
                loss_sum += self._forward_backward(batch, micro, scale, last)
        return loss_sum if self.context is None else self.context.sum(loss_sum)

    def _forward_backward(self, batch: Batch, micro: MicroBatch[Batch], scale: float, last: bool) -> torch.Tensor:
        with (
            self.training_forward.synchronizing(last),
            maybe_sharded_logits(self.shards_logits),
            self._sharing_sequences(),
        ):
            self.set_activity("forward")
            with autocast(self.precision, self.device):
                loss = checked_loss(self.task, self.training_forward.loss(batch))
            loss = zero_if_padding(loss, micro)
            self.set_activity("backward")
            self.training_forward.backward(loss * scale)
        return loss.detach()

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, list[Any] | None]:
        given = self._for_loss(batch).to(self.device)  # in this order, as for training
        with self.inference() as model:
            with self._sharing_sequences():
                loss = task_loss(self.task, self.context, model, given)
            predictions = self.task.predict(model, batch.to(self.device)) if self.task.predicts else None
        if self.context is not None:
            loss = self.context.sum(loss)
        return as_one_number(loss, self.device), predictions

    def has_gradient(self, batch: Batch, training: bool) -> bool:
        self.module.train(training)
        with (
            free_gathered(self.module),
            kept_buffers(self.module),
            uncompiled_blocks(),
            autocast(self.precision, self.device),
            maybe_sharded_logits(self.shards_logits),
            self._sharing_sequences(),
        ):
            return requires_grad(task_loss(self.task, self.context, self.module, self._for_loss(batch)))

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        with evaluating(self.module, self.precision, self.device):
            yield self.module

    def _for_loss(self, batch: Batch) -> Batch:
        """The batch (or this rank's piece of its sequences), with targets added if the head computes the loss."""
        piece = batch if self.context is None else type(batch)(self.context.cut(batch), batch.ids)
        return maybe_with_targets(self.task, piece, self.loss_in_head)

    def _sharing_sequences(self) -> AbstractContextManager[None]:
        """Context manager for forward and backward: ranks that hold pieces of sequences attend to whole sequences."""
        return nullcontext() if self.context is None else self.context.ring()


class TrainingPipeline(Protocol):
    """Runs training steps through the stages of a pipeline: ``Pipeline`` (torch) or ``DeepSpeedPipeline``."""

    def run(self, inputs: Sequence[Inputs], loss: Loss) -> None:
        """Run forward and backward of all micro-batches; gradients accumulate in the parameters."""


class PipelineExecutor:
    """Runs micro-batches through the stages of a pipeline. All its ranks get the same batches, and must call each
    method equally often; the last stage has the loss.

    Args:
        stages: the stages of this rank.
        training_module: the same modules, or the DeepSpeed engine around them; only its ``train()`` is called.
        pipeline: runs forward and backward of a step's micro-batches through the stages.
        pipeline_inference: the stages run in turn, for evaluation and generation; in training, it records the inputs of
            a forward.
        shards_logits, loss_in_head: as for ``ModelExecutor``.
    """

    def __init__(
        self,
        task: Task,
        stages: nn.Module,
        training_module: nn.Module,
        pipeline: TrainingPipeline,
        pipeline_inference: PipelineInference,
        world: Distributed,
        precision: str,
        shards_logits: bool,
        loss_in_head: bool,
    ) -> None:
        self.task = task
        self.stages = stages
        self.training_module = training_module
        self.pipeline = pipeline
        self.pipeline_inference = pipeline_inference
        self.device = world.device
        self.set_activity = world.set_activity
        self.device_copies = DeviceCopies(world.device)
        self.precision = precision
        self.shards_logits = shards_logits
        self.loss_in_head = loss_in_head

    def forward_backward(self, micro_batches: list[MicroBatch[Batch]], scale: float) -> torch.Tensor:
        self.set_activity("forward and backward")
        self.training_module.train()
        batches = list(self.device_copies.of(with_targets(self.task, micro_batches, self.loss_in_head)))
        forwards = [self._forward(batch) for batch in batches]
        loss_sum = torch.zeros((), device=self.device)

        def compute_loss(out: torch.Tensor, index: int) -> torch.Tensor:
            loss = checked_loss(self.task, scalar(self._loss(forwards[index], out, batches[index])))
            loss = zero_if_padding(loss, micro_batches[index])
            loss_sum.add_(loss.detach())
            return loss * scale

        inputs = [self.pipeline_inference.record_inputs(forward) for forward in forwards]
        casts = cast_weights_once(self.stages, self.precision, self.device)
        with casts, maybe_sharded_logits(self.shards_logits):
            self.pipeline.run(inputs, compute_loss)
        return loss_sum

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, list[Any] | None]:
        given = maybe_with_targets(self.task, batch, self.loss_in_head).to(self.device)
        forward = self._forward(given)
        with self._evaluating():
            out = self.pipeline_inference.last_stage_output(self.pipeline_inference.record_inputs(forward))
            loss = as_one_number(0.0 if out is None else self._loss(forward, out, given), self.device)
            predictions = None
            if self.task.predicts:
                with self.pipeline_inference.synced_rng():
                    predictions = self.task.predict(self.pipeline_inference.model, batch.to(self.device))
        return loss, predictions

    def has_gradient(self, batch: Batch, training: bool) -> bool:
        # only checks whether the loss depends on the logits: the stages run none of the task's methods, so the logits
        # always depend on the weights
        given = maybe_with_targets(self.task, batch, self.loss_in_head)
        forward = self._forward(given)
        with self._evaluating():
            out = self.pipeline_inference.last_stage_output(self.pipeline_inference.record_inputs(forward))
            if out is None or is_for_head(given):
                return True
            with torch.enable_grad():
                return requires_grad(self._loss(forward, out.detach().requires_grad_(), given))

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        with self._evaluating(), self.pipeline_inference.synced_rng():
            yield self.pipeline_inference.model

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.pipeline_inference.model.eval()
        with evaluating(self.stages, self.precision, self.device):
            yield

    def _forward(self, batch: Batch) -> Callable[[nn.Module], Any]:
        return lambda model: self.task.forward(model, batch)

    def _loss(self, forward: Callable[[nn.Module], Any], out: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss, from the last stage's output: logits, or the loss itself."""
        if is_for_head(batch):
            return out
        return self.task.loss(self.pipeline_inference.replay_outputs(forward, out), batch)


def with_targets(task: Task, micro_batches: Sequence[MicroBatch[Batch]], loss_in_head: bool) -> list[MicroBatch[Batch]]:
    """The micro-batches, with the targets for the model's ``LossHead`` if it has one."""
    return [replace(micro, batch=maybe_with_targets(task, micro.batch, loss_in_head)) for micro in micro_batches]


def count_targets(task: Task, micro_batches: Sequence[MicroBatch[Batch]]) -> float:
    """Number of targets in this rank's share of a global batch."""
    return sum(task.num_targets(micro.batch) for micro in micro_batches if not micro.is_padding)


def task_loss(task: Task, context: ContextParallel | None, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The summed loss of a batch (0-d), from the task's ``forward`` and ``loss``."""
    outputs = task.forward(model, batch)
    if is_for_head(batch):
        loss: torch.Tensor = outputs.loss
        return loss
    return scalar(task.loss(outputs if context is None else context.align(outputs), batch))


def scalar(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a task as a tensor without dimensions; anything else is returned unchanged."""
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss


class NotOneNumber(TypeError):
    """A task's loss is not a tensor with one element."""


def as_one_number(loss: Any, device: torch.device) -> torch.Tensor:
    """The loss as a separate 0-d tensor, without synchronizing with the device. Raises NotOneNumber."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
        # a copy, as it may be a view of all logits, which are no longer needed
        return loss.detach().reshape(()).to(device, sum_dtype(device), copy=True)
    try:
        return torch.tensor(float(loss), dtype=sum_dtype(device), device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotOneNumber(str(error)) from error


def requires_grad(loss: Any) -> bool:
    """Whether a loss requires grad, so that backward can run."""
    return isinstance(loss, torch.Tensor) and loss.requires_grad


def checked_loss(task: Task, loss: Any) -> torch.Tensor:
    """The loss of a training forward. Raises ``UserError`` if backward cannot start from it."""
    if isinstance(loss, torch.Tensor) and loss.ndim:
        raise not_one_number(task, f"a tensor of shape {tuple(loss.shape)}")
    if not requires_grad(loss):
        raise no_gradient(task)
    checked: torch.Tensor = loss
    return checked


def not_one_number(task: Task, found: object) -> UserError:
    """The error for a loss that is not a single number."""
    remedy = 'return a tensor with one element: the sum over the batch (reduction="sum")'
    return method_error(task, "loss", f"does not return a number: {found}", remedy)


def no_gradient(task: Task) -> UserError:
    """The error for a loss without a gradient."""
    return method_error(
        task,
        "loss",
        "returns a loss without a gradient, so the model cannot learn from it",
        "return a tensor that torch computes from the model's outputs: on the way to it, loss and forward must not use "
        ".item(), float(), .detach(), .data, .numpy(), argmax or torch.no_grad()",
    )


def zero_if_padding(loss: torch.Tensor, micro: MicroBatch[Batch]) -> torch.Tensor:
    """The loss, or zero for a padding micro-batch, which only keeps this rank in step with the others."""
    return loss if not micro.is_padding else loss * 0


def maybe_sharded_logits(shards_logits: bool) -> AbstractContextManager[None]:
    """Context manager for forward and backward: keeps logits of tensor-parallel ranks sharded if supported."""
    return sharded_logits() if shards_logits else nullcontext()


@contextmanager
def evaluating(module: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Context manager for forwards without gradients, in evaluation mode."""
    module.eval()
    with torch.no_grad(), free_gathered(module), autocast(precision, device):
        yield
