"""One process, or the model replicated on every rank: torch alone, in the order that a step is written on paper."""

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drawbar.config.schema import RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.engines.engine import Engine, EngineState, EvalResult, StepResult
from drawbar.errors import UserError
from drawbar.models.lora import add_adapters, load_trained_state, merged, save_adapter, trained_state
from drawbar.models.packed import allow_packing
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.schedules import learning_rate_scale, set_learning_rate
from drawbar.optim.state import load_optimizer_state, optimizer_state
from drawbar.parallel.ddp import accumulate, replicate
from drawbar.parallel.precision import autocast, choose_precision, make_scaler
from drawbar.runtime.dist import World
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task


class NativeEngine(Engine):
    """The strategies ``single`` and ``ddp``.

    Args:
        task: built, with its tokenizer.
        config: the whole run's.
        world: the processes of the run, already joined.
        total_steps: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, task: Task, config: RunConfig, world: World, total_steps: int) -> None:
        self.task = task
        self.config = config
        self.world = world
        self.total_steps = total_steps
        self.precision = choose_precision(config.precision, world.device)
        self.step = 0
        self.module = self._build().to(world.device)
        self.model = replicate(self.module, world.device) if world.size > 1 else self.module
        self.optimizers = build_optimizers(self.module, config.optim)
        self.scaler = make_scaler(self.precision, world.device)

    def _build(self) -> nn.Module:
        """The task's model, on the CPU, so that it starts from the same random numbers on every device."""
        model = self.task.build_model()
        if self.config.lora is not None:
            model = add_adapters(model, self.config.lora)
        if self.config.data.batching == "packed" and isinstance(model, PreTrainedModel):
            allow_packing(model, per_sample=self.task.targets == "sample")
        return model

    @property
    def checkpoint_bytes(self) -> int:
        trained = sum(parameter.nbytes for parameter in self.module.parameters() if parameter.requires_grad)
        frozen = sum(parameter.nbytes for parameter in self.module.parameters() if not parameter.requires_grad)
        # the optimizer keeps up to two more numbers for each trained weight; with LoRA the others are not saved
        return 3 * trained + (frozen if self.config.lora is None else 0)

    def train_step(self, micro_batches: list[MicroBatch[Batch]]) -> StepResult:
        self.model.train()
        lr = self.config.optim.lr * learning_rate_scale(self.step, self.total_steps, self.config.optim)
        set_learning_rate(self.optimizers, lr)

        # the weight of the whole global batch is known before the first backward, so nothing is rescaled after it
        weight = self.world.sum(sum(self.task.weight(micro.batch) for micro in micro_batches if micro.counts))
        divisor = weight or 1.0  # a batch without units has no loss and no gradient
        loss_sum = self._accumulate_gradients(micro_batches, divisor)
        grad_norm, skipped = self._update()
        self.step += 1

        loss = self.world.sum_tensor(loss_sum) / divisor
        return StepResult(loss=loss, grad_norm=grad_norm, weight=weight, lr=lr, skipped=skipped)

    def _accumulate_gradients(self, micro_batches: list[MicroBatch[Batch]], divisor: float) -> torch.Tensor:
        """Backward through every micro-batch; the sum of this rank's loss (0-d)."""
        loss_sum = torch.zeros((), device=self.world.device)
        scale = self.world.size / divisor  # DDP averages over ranks, the contract wants the sum
        for index, micro in enumerate(micro_batches):
            batch = micro.batch.to(self.world.device)
            with accumulate(self.model, last=index == len(micro_batches) - 1):
                with autocast(self.precision, self.world.device):
                    loss = self.task.loss(self.task.forward(self.model, batch), batch)
                if not micro.counts:
                    loss = loss * 0  # a filler keeps this rank in step with the others, and adds nothing
                self.scaler.scale(loss * scale).backward()
            loss_sum += loss.detach()
        return loss_sum

    def _update(self) -> tuple[torch.Tensor, bool]:
        """Clip once, update, and clear the gradients; the norm before clipping, and whether fp16 overflowed."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.config.train.gradient_clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.train.gradient_clip, grad_norm)
        # asked once for all: the scaler by itself would leave out one optimizer and update with the other
        overflowed = self.scaler.is_enabled() and not bool(torch.isfinite(grad_norm))
        if not overflowed:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return grad_norm, overflowed

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalResult:
        self.module.eval()
        weight = self.task.weight(batch)
        batch = batch.to(self.world.device)
        with autocast(self.precision, self.world.device):
            loss = self.task.loss(self.task.forward(self.module, batch), batch)
            predictions = self.task.predict(self.module, batch) if self.task.predicts else None
        return EvalResult(loss=float(loss), weight=weight, predictions=predictions)

    @torch.no_grad()
    def predict_step(self, batch: Batch) -> list[Any]:
        self.module.eval()
        with autocast(self.precision, self.world.device):
            return self.task.predict(self.module, batch.to(self.world.device))

    @torch.no_grad()
    def generate(self, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        if not hasattr(self.module, "generate"):
            raise UserError(
                f"a {type(self.module).__name__} writes no text: it has no generate()",
                where="RUN",
                remedy="name the run of a language model; `drawbar eval` works for any",
            )
        self.module.eval()
        moved = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with autocast(self.precision, self.world.device):
            return self.module.generate(**moved, **options)

    def state(self) -> EngineState:
        return EngineState(
            model=self.module.state_dict() if self.config.lora is None else trained_state(self.module),
            optimizer=optimizer_state(self.module, self.optimizers),
            values={
                "step": self.step,
                "optimizer": self.config.optim.name,
                "precision": self.precision,
                "scaler": self.scaler.state_dict(),
            },
        )

    def load(self, state: EngineState) -> None:
        saved = state.values["optimizer"]
        if saved != self.config.optim.name:
            raise UserError(
                f"the checkpoint's optimizer state is that of {saved}, not of {self.config.optim.name}",
                where="optim.name",
                remedy="resume with the optimizer that wrote it, or start from its weights with --fork NEWNAME",
            )
        self.load_model(state.model)
        load_optimizer_state(self.module, self.optimizers, state.optimizer)
        self.step = state.values["step"]
        if self.scaler.is_enabled() and state.values["scaler"]:
            self.scaler.load_state_dict(state.values["scaler"])
        if state.values["precision"] != self.precision:
            logger.warning("saved with precision %s, resumed with %s", state.values["precision"], self.precision)

    def load_model(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.config.lora is not None:
            load_trained_state(self.module, tensors)
            return
        try:
            self.module.load_state_dict(tensors)
        except RuntimeError as error:
            lines = [textwrap.shorten(line, 200, placeholder=" …") for line in str(error).splitlines()[1:]]
            rest = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
            raise UserError(
                "\n  ".join(["the checkpoint does not fit this model:", *lines[:3], *rest]),
                remedy="use the task and model settings that it was written with",
            ) from error

    def export(self, folder: Path, base_name: str, merge: bool) -> None:
        if not hasattr(self.module, "save_pretrained"):
            raise UserError(
                f"a {type(self.module).__name__} is no transformers model, and has no format to export to",
                where="RUN",
                remedy="its weights are in the run's checkpoints, as safetensors",
            )
        if self.config.lora is None:
            self.module.save_pretrained(folder)
        elif merge:
            merged(self.module).save_pretrained(folder)
        else:
            save_adapter(self.module, folder, base_name)

    def close(self) -> None:
        self.optimizers.clear()
