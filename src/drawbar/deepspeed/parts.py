"""DeepSpeed's engine as two parts of a drawbar engine: its updater, and its state access."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.deepspeed.state import (
    STEP,
    MasterState,
    full_shape,
    is_tp_shard,
    read_flat,
    tp_gather,
    tp_shard,
)
from drawbar.distributed.process_group import Distributed
from drawbar.engines.local_model import LocalModel
from drawbar.engines.parts import Update
from drawbar.models.lora import saved_tensors
from drawbar.optim.schedules import set_learning_rate
from drawbar.parallel.local_boxes import LocalBox, flat_boxes, whole_box
from drawbar.runtime.safetensors_reader import host_copies, tied_names, unique_names


class DeepSpeedUpdater:
    """``Updater`` by DeepSpeed's engine, which reduces, clips and updates, and scales the loss by itself.

    Args:
        masters: fp32 weights and optimizer state of its engine.
        precision: of the run.
    """

    loss_scale = 1.0

    def __init__(self, masters: MasterState, precision: str) -> None:
        self.masters = masters
        self.ds_engine = masters.engine
        self.precision = precision

    def step(self, lr: float, before_update: Callable[[torch.Tensor], bool]) -> Update:
        set_learning_rate([self.ds_engine.optimizer], lr)
        grad_norm = self._norm_of_stage_0()
        before_update(torch.tensor(math.nan) if grad_norm is None else grad_norm)
        self.ds_engine.step()
        skipped = not self.ds_engine.was_step_applied()
        if grad_norm is None:
            found = math.inf if skipped else self.ds_engine.get_global_grad_norm()
            grad_norm = torch.as_tensor(found, dtype=torch.float32)
        return Update(grad_norm, skipped)

    def _norm_of_stage_0(self) -> torch.Tensor | None:
        """The gradient norm under ZeRO stage 0, where DeepSpeed clips without reporting it; else None."""
        if self.masters.zero_optimizer is not self.masters.optimizer:  # stages 1 to 3 wrap the optimizer
            return None
        from deepspeed.runtime.utils import clip_grad_norm_

        parameters = self.ds_engine.module.parameters()
        norm = clip_grad_norm_(parameters, max_norm=float("inf"), mpu=self.ds_engine.mpu)
        return torch.as_tensor(norm, dtype=torch.float32)

    def scaler_state(self) -> dict[str, float]:
        if self.precision != "fp16":
            return {}
        scaler = self.ds_engine.optimizer.loss_scaler
        # like LossScaler's count, but it can reach the whole window: DeepSpeed's scale grows one step after each whole
        # window. The remainder is taken because DeepSpeed counts from the last overflow, not from the last growth
        quiet = scaler.cur_iter - scaler.last_overflow_iter - 1
        quiet = (quiet - 1) % scaler.scale_window + 1 if quiet > 0 else 0
        return {"scale": scaler.cur_scale, "_growth_tracker": quiet}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        if self.precision == "fp16" and state:
            scaler = self.ds_engine.optimizer.loss_scaler
            scaler.cur_scale = state["scale"]
            scaler.cur_iter, scaler.last_overflow_iter = int(state["_growth_tracker"]), -1

    def close(self) -> None:
        self.ds_engine.destroy()


class DeepSpeedState:
    """The fp32 weights and the optimizer's state of a DeepSpeed engine, as full tensors by name."""

    def __init__(
        self, local: LocalModel, masters: MasterState, config: RunConfig, world: Distributed, keeps: bool
    ) -> None:
        self.local = local
        self.module = local.module
        self.masters = masters
        self.config = config
        self.world = world
        self.keeps = keeps

    def model(self) -> dict[str, torch.Tensor]:
        return host_copies(saved_tensors(self.module, self.config), self.keeps, self._full)

    def optimizer(self) -> dict[str, torch.Tensor]:
        copies = {}
        for parameter, name in self._trained():
            for key in self.masters.keys:
                tensor = self.masters.state(parameter, key)
                tensor = tensor if key == STEP else tp_gather(parameter, tensor)
                if self.keeps:
                    copies[f"{name}/{key}"] = tensor.to("cpu", copy=True)
        return copies

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for parameter, name in self._trained():
            gradient = self.masters.gradient(parameter)
            if gradient is not None:
                full = tp_gather(parameter, gradient.float())
                if self.keeps:
                    found[name] = full.to("cpu", copy=True) / self._loss_scale()
        return found

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.set_weights(saved_tensors(self.module, self.config), tensors)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        keys = {name.rpartition("/")[2] for name in tensors}
        if keys:
            steps = (name for name in tensors if name.endswith(f"/{STEP}"))
            step = tensors[name] if (name := next(steps, None)) else torch.zeros(())
            self.masters.prepare(keys, step)
        for parameter, name in sorted(self._trained(), key=lambda trained: trained[1]):
            for key in sorted(keys):
                if f"{name}/{key}" in tensors:
                    self._load_state(parameter, key, tensors, f"{name}/{key}")

    def _load_state(self, parameter: nn.Parameter, key: str, tensors: Mapping[str, torch.Tensor], name: str) -> None:
        if key == STEP:
            self.masters.set_state(parameter, key, tensors[name])
        elif is_tp_shard(parameter):
            self.masters.set_state(parameter, key, tp_shard(parameter, tensors[name]))
        else:
            self.masters.set_piece(parameter, key, read_flat(tensors, name, *self.masters.range(parameter)))

    @torch.no_grad()
    def set_weights(self, live: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Set each tensor of ``live`` to the one of that name in ``tensors``; ``live`` has one order on all ranks."""
        seen: set[int] = set()
        # a checkpoint in parts stores tensors of one dtype in the order of their names
        for name, tensor in sorted(live.items()):
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(tensors[name])
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                if is_tp_shard(tensor):
                    self.masters.set_weight(tensor, tp_shard(tensor, tensors[name]))
                else:
                    self.masters.load_weight(tensor, tensors, name)

    def tied(self) -> dict[str, str]:
        return tied_names(saved_tensors(self.module, self.config))

    def local_weight_boxes(self) -> list[LocalBox]:
        tensors = saved_tensors(self.module, self.config)
        return [box for name in unique_names(tensors) for box in self._weight_boxes(name, tensors[name])]

    def local_optimizer_boxes(self) -> list[LocalBox]:
        return [
            box
            for parameter, name in self._trained()
            for key in self.masters.keys
            for box in self._state_boxes(name, parameter, key)
        ]

    def _weight_boxes(self, name: str, tensor: torch.Tensor) -> Iterator[LocalBox]:
        if not isinstance(tensor, nn.Parameter):
            yield whole_box(name, tensor)
        elif is_tp_shard(tensor):  # only AutoTP itself knows how it has cut it
            dtype = torch.float32 if tensor.requires_grad else tensor.dtype
            yield self._gathered_box(name, name, dtype, partial(self._full, name, tensor))
        else:
            yield from flat_boxes(
                name, full_shape(tensor), self.masters.range(tensor)[0], self.masters.piece(tensor, None)
            )

    def _state_boxes(self, name: str, parameter: nn.Parameter, key: str) -> Iterator[LocalBox]:
        if key == STEP:
            yield whole_box(f"{name}/{key}", self.masters.state(parameter, key))
        elif is_tp_shard(parameter):

            def gather() -> torch.Tensor:
                return tp_gather(parameter, self.masters.state(parameter, key))

            yield self._gathered_box(f"{name}/{key}", name, torch.float32, gather)
        else:
            start, piece = self.masters.range(parameter)[0], self.masters.piece(parameter, key)
            yield from flat_boxes(f"{name}/{key}", full_shape(parameter), start, piece)

    def _gathered_box(
        self, name: str, parameter: str, dtype: torch.dtype, gather: Callable[[], torch.Tensor]
    ) -> LocalBox:
        shape = tuple(saved_tensors(self.local.meta_model, self.config)[parameter].shape)
        return LocalBox(name, shape, (0,) * len(shape), shape, dtype, gather, is_collective=True)

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        # left out: tensor-parallel shards differ between ranks, and ZeRO-3 parameters (with ``ds_id``) are partitioned
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if not is_tp_shard(parameter) and not hasattr(parameter, "ds_id")
        }

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        return {}  # ``.grad`` may hold the gradient of only this rank's rows

    def _full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter's fp32 weight, or a buffer, as one process has it."""
        self.world.set_activity(f"copying {name}")  # shown by ranks that wait for this one
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach()
        return tp_gather(tensor, self.masters.weight(tensor))

    def _trained(self) -> Iterator[tuple[nn.Parameter, str]]:
        return ((parameter, name) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def _loss_scale(self) -> float:
        return float(getattr(self.masters.engine.optimizer, "cur_scale", 1.0))
