"""Precision: autocast for the matrix products over fp32 weights, and the loss scaler that fp16 needs.

Autocast alone leaves the residual stream (what the blocks hand to each other) in fp32, as the embeddings are: a product
in bf16 added to a sum in fp32 is fp32, and so is a norm times its weight. Then each block keeps twice the bytes of its
input for the backward pass, and each of its linear layers a copy in bf16 of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.parallel.blocks import repeated_blocks
from drawbar.runtime.safetensors_reader import DTYPES

_LOW = (torch.bfloat16, torch.float16)
_CAST_BY_AUTOCAST = {kind.forward for kind in (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""Forwards that use their parameters only in operators whose inputs autocast casts to the low precision."""


def cast_weights_once(module: nn.Module, precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Around the micro-batches of a step: autocast casts each trained weight in the first forward, and in no other.

    Autocast drops its casts where its outermost context ends. This is that context, with autocast disabled: a backward
    in it runs without autocast, as it should. Update the weights after it. Nothing is done for a model that is
    sharded by FSDP, which frees weights after each forward (their casts would stay in memory), or replicated on a mesh
    (``replicate_on_mesh``), which torch does with an ``FSDPModule``, too.
    """
    if precision == "fp32" or any(isinstance(part, FSDPModule) for part in module.modules()):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def parameters_cast_by_autocast(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that autocast casts to the low precision wherever the model uses them."""
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_cast = unwrap(type(module).forward) in _CAST_BY_AUTOCAST
        (cast if is_cast else others).update(module.parameters(recurse=False))
    return cast - others


def keep_trained_weights_in_fp32(model: nn.Module) -> set[torch.dtype]:
    """Convert the trained parameters that are in bf16 or fp16 to fp32, in place, and the buffers of their modules
    (batch norm's statistics) with them; frozen ones stay as they are.

    Returns:
        The dtypes that were found; none for a model whose trained parameters are in fp32 already.
    """
    found: set[torch.dtype] = set()
    for module in model.modules():
        low = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dtype in _LOW]
        if low:
            low_buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.dtype in _LOW]
            found.update(parameter.dtype for parameter in low)
            for tensor in (*low, *low_buffers):
                tensor.data = tensor.data.float()
    return found


def weights_to_store_low(model: nn.Module, precision: str) -> set[nn.Parameter]:
    """The frozen fp32 weights (those under LoRA) that autocast would cast in each forward: stored in the low precision,
    they take half the memory, and what is computed stays the same, bit by bit."""
    if precision == "fp32":
        return set()
    cast = parameters_cast_by_autocast(model)
    return {parameter for parameter in cast if not parameter.requires_grad and parameter.dtype == torch.float32}


def store_frozen_weights_low(model: nn.Module, precision: str) -> None:
    """Store the frozen weights of :func:`weights_to_store_low` in the low precision, in place."""
    for parameter in weights_to_store_low(model, precision):
        parameter.data = parameter.data.to(DTYPES[precision])


def stream_dtype(precision: str) -> torch.dtype:
    """bf16 for the precision ``bf16``; else fp32: sums of many blocks may not fit into fp16."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def keep_stream_in_bf16(model: nn.Module) -> None:
    """Let the repeated blocks take hidden states in bf16, and the norms inside of them give it, in place: those of
    transformers, whose first argument is the hidden states, unless the model wants them in fp32. What the blocks of
    another model take may be anything, such as times.

    Norms, softmax and the loss are still computed in fp32, and weights and their gradients are fp32. Loss curves are
    those of autocast alone, as far as other seeds differ (docs/strategies.md).
    """
    if getattr(getattr(model, "config", None), "residual_in_fp32", False):
        return
    for _, block in repeated_blocks(model):
        if not isinstance(block, GradientCheckpointingLayer):
            continue
        block.register_forward_pre_hook(_cast_first)
        for module in block.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(_cast_output)


def _cast_first(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (_in_bf16(args[0]), *args[1:]) if args else None


def _cast_output(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _in_bf16(output)


def _in_bf16(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    # without autocast, as for whoever loads a run and calls its model, linear layers take no other dtype than theirs
    return value.bfloat16() if torch.is_autocast_enabled(value.device.type) else value


def choose_precision(wanted: str, device: torch.device) -> str:
    """``fp32``, ``bf16`` or ``fp16`` for the setting ``precision``.

    ``auto`` is bf16 on a GPU that has it, else fp32. Of CPUs with bf16 instructions, some compute it four times as fast
    as fp32, and some at half the speed; and oneDNN keeps a kernel for each new shape, so memory grows for many steps.

    Raises:
        UserError: bf16 is asked of a GPU that has none.
    """
    if wanted == "auto":
        return "bf16" if _has_fast_bf16(device) else "fp32"
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("this GPU has no bf16", where="precision", remedy="set precision=fp16 or precision=fp32")
    return wanted


def choose_dtypes(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with a dtype wherever it says ``auto``. Raises as :func:`choose_precision` does."""
    muon = choose_precision(config.optim.muon_precision, device)
    optim = config.optim.model_copy(update={"muon_precision": muon})
    return config.model_copy(update={"precision": choose_precision(config.precision, device), "optim": optim})


def _has_fast_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The context that forward passes run in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class LossScaler:
    """Keeps fp16 gradients in range: the loss is multiplied by a scale that halves at each overflow and doubles after
    2,000 steps without one (Micikevicius et al. 2018, arXiv:1710.03740; the constants are torch's ``GradScaler``'s).

    Whether a step overflowed is for the caller to say, from the global gradient norm: then every rank of every strategy
    decides the same. (torch's own scaler looks at one rank's gradients.) For other precisions the scale is always 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.scale = 2.0**16 if self.enabled else 1.0
        self._steps_without_overflow = 0

    def update(self, overflowed: bool) -> None:
        """After each step."""
        if not self.enabled:
            return
        self._steps_without_overflow = 0 if overflowed else self._steps_without_overflow + 1
        if overflowed:
            self.scale /= 2
        elif self._steps_without_overflow >= self.GROWTH_INTERVAL:  # the count may be greater if DeepSpeed saved it
            self.scale *= 2
            self._steps_without_overflow = 0

    def state_dict(self) -> dict[str, float]:
        if not self.enabled:
            return {}
        return {"scale": self.scale, "_growth_tracker": self._steps_without_overflow}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale, self._steps_without_overflow = state["scale"], int(state["_growth_tracker"])
