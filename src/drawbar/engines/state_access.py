"""Weights, gradients and optimizer state by name: with torch's optimizers, and merged over pipeline stages."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.local_model import LocalModel
from drawbar.engines.parts import StateAccess
from drawbar.models.lora import saved_tensors
from drawbar.optim.state import load_optimizer_state, optimizer_state
from drawbar.parallel.local_boxes import LocalBox, boxes_of
from drawbar.parallel.precision import LossScaler
from drawbar.parallel.weights import full_tensor, load_shard, shard_like
from drawbar.parallel.zero1 import is_zero1, local_optimizer
from drawbar.runtime.safetensors_reader import StoredTensors, host_copies, tied_names, unique_names


class TorchState:
    """``StateAccess`` for replicated or sharded (DTensor) parameters with torch's optimizers.

    Args:
        keeps: whether this rank keeps host copies of the full tensors; every rank joins the gather. In a pipeline, one
            rank per stage keeps them and sends them to rank 0; otherwise only rank 0 keeps them.
    """

    def __init__(
        self,
        local: LocalModel,
        optimizers: list[Optimizer],
        scaler: LossScaler,
        config: RunConfig,
        world: Distributed,
        keeps: bool,
    ) -> None:
        self.module = local.module
        self.fused = local.fused
        self.optimizers = optimizers
        self.scaler = scaler
        self.config = config
        self.world = world
        self.keeps = keeps

    def model(self) -> dict[str, torch.Tensor]:
        return host_copies(saved_tensors(self.module, self.config), self.keeps, self._full)

    def optimizer(self) -> dict[str, torch.Tensor]:
        partitioned = list(filter(is_zero1, self.optimizers))
        if partitioned:  # the other ranks have the rest
            whole = [optimizer for optimizer in self.optimizers if not is_zero1(optimizer)] if self.keeps else []
            parts = optimizer_state(self._names(), [*map(local_optimizer, partitioned), *whole])
            return self.world.gather_dict(host_copies(parts))
        tensors = optimizer_state(self._names(), self.optimizers)
        return host_copies(tensors, self.keeps, lambda name, t: self._full(name.rpartition("/")[0], t))

    def gradients(self) -> dict[str, torch.Tensor]:
        scale = self.scaler.scale
        return host_copies(
            self.gradients_equal_on_replicas(),  # with torch's optimizers: all gradients of this rank
            self.keeps,
            lambda name, tensor: self._full(name, tensor) / scale,
        )

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        live = saved_tensors(self.module, self.config)
        # a checkpoint in parts stores the tensors of each dtype in the order of their names
        for name in sorted(unique_names(live)):
            load_shard(live[name], tensors, name, self.fused.get(name))

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = self._names()

        def shard(parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
            return shard_like(parameter, tensors, name, self.fused.get(names[parameter]))

        load_optimizer_state(names, [local_optimizer(optimizer) for optimizer in self.optimizers], tensors, shard)

    def tied(self) -> dict[str, str]:
        return tied_names(saved_tensors(self.module, self.config))

    def local_weight_boxes(self) -> list[LocalBox]:
        tensors = saved_tensors(self.module, self.config)
        return [box for name in unique_names(tensors) for box in boxes_of(name, tensors[name], self.fused.get(name))]

    def local_optimizer_boxes(self) -> list[LocalBox]:
        tensors = optimizer_state(self._names(), [local_optimizer(optimizer) for optimizer in self.optimizers])
        return [
            box
            for name, tensor in tensors.items()
            for box in boxes_of(name, tensor, self.fused.get(name.rpartition("/")[0]))
        ]

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        live = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        return {name: gradient for name, gradient in live.items() if gradient is not None}

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def _full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.world.set_activity(f"copying {name}")  # shown by ranks that wait for this one
        return full_tensor(tensor, self.fused.get(name))


class StagesState:
    """The state of a pipeline: gathers and merges what the ``StateAccess`` of each stage (``stage_state``) returns.

    Args:
        stage_state: state of this rank's stages; ``keeps`` is True on one rank per stage.
        local: the stages (``module``), and the full model without values (``meta_model``).
        tied: name of the weight that first and last stage share; None if they share none.
    """

    def __init__(
        self, stage_state: StateAccess, local: LocalModel, config: RunConfig, world: Distributed, tied: str | None
    ) -> None:
        self.stage_state = stage_state
        self.local = local
        self.config = config
        self.world = world
        self.tied_weight = tied

    def model(self) -> dict[str, torch.Tensor]:
        found = self.world.gather_dict(self.stage_state.model())
        if not self.world.is_rank0:
            return {}
        tied = self.tied()  # a tied weight is gathered under its first name
        return {name: found[tied.get(name, name)] for name in saved_tensors(self.local.meta_model, self.config)}

    def optimizer(self) -> dict[str, torch.Tensor]:
        return self.world.gather_dict(self.stage_state.optimizer())

    def gradients(self) -> dict[str, torch.Tensor]:
        return self.world.gather_dict(self.stage_state.gradients())

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stage_state.load_model(tensors)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names_here = {name for name, _ in self.local.module.named_parameters()}
        names = [name for name in tensors if name.rpartition("/")[0] in names_here]
        if isinstance(tensors, StoredTensors):  # read lazily
            self.stage_state.load_optimizer(tensors.renamed({name: name for name in names}))
        else:
            self.stage_state.load_optimizer({name: tensors[name] for name in names})

    def tied(self) -> dict[str, str]:
        first: dict[int, str] = {}
        names = {
            name: first.setdefault(id(tensor), name)
            for name, tensor in saved_tensors(self.local.meta_model, self.config).items()
        }
        return {name: saved for name, saved in names.items() if name != saved}

    def local_weight_boxes(self) -> list[LocalBox]:
        return self._without_second_copy(self.stage_state.local_weight_boxes())

    def local_optimizer_boxes(self) -> list[LocalBox]:
        return self._without_second_copy(self.stage_state.local_optimizer_boxes())

    def _without_second_copy(self, boxes: list[LocalBox]) -> list[LocalBox]:
        """The boxes without those of the last stage's copy of a tied weight: the ranks of the first and last stages may
        shard it differently, and only the first stage writes it."""
        if self.world.dims.coordinates(self.world.rank)["pp"] == 0:
            return boxes
        return [box for box in boxes if self.tied_weight not in (box.name, box.name.rpartition("/")[0])]

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        return self.stage_state.equal_on_replicas()

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        return self.stage_state.gradients_equal_on_replicas()
