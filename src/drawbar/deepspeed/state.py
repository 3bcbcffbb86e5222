"""DeepSpeed: its import, its engine, and the engine's weights, gradients and optimizer state by parameter.

Under ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) a rank holds partitions of flat buffers. Here they are read and
written as whole tensors by parameter, which is what a checkpoint of any strategy holds.
"""

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drawbar.deepspeed.rules import INSTALL
from drawbar.errors import UserError
from drawbar.parallel.local_boxes import flat_boxes
from drawbar.runtime.safetensors_reader import dtype_of, read_slice, shape_of

STEP = "step"
"""The one entry of an optimizer's state that is not a tensor of its parameter's shape: a counter."""


def import_deepspeed(device: torch.device) -> ModuleType:
    """The library, set up for this device.

    Raises:
        UserError: it is not installed, or is incompatible with this torch.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it looks for GPUs when it is imported
    else:  # DeepSpeed uses this as its GPU index, which is 0 if each process sees only its own GPU
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise _broken(error) from error
        raise UserError(
            "deepspeed is not installed",
            where="parallel.strategy=deepspeed",
            remedy=f"install it after torch: {INSTALL}; or set parallel.strategy=fsdp",
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise _broken(error) from error
    # it calls torch's collectives by their older names
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it writes to stdout, where results go
    if device.type == "cpu":
        # DeepSpeed would compile this kernel at the first start; gloo does the same without it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _broken(error: Exception) -> UserError:
    return UserError(
        f"deepspeed is installed, but cannot be imported beside torch {torch.__version__}: {error}",
        where="parallel.strategy=deepspeed",
        remedy=f"rebuild it for this torch: {INSTALL} --force-reinstall --no-deps; or set parallel.strategy=fsdp",
    )


_REFUSALS = (AssertionError, ValueError, RuntimeError, TypeError, KeyError, AttributeError)
"""What DeepSpeed raises at the start: of a run that it cannot do, and of a user's JSON that it does not understand."""


def initialize_deepspeed(
    model: nn.Module, optimizer: Optimizer, values: Mapping[str, Any], device: torch.device, is_zero3: bool
) -> Any:
    """DeepSpeed's engine around a model on the CPU. The engine moves, partitions and casts the model.

    Args:
        values: DeepSpeed's own configuration.
        is_zero3: whether this is ZeRO-3, with parameters that have neither values nor memory yet.

    Raises:
        UserError: DeepSpeed refuses the model, or the values.
    """
    deepspeed = import_deepspeed(device)
    # DeepSpeed keeps the process groups of its first engine, which may be gone when a second one is made
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it even for one process without a launcher
    try:
        if is_zero3:
            _partition(deepspeed, model, values)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(values), dist_init_required=False
        )
    except torch.OutOfMemoryError:
        raise
    except (*_REFUSALS, deepspeed.DeepSpeedConfigError) as error:
        raise UserError(
            f"DeepSpeed refuses this run: {type(error).__name__}: {error}",
            where="parallel.strategy=deepspeed",
            remedy="`drawbar config show --deepspeed` prints what it was given; parallel.strategy=fsdp does without it",
        ) from error
    return engine


def _partition(deepspeed: ModuleType, model: nn.Module, values: Mapping[str, Any]) -> None:
    """Partition every parameter over the ranks (``zero.Init``), one at a time: at most one is unsharded."""
    deepspeed.init_distributed(dist_init_required=False)
    pieces = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=dict(values))
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        pieces._convert_to_zero_parameters([parameter])


