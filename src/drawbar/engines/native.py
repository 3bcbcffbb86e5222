"""One model on every rank, whole or in parts: torch alone, in the order that a step is written on paper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drawbar.checkpoint.save import host_copies
from drawbar.config.schema import RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.data.packing import IGNORED_LABEL
from drawbar.engines.build import build_spread, build_whole
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState, EvalResult, StepResult
from drawbar.errors import ExitCode, UserError
from drawbar.models.heads import longest_input
from drawbar.models.lora import merged, save_adapter, trained_state
from drawbar.models.saving import save_transformers
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.schedules import learning_rate_scale, set_learning_rate
from drawbar.optim.state import check_optimizer_state, load_optimizer_state, optimizer_state
from drawbar.parallel.buffers import share_buffers
from drawbar.parallel.context import ContextParallel, check_context
from drawbar.parallel.ddp import accumulate, replicate
from drawbar.parallel.dp import DataParallel
from drawbar.parallel.fsdp import digest_of_use, free_gathered, generate_together
from drawbar.parallel.gradients import clip_factor, reduce_partial_grads, scale_, squared_norm
from drawbar.parallel.precision import LossScaler, autocast, choose_formats
from drawbar.parallel.styles import sharded_logits
from drawbar.parallel.tensor import Packed
from drawbar.parallel.weights import check_weights, full_tensor, load_shard, shard_like
from drawbar.parallel.zero1 import local_optimizer, zero1_optimizer
from drawbar.runtime.dist import Distributed
from drawbar.runtime.log import logger
from drawbar.runtime.mesh import ParallelDims, build_mesh, replicas
from drawbar.tasks.batch import Ask, Batch
from drawbar.tasks.task import Task

LARGEST_FILE = "5GB"
"""A larger model is exported in several files, so that those who load it need not read all of it to have a part."""


class NativeEngine(Engine):
    """The strategies ``single``, ``dp``, ``ddp``, ``zero1`` and ``fsdp``, with tensor and context parallelism.

    Args:
        task: built, with its tokenizer.
        config: the whole run's, with ``parallel.strategy`` resolved.
        world: the processes of the run, already joined.
        total_steps: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, task: Task, config: RunConfig, world: Distributed, total_steps: int) -> None:
        self.task = task
        self.config = choose_formats(config, world.device)
        self.world = world
        self.total_steps = total_steps
        self.precision = self.config.precision
        self.step = 0
        self.packed: dict[str, Packed] = {}
        self.context: ContextParallel | None = None
        self.replicas: list[dist.ProcessGroup] = []
        """Of ranks that have the same buffers."""
        self.before_update: Callable[[], None] = lambda: None
        """Called in each step that updates, when the gradients are complete, and neither clipped nor used."""
        self.scaler = LossScaler(self.precision)
        self._build(ParallelDims.of(config.parallel, world.size))
        self.positions = longest_input(self.structure)
        self.optimizers = self._build_optimizers()
        world.limit_waiting()  # all process groups are there now

    def _build_optimizers(self) -> list[Optimizer]:
        optimizers = build_optimizers(self.module, self.config.optim)
        sharded = self.config.parallel.strategy == "zero1" and self.world.size > 1
        return [zero1_optimizer(optimizer) for optimizer in optimizers] if sharded else optimizers

    def _build(self, dims: ParallelDims) -> None:
        """Sets ``module``, what this rank has of the model; ``model``, what micro-batches go through: the same, or what
        replicates it; and ``structure``, which has all of the model's parameters, if not their values."""
        task, config, world = self.task, self.config, self.world
        self.is_sharded = config.parallel.strategy == "fsdp"
        if dims.cp > 1:
            check_context(world.device, task.targets)
        is_spread = self.is_sharded or dims.tp * dims.cp > 1
        if is_spread:
            world.join_alone()
            mesh = build_mesh(dims, world.device)
            self.replicas = replicas(mesh)
            module, self.packed, self.base = build_spread(task, config, world, dims, mesh, self.precision)
            if dims.cp > 1:
                self.context = ContextParallel(module, mesh["cp"], IGNORED_LABEL)
            if self.is_sharded:
                generate_together(module)
        else:
            module, self.base = build_whole(task, config, world, world.device, self.precision)
        self.module = self.model = self.structure = module
        if config.parallel.strategy == "dp":
            self.model = DataParallel(module, self.precision, world.device)
        self.loss_of: Callable[[Batch], torch.Tensor] = partial(self._loss, self.model)
        if world.size > 1 and not is_spread:
            self.model = self.loss_of = replicate(module, self._loss)
            self.replicas = [dist.group.WORLD]

    @property
    def checkpoint_bytes(self) -> int:
        sizes = {True: 0, False: 0}
        for parameter in self.structure.parameters():
            sizes[parameter.requires_grad] += parameter.numel() * parameter.element_size()
        # the optimizer keeps up to two more numbers for each trained weight; with LoRA the others are not saved
        return 3 * sizes[True] + (sizes[False] if self.config.lora is None else 0)

    def train_step(self, micro_batches: list[MicroBatch[Batch]]) -> StepResult:
        self.model.train()
        lr = self.config.optim.lr * learning_rate_scale(self.step, self.total_steps, self.config.optim)
        set_learning_rate(self.optimizers, lr)

        # the weight of the whole global batch is known before the first backward, so nothing is rescaled after it
        weight = self.world.data.sum(sum(self.task.weight(micro.batch) for micro in micro_batches if micro.counts))
        divisor = weight or 1.0  # a batch without units has no loss and no gradient
        loss_sum = self._accumulate_gradients(micro_batches, divisor)
        grad_norm, skipped = self._update()
        self.step += 1

        loss = self.world.data.sum_tensor(loss_sum) / divisor
        return StepResult(loss=loss, grad_norm=grad_norm, weight=weight, lr=lr, skipped=skipped)

    def _accumulate_gradients(self, micro_batches: list[MicroBatch[Batch]], divisor: float) -> torch.Tensor:
        """Backward through every micro-batch; the sum of this rank's loss (0-d)."""
        loss_sum = torch.zeros((), device=self.world.device)
        # DDP and FSDP average over the ranks that see different tokens, the contract wants the sum
        scale = self.scaler.scale * self.world.data.size * self.world.dims.cp / divisor
        used = 0
        for index, micro in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            on_device = micro.batch.to(self.world.device)
            with accumulate(self.model, last), self._cut_logits(), self._piece(on_device) as batch:
                with autocast(self.precision, self.world.device):
                    loss = self.loss_of(batch)
                if not micro.counts:
                    loss = loss * 0  # a filler keeps this rank in step with the others, and adds nothing
                (loss * scale).backward()
            loss_sum += loss.detach()
            used = digest_of_use(self.module, used) if self.is_sharded else 0
        if self.is_sharded:
            self._check_same_use(used)
        return loss_sum if self.context is None else self.context.sum(loss_sum)

    def _check_same_use(self, digest: int) -> None:
        """See that all ranks used the same parts of a sharded model.

        Raises:
            UserError: they did not, and the gradients are worth nothing.
        """
        total, squares = self.world.sum_counts([digest >> 8, (digest >> 8) ** 2])  # 24 bits: no sum overflows
        if total**2 != squares * self.world.size:  # they are equal where all numbers are
            raise UserError(
                f"in step {self.step + 1} the ranks used different parts of the model, which fsdp cannot see",
                where="parallel.strategy=fsdp",
                remedy="set parallel.strategy=zero1 or ddp, or let the model use the same parts for every batch",
                exit_code=ExitCode.FAILED,
            )

    def _cut_logits(self) -> AbstractContextManager[None]:
        """Around forward and backward: the logits of tensor-parallel ranks stay cut, where the loss can take them
        so."""
        cut = self.world.dims.tp > 1 and self.task.vocabulary_parallel
        return sharded_logits() if cut else nullcontext()

    @contextmanager
    def _piece(self, batch: Batch) -> Iterator[Batch]:
        """What this rank computes of a batch. Forward and backward belong inside."""
        if self.context is None:
            yield batch
        else:
            with self.context.cut(batch) as piece:
                yield type(batch)(piece, batch.ids)

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        outputs = self.task.forward(model, batch)
        return number(self.task.loss(outputs if self.context is None else self.context.align(outputs), batch))

    def _update(self) -> tuple[torch.Tensor, bool]:
        """Clip once, update, and clear the gradients; the norm before clipping, and whether fp16 overflowed."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        reduce_partial_grads(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grad_norm = (self._squared_norm(parameters).sqrt() / self.scaler.scale).float()
        # asked of all gradients at once: one optimizer, or one rank, must not update without the others
        overflowed = self.scaler.enabled and not bool(torch.isfinite(grad_norm))
        clip = self.config.train.gradient_clip
        if not overflowed:
            self.before_update()
            if clip is not None or self.scaler.enabled:
                factor = clip_factor(grad_norm, clip) if clip is not None else 1.0
                scale_(gradients, factor / self.scaler.scale)
            for optimizer in self.optimizers:
                optimizer.step()
        self.scaler.update(overflowed)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return grad_norm, overflowed

    def share_buffers(self) -> None:
        share_buffers(self.module, self.replicas)

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalResult:
        self.module.eval()
        weight = self.task.weight(batch)
        batch = batch.to(self.world.device)
        with free_gathered(self.module), autocast(self.precision, self.world.device):
            with self._piece(batch) as piece:
                loss = self._loss(self.module, piece)
            predictions = self.task.predict(self.module, batch) if self.task.predicts else None
        if self.context is not None:
            loss = self.context.sum(loss)
        return EvalResult(loss=float(loss), weight=weight, predictions=predictions)

    @torch.no_grad()
    def predict_step(self, batch: Batch, ask: Ask) -> list[Any]:
        self.module.eval()
        with free_gathered(self.module), autocast(self.precision, self.world.device):
            return ask(self.module, batch.to(self.world.device))

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
        with free_gathered(self.module), autocast(self.precision, self.world.device):
            return self.module.generate(**moved, **options)

    def _squared_norm(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """Of the whole model's gradient; 0-d."""
        return squared_norm([p.grad for p in parameters if p.grad is not None], self.world.device)

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.world.note(f"copying {name}")  # which the others may wait for
        return full_tensor(tensor, self.packed.get(name))

    def _saved(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a module: the live tensors."""
        return module.state_dict(keep_vars=True) if self.config.lora is None else trained_state(module)

    def _values(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": self.config.optim.name,
            "precision": self.precision,
            "scaler": self.scaler.state_dict(),
        }

    def _keeps_full_copy(self, writers: Sequence[int]) -> bool:
        """Whether this rank keeps copies of the whole tensors that it takes part in making for ``writers``."""
        return self.world.rank in writers

    def state(self, writers: Sequence[int] = (0,)) -> EngineState:
        self.share_buffers()
        optimizer = self._optimizer_copies(writers)
        return EngineState(model=self._model_copies(writers), optimizer=optimizer, values=self._values())

    def _model_copies(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        return host_copies(self._saved(self.module), self._keeps_full_copy(writers), self._whole)

    def _optimizer_copies(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        optimizer = optimizer_state(self._names(), [local_optimizer(optimizer) for optimizer in self.optimizers])
        if self.config.parallel.strategy == "zero1":
            return self.world.collect(host_copies(optimizer), writers)
        return host_copies(
            optimizer, self._keeps_full_copy(writers), lambda name, t: self._whole(name.rpartition("/")[0], t)
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        live = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        present = {name: gradient for name, gradient in live.items() if gradient is not None}
        return host_copies(
            present, self._keeps_full_copy((0,)), lambda name, t: self._whole(name, t) / self.scaler.scale
        )

    def comparable(self) -> dict[str, nn.Parameter]:
        """What this rank trains, by name: other ranks that hold the same part of it must hold the same values."""
        return dict(self.module.named_parameters())

    def comparable_gradients(self) -> dict[str, torch.Tensor]:
        """The same of their gradients, between backward and update."""
        live = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        return {name: gradient for name, gradient in live.items() if gradient is not None}

    def load(self, state: EngineState) -> None:
        self._check_optimizer(state)
        names = self._names()
        check_optimizer_state({name for p, name in names.items() if p.requires_grad}, state.optimizer)
        self.load_model(state.model)
        parts = [local_optimizer(optimizer) for optimizer in self.optimizers]
        load_optimizer_state(names, parts, state.optimizer, partial(self._place, names))
        self._load_values(state)

    def _check_optimizer(self, state: EngineState) -> None:
        saved = state.values["optimizer"]
        if saved != self.config.optim.name:
            raise UserError(
                f"the checkpoint's optimizer state is that of {saved}, not of {self.config.optim.name}",
                where="optim.name",
                remedy="resume with the optimizer that wrote it, or start from its weights with --fork NEWNAME",
            )

    def _load_values(self, state: EngineState) -> None:
        self.step = state.values["step"]
        self.scaler.load_state_dict(state.values["scaler"])
        if state.values["precision"] != self.precision:
            logger.warning("saved with precision %s, resumed with %s", state.values["precision"], self.precision)

    def _place(
        self, names: Mapping[nn.Parameter, str], parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor], name: str
    ) -> torch.Tensor:
        """A tensor of the optimizer, spread as its parameter is."""
        return shard_like(parameter, tensors, name, self.packed.get(names[parameter]))

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        here = self._saved(self.module)
        check_weights(here, tensors)
        for name, tensor in here.items():
            load_shard(tensor, tensors, name, self.packed.get(name))

    def export(self, folder: Path, base_name: str, merge: bool) -> None:
        if not hasattr(self.module, "save_pretrained"):
            raise UserError(
                f"a {type(self.module).__name__} is no transformers model, and has no format to export to",
                where="RUN",
                remedy="its weights are in the run's checkpoints, as safetensors",
            )
        if self.config.lora is None:
            save_transformers(self.module, folder, LARGEST_FILE)
        elif merge:
            save_transformers(merged(self.module), folder, LARGEST_FILE)
        else:
            save_adapter(self.module, folder, base_name)

    def close(self) -> None:
        self.optimizers.clear()


def number(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a task as a tensor without dimensions; as it is, where it is none with one element."""
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
