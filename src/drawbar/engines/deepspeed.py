"""DeepSpeed's engine behind the same seam: ZeRO stages 0 to 3, offloading, and its tensor parallelism (AutoTP)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drawbar.config.deepspeed import zero_stage
from drawbar.config.deepspeed_json import deepspeed_json
from drawbar.data.loader import MicroBatch
from drawbar.engines.build import build_structure, build_whole, pack, with_adapters
from drawbar.engines.native import NativeEngine
from drawbar.engines.results import EngineState
from drawbar.errors import UserError
from drawbar.models.plans import plan_for
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.state import check_optimizer_state
from drawbar.parallel.apply import parallelize
from drawbar.parallel.deepspeed_state import STEP, Masters, cut, gathered, import_deepspeed, is_cut, start
from drawbar.parallel.precision import LossScaler, autocast
from drawbar.parallel.weights import check_weights, materialize, named_tensors, sent_from_first, without_room
from drawbar.runtime.log import logger
from drawbar.runtime.mesh import ParallelDims
from drawbar.tasks.batch import Batch

_HOST = torch.device("cpu")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedEngine(NativeEngine):
    """The strategy ``deepspeed``. DeepSpeed casts, cuts, reduces, clips and updates; optimizer, schedule, loss and
    checkpoints are those of every other strategy.

    Raises:
        UserError: DeepSpeed is missing, or refuses the run.
    """

    def _build(self, dims: ParallelDims) -> None:
        task, config, world = self.task, self.config, self.world
        import_deepspeed(world.device)
        world.join_alone()
        self.replicas = [dist.group.WORLD]
        self.scaler = LossScaler("fp32")  # DeepSpeed scales by itself
        self.stage = zero_stage(config)
        if self.stage < 3:
            self.module, self.base = build_whole(task, config, world, _HOST, self.precision)
            self.weights: Mapping[str, torch.Tensor] | nn.Module | None = {}
            if self.precision != "fp32":  # DeepSpeed copies its fp32 weights from those that it has cast
                self.weights = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        else:
            self.module, self.weights, self.base = build_structure(task, config, world)
            pack(self.module, task, config)
            parallelize(self.module, plan_for(self.module), config.parallel, ParallelDims(), None, self.precision)
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(_DTYPES[self.precision])
            materialize(self.module, _HOST, _HOST, without_room)
        # after the model, whose first weights must be those of any other strategy
        self.structure = with_adapters(task.build_structure(), config, self.base)

    def _build_optimizers(self) -> list[Optimizer]:
        optimizers = build_optimizers(self.module, self.config.optim)
        assert len(optimizers) == 1, "a rule refuses muon"
        found = deepspeed_json(self.config, self.world.size, self.precision)
        for note in found.notes:
            logger.warning("deepspeed: %s", note)
        self.model = start(self.module, optimizers[0], found.values, self.world.device, in_pieces=self.stage == 3)
        self.module = self.model.module
        self._check_cuts()
        self.masters = Masters.of(self.model)
        self._set_first_weights()
        if self.stage == 3 and hasattr(self.module, "generate"):
            # a rank whose texts have ended must go on taking part in the others' forwards
            self.module.generate = partial(self.module.generate, synced_gpus=True)
        return [self.model.optimizer]

    def _check_cuts(self) -> None:
        """AutoTP cuts the position biases of T5, and does not know how to put them together, or to reduce them."""
        if self.config.parallel.tensor == 1:
            return
        whole = dict(self.structure.named_parameters())
        for name, parameter in self.module.named_parameters():
            if parameter.shape != whole[name].shape and not is_cut(parameter):
                raise UserError(
                    f"DeepSpeed's tensor parallelism does not know a {type(self.structure).__name__}: "
                    f"it leaves {name} in parts",
                    where="parallel.strategy=deepspeed, parallel.tensor",
                    remedy=f"set parallel.strategy=fsdp with parallel.tensor={self.config.parallel.tensor}, "
                    "or parallel.tensor=1",
                )

    def _set_first_weights(self) -> None:
        """Those that the model, whole or in pieces, does not have yet."""
        source, self.weights = self.weights, None
        here = named_tensors(self.module)
        if isinstance(source, Mapping):
            self._set_weights({name: here[name] for name in source}, source)
            return
        for name, full in sent_from_first(source, self.world.device):
            self._set_weights({name: here[name]}, {name: full})

    def _cut_logits(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _accumulate_gradients(self, micro_batches: list[MicroBatch[Batch]], divisor: float) -> torch.Tensor:
        loss_sum = torch.zeros((), device=self.world.device)
        scale = self.world.data.size / divisor  # DeepSpeed averages over the ranks, the contract wants the sum
        for index, micro in enumerate(micro_batches):
            self.model.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            with autocast(self.precision, self.world.device):  # DeepSpeed does as it likes in the forward pass
                loss = self._loss(self.model, micro.batch.to(self.world.device))
            if not micro.counts:
                loss = loss * 0
            self.model.backward(loss * scale, scale_wrt_gas=False)
            loss_sum += loss.detach()
        return loss_sum

    def _update(self) -> tuple[torch.Tensor, bool]:
        grad_norm = self._norm_of_stage_0()
        self.before_update()
        self.model.step()
        skipped = not self.model.was_step_applied()
        if grad_norm is None:
            found = math.inf if skipped else self.model.get_global_grad_norm()
            grad_norm = torch.as_tensor(found, dtype=torch.float32)
        return grad_norm, skipped

    def _norm_of_stage_0(self) -> torch.Tensor | None:
        """In fp32 DeepSpeed clips without saying what the norm was."""
        if self.masters.wrapper is not self.masters.optimizer:
            return None
        from deepspeed.runtime.utils import clip_grad_norm_

        norm = clip_grad_norm_(self.module.parameters(), max_norm=float("inf"), mpu=self.model.mpu)
        return torch.as_tensor(norm, dtype=torch.float32)

    def _whole(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter's fp32 weight, or a buffer, as one process has it."""
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach()
        return gathered(tensor, self.masters.weight(tensor))

    def _trained(self) -> Iterator[tuple[nn.Parameter, str]]:
        return ((parameter, name) for parameter, name in self._names().items() if parameter.requires_grad)

    def _optimizer_copies(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        copies = {}
        for parameter, name in self._trained():
            for key in self.masters.keys:
                tensor = self.masters.state(parameter, key)
                tensor = tensor if key == STEP else gathered(parameter, tensor)
                if self._keeps_full_copy(writers):
                    copies[f"{name}/{key}"] = tensor.to("cpu", copy=True)
        return copies

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for parameter, name in self._trained():
            gradient = self.masters.gradient(parameter)
            if gradient is not None:
                whole = gathered(parameter, gradient.float())
                if self._keeps_full_copy((0,)):
                    found[name] = whole.to("cpu", copy=True) / self._loss_scale()
        return found

    def _loss_scale(self) -> float:
        return float(getattr(self.model.optimizer, "cur_scale", 1.0))

    def load(self, state: EngineState) -> None:
        self._check_optimizer(state)
        trained = {name for name, parameter in self.structure.named_parameters() if parameter.requires_grad}
        check_optimizer_state(trained, state.optimizer)
        self.load_model(state.model)
        keys = {name.rpartition("/")[2] for name in state.optimizer}
        if keys:
            steps = (name for name in state.optimizer if name.endswith(f"/{STEP}"))
            step = state.optimizer[name] if (name := next(steps, None)) else torch.zeros(())
            self.masters.prepare(keys, step)
        for parameter, name in self._trained():
            for key in keys:
                if f"{name}/{key}" in state.optimizer:
                    tensor = state.optimizer[f"{name}/{key}"]
                    self.masters.set_state(parameter, key, tensor if key == STEP else cut(parameter, tensor))
        self._load_values(state)

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_weights(self._saved(self.structure), tensors)
        self._set_weights(self._saved(self.module), tensors)

    @torch.no_grad()
    def _set_weights(self, live: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Of the tensors of this engine, ``live``; every rank has them in the same order."""
        seen: set[int] = set()
        for name, tensor in live.items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(tensors[name])
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                self.masters.set_weight(tensor, cut(tensor, tensors[name]))

    def comparable(self) -> dict[str, nn.Parameter]:
        alike = super().comparable()
        # what is cut is another on each rank, and stage 3 holds pieces
        return {name: tensor for name, tensor in alike.items() if not is_cut(tensor) and not hasattr(tensor, "ds_id")}

    def comparable_gradients(self) -> dict[str, torch.Tensor]:
        return {}  # what is in .grad may be one rank's alone

    def close(self) -> None:
        super().close()
        self.model.destroy()

    def _values(self) -> dict[str, Any]:
        values = super()._values()
        if self.precision == "fp16":
            scaler = self.model.optimizer.loss_scaler
            # as LossScaler.state_dict: DeepSpeed counts the steps since the last overflow from its own beginning
            quiet = scaler.cur_iter - scaler.last_overflow_iter - 1
            values["scaler"] = {"scale": scaler.cur_scale, "_growth_tracker": quiet}
        return values

    def _load_values(self, state: EngineState) -> None:
        super()._load_values(state)
        if self.precision == "fp16" and (saved := state.values["scaler"]):
            scaler = self.model.optimizer.loss_scaler
            scaler.cur_scale = saved["scale"]
            scaler.cur_iter, scaler.last_overflow_iter = int(saved["_growth_tracker"]), -1
