"""Weights, gradients and optimizer state by name: with torch's optimizers, and merged over pipeline stages."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.checkpoint.save import host_copies
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.local_model import LocalModel
from drawbar.engines.parts import StateAccess
from drawbar.models.lora import saved_tensors
from drawbar.optim.state import load_optimizer_state, optimizer_state
from drawbar.parallel.precision import LossScaler
from drawbar.parallel.weights import full_tensor, load_shard, shard_like
from drawbar.parallel.zero1 import is_zero1, local_optimizer
from drawbar.runtime.safetensors_reader import TensorFiles

ShouldStore = Callable[[Sequence[int]], bool]
"""(writer ranks) → whether this rank stores the full tensors; every rank joins the gather all the same."""


def is_writer(world: Distributed) -> ShouldStore:
    """``ShouldStore`` of a model without stages: the writers themselves."""
    return lambda writers: world.rank in writers


def is_stage_leader(world: Distributed) -> ShouldStore:
    """``ShouldStore`` of a stage: one rank per stage stores its tensors, and sends them to the writers."""
    return lambda writers: world.dims.is_stage_leader(world.rank)


class TorchState:
    """``StateAccess`` for replicated or sharded (DTensor) parameters with torch's optimizers."""

    def __init__(
        self,
        local: LocalModel,
        optimizers: list[Optimizer],
        scaler: LossScaler,
        config: RunConfig,
        world: Distributed,
        should_store: ShouldStore,
    ) -> None:
        self.module = local.module
        self.fused = local.fused
        self.optimizers = optimizers
        self.scaler = scaler
        self.config = config
        self.world = world
        self.should_store = should_store

    def model(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        return host_copies(saved_tensors(self.module, self.config), self.should_store(writers), self._full)

    def optimizer(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        tensors = optimizer_state(self._names(), [local_optimizer(optimizer) for optimizer in self.optimizers])
        if any(is_zero1(optimizer) for optimizer in self.optimizers):  # the other ranks have the rest
            return self.world.gather_dict(host_copies(tensors), writers)
        return host_copies(tensors, self.should_store(writers), lambda name, t: self._full(name.rpartition("/")[0], t))

    def gradients(self) -> dict[str, torch.Tensor]:
        scale = self.scaler.scale
        return host_copies(
            self.replicated_gradients(), self.should_store((0,)), lambda name, tensor: self._full(name, tensor) / scale
        )

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in saved_tensors(self.module, self.config).items():
            load_shard(tensor, tensors, name, self.fused.get(name))

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = self._names()

        def shard(parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
            return shard_like(parameter, tensors, name, self.fused.get(names[parameter]))

        load_optimizer_state(names, [local_optimizer(optimizer) for optimizer in self.optimizers], tensors, shard)

    def replicated(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def replicated_gradients(self) -> dict[str, torch.Tensor]:
        live = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        return {name: gradient for name, gradient in live.items() if gradient is not None}

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def _full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.world.note(f"copying {name}")  # shown by ranks that wait for this one
        return full_tensor(tensor, self.fused.get(name))


class StagesState:
    """The state of a pipeline: gathers and merges what the ``StateAccess`` of each stage (``own``) returns.

    Args:
        own: of this rank's stages; its ``should_store`` is ``is_stage_leader``.
        local: the stages (``module``), and the full model without values (``meta_model``).
    """

    def __init__(self, own: StateAccess, local: LocalModel, config: RunConfig, world: Distributed) -> None:
        self.own = own
        self.local = local
        self.config = config
        self.world = world

    def model(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        found = self.world.gather_dict(self.own.model(writers), writers)
        if self.world.rank not in writers:
            return {}
        first: dict[int, str] = {}  # a tied weight has two names, and was gathered under the first
        return {
            name: found[first.setdefault(id(tensor), name)]
            for name, tensor in saved_tensors(self.local.meta_model, self.config).items()
        }

    def optimizer(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        return self.world.gather_dict(self.own.optimizer(writers), writers)

    def gradients(self) -> dict[str, torch.Tensor]:
        return self.world.gather_dict(self.own.gradients())

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.own.load_model(tensors)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = {name for name, _ in self.local.module.named_parameters()}
        names = [name for name in tensors if name.rpartition("/")[0] in own]
        if isinstance(tensors, TensorFiles):  # TensorFiles read a tensor only when it is asked for
            self.own.load_optimizer(tensors.renamed({name: name for name in names}))
        else:
            self.own.load_optimizer({name: tensors[name] for name in names})

    def replicated(self) -> dict[str, nn.Parameter]:
        return self.own.replicated()

    def replicated_gradients(self) -> dict[str, torch.Tensor]:
        return self.own.replicated_gradients()