class MasterState(ABC):
    """The fp32 weights, gradients and optimizer state of a DeepSpeed engine, gathered from its data-parallel ranks.

    Every rank calls every method but ``range``, ``piece``, ``set_piece`` and ``load_weight`` (which gathers only under
    ZeRO-3 with NVMe or hpZ). Tensors have the shape that the parameter has on one tensor-parallel rank.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero_optimizer = engine.optimizer  # under stage 0, ``optimizer`` itself
        self.optimizer: Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)

    @staticmethod
    def of(engine: Any) -> "MasterState":
        stage = int(engine.zero_optimization_stage())
        return (UnshardedMasterState, FlatMasterState, FlatMasterState, PartitionedMasterState)[stage](engine)

    @property
    def keys(self) -> list[str]:
        """The keys of the optimizer's state for each parameter; none before its first step."""
        return sorted({key for state in self.optimizer.state.values() for key in state})

    @abstractmethod
    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's weight: in fp32 if it is trained, else in its own dtype."""

    @abstractmethod
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set both the fp32 weight and the weight that the model computes with."""

    @abstractmethod
    def state(self, parameter: nn.Parameter, key: str) -> Tensor:
        """One of the optimizer's tensors of a trained parameter."""

    @abstractmethod
    def prepare(self, keys: set[str], step: Tensor) -> None:
        """Make room for the state of an optimizer that was saved after ``step`` steps, before ``set_state`` or
        ``set_piece``: its previous state is lost."""

    @abstractmethod
    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set what ``state`` returned."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Its gradient, averaged over the data-parallel ranks, times the loss scale; between backward and update."""
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    # this rank's own part of these; the methods above gather or divide whole tensors

    @abstractmethod
    def range(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The range of the parameter's elements whose weight and state are on this rank: first element, and count."""

    @abstractmethod
    def piece(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The elements of ``range``, in one dimension: of an optimizer's tensor, or, without a key, of the weight."""

    @abstractmethod
    def set_piece(self, parameter: nn.Parameter, key: str, piece: Tensor) -> None:
        """Set what ``piece`` returned of an optimizer's tensor."""

    def load_weight(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor], name: str) -> None:
        """Set the weight to ``tensors[name]``: both the fp32 one and the one that the model computes with."""
        self.set_weight(parameter, tensors[name])


class UnshardedMasterState(MasterState):
    """ZeRO stage 0: nothing is partitioned; every rank holds the full state. The weights are in fp32: fp16 is refused
    in this stage, and bf16 is autocast."""

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.copy_(value)

    def state(self, parameter: nn.Parameter, key: str) -> Tensor:
        return self.optimizer.state[parameter][key]

    def prepare(self, keys: set[str], step: Tensor) -> None:
        self.optimizer.state.clear()

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        place = value.clone() if key == STEP else value.to(self.engine.device, copy=True)
        self.optimizer.state[parameter][key] = place

    def range(self, parameter: nn.Parameter) -> tuple[int, int]:
        return 0, parameter.numel()

    def piece(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        return (parameter.detach() if key is None else self.optimizer.state[parameter][key]).reshape(-1)

    def set_piece(self, parameter: nn.Parameter, key: str, piece: Tensor) -> None:
        self.set_state(parameter, key, piece.view_as(parameter))


class FlatMasterState(MasterState):
    """Stages 1 and 2: each group of parameters is one flat buffer, of which a rank has a piece."""

    def _flat(self, group: int) -> Tensor:
        return self.optimizer.param_groups[group]["params"][0]

    def weight(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameter)
        return parameter.detach() if master is None else master

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        value = value.to(self.engine.device)
        safe_set_full_fp32_param(parameter, value.float())
        parameter.copy_(value)

    def state(self, parameter: nn.Parameter, key: str) -> Tensor:
        if key == STEP:
            return self.optimizer.state[self._flat(0)][key]
        # as deepspeed.utils.safe_get_full_optimizer_state, which knows nothing before the first step
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self.engine.device)
        whole.narrow(0, *self.range(parameter)).copy_(self.piece(parameter, key))
        dist.all_reduce(whole, group=parameter._dp_group)
        return whole.view_as(parameter)

    def range(self, parameter: nn.Parameter) -> tuple[int, int]:
        if not parameter.requires_grad:
            return 0, parameter.numel()
        mapping = parameter._hp_mapping
        return (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    def piece(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """A view of this rank's flat buffer."""
        if not parameter.requires_grad:
            return parameter.detach().reshape(-1)
        mapping = parameter._hp_mapping
        if mapping is None:
            return torch.zeros(0, device=self.engine.device)
        master = self._flat(mapping.param_group_index)
        flat = master.detach() if key is None else self.optimizer.state[master][key]
        return flat.narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)

    def set_piece(self, parameter: nn.Parameter, key: str, piece: Tensor) -> None:
        self.piece(parameter, key).copy_(piece)

    def prepare(self, keys: set[str], step: Tensor) -> None:
        for group in self.optimizer.param_groups:
            _allocate_state(self.optimizer, group["params"][0], keys, step)

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if key != STEP:
            self.set_piece(parameter, key, value.reshape(-1).narrow(0, *self.range(parameter)))


class PartitionedMasterState(MasterState):
    """Stage 3: a rank has a piece of each parameter."""

    def weight(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        with zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        value = value.to(self.engine.device)
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, value.float())
        with zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.copy_(value)

    def state(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        if key == STEP:
            return next(iter(self.optimizer.state.values()))[key]
        return safe_get_full_optimizer_state(parameter, key)

    def prepare(self, keys: set[str], step: Tensor) -> None:
        for flat in self.zero_optimizer.fp32_partitioned_groups_flat:
            _allocate_state(self.optimizer, flat, keys, step)

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if key != STEP:
            safe_set_full_optimizer_state(parameter, value.to(self.engine.device), key)

    def range(self, parameter: nn.Parameter) -> tuple[int, int]:
        group: Any = parameter.ds_process_group
        start = parameter.ds_tensor.ds_numel * dist.get_rank(group)
        return start, min(parameter.ds_tensor.ds_numel, max(0, parameter.ds_numel - start))

    def piece(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if key is not None:
            padded = safe_get_local_optimizer_state(parameter, key)
        elif parameter.requires_grad:
            padded = safe_get_local_fp32_param(parameter)
        else:
            padded = parameter.ds_tensor.detach()
        return padded.narrow(0, 0, self.range(parameter)[1])  # the last pieces are filled up with zeros

    def set_piece(self, parameter: nn.Parameter, key: str, piece: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        safe_set_local_optimizer_state(parameter, _padded(piece, parameter), key)

    @torch.no_grad()
    def load_weight(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor], name: str) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        if parameter.ds_secondary_tensor is not None or _is_on_nvme(parameter):
            self.set_weight(parameter, tensors[name])  # more is set than this rank's piece
            return
        start, count = self.range(parameter)
        padded = _padded(read_flat(tensors, name, start, count), parameter)
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, padded.float())
        parameter.ds_tensor.copy_(padded)
        if parameter.numel() == parameter.ds_numel:  # small ones stay gathered
            parameter.copy_(tensors[name])


def read_flat(tensors: Mapping[str, Tensor], name: str, start: int, count: int) -> Tensor:
    """A range of a tensor's elements, in one dimension, in their order in memory; only these are read."""
    shape = shape_of(tensors, name)
    flat = torch.empty(count, dtype=dtype_of(tensors, name))
    for box in flat_boxes(name, shape, start, flat):
        index = tuple(slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True))
        box.get().copy_(read_slice(tensors, name, index))
    return flat


def _padded(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """A piece of a parameter under ZeRO-3, as long as the pieces of the other ranks."""
    return torch.nn.functional.pad(piece, (0, parameter.ds_tensor.ds_numel - piece.numel()))


def _is_on_nvme(parameter: nn.Parameter) -> bool:
    return str(getattr(parameter.ds_tensor.final_location, "value", "")) == "nvme"


def _allocate_state(optimizer: Optimizer, flat: Tensor, keys: set[str], step: Tensor) -> None:
    optimizer.state[flat] = {key: step.clone() if key == STEP else torch.zeros_like(flat) for key in keys}


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's shape, also where ZeRO-3 has freed it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_tp_shard(parameter: nn.Parameter) -> bool:
    """Whether the parameter is sharded by AutoTP."""
    return hasattr(parameter, "gather_params")


def tp_gather(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Gather a full tensor from shards like the parameter's. Collective over the tensor-parallel ranks."""
    return _apply_autotp(parameter, part, "gather_params")


def tp_shard(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's shard of a full tensor, sharded like the parameter."""
    return _apply_autotp(parameter, whole, "_tp_partition")


def _apply_autotp(parameter: nn.Parameter, tensor: Tensor, method: str) -> Tensor:
    """Run an AutoTP method on ``tensor`` by swapping it into ``parameter.data``: AutoTP works on its own parameters."""
    if not is_tp_shard(parameter):
        return tensor
    kept = parameter.data
    try:
        parameter.data = tensor.to(kept.device, copy=True)
        getattr(parameter, method)([parameter])
        return parameter.data
    finally:
        parameter.data = kept
