"""Precision: autocast for the matrix products over fp32 weights, and the loss scaler that fp16 needs.

Autocast alone leaves the residual stream (the hidden states passed between blocks) in fp32, like the embeddings: a bf16
product added to an fp32 sum is fp32, and so is a norm times its weight. Each block then stores twice as many bytes of
its input for the backward pass, and each of its linear layers an additional bf16 copy.
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
    """Context manager for the micro-batches of a step: autocast casts each trained weight only in the first forward.

    Autocast drops its cached casts when its outermost context exits. This is that context, with autocast disabled, so
    that backward runs without autocast, as it should. Update the weights after exiting it. No-op for a model sharded by
    FSDP, which frees weights after each forward (their casts would stay in memory), or replicated on a mesh
    (``replicate_on_mesh``), where torch also uses an ``FSDPModule``.
    """
    if precision == "fp32" or any(isinstance(part, FSDPModule) for part in module.modules()):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def parameters_cast_by_autocast(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that autocast casts to the low precision in every use."""
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_cast = unwrap(type(module).forward) in _CAST_BY_AUTOCAST
        (cast if is_cast else others).update(module.parameters(recurse=False))
    return cast - others


def keep_trained_weights_in_fp32(model: nn.Module) -> set[torch.dtype]:
    """Convert trained parameters in bf16 or fp16, and the buffers of their modules (such as batch norm's statistics),
    to fp32, in place; frozen parameters are unchanged.

    Returns:
        The dtypes found; empty if all trained parameters are already in fp32.
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
    """The frozen fp32 weights that autocast would cast in each forward: stored in the low precision, they take half the
    memory, and results are bitwise the same. Only for weights that checkpoints leave out, such as those under LoRA."""
    if precision == "fp32":
        return set()
    cast = parameters_cast_by_autocast(model)
    return {parameter for parameter in cast if not parameter.requires_grad and parameter.dtype == torch.float32}


def store_frozen_weights_low(model: nn.Module, config: RunConfig) -> None:
    """Under LoRA, store the frozen weights of :func:`weights_to_store_low` in the low precision, in place. Without it,
    checkpoints have frozen weights, too, which stay as they are."""
    if config.lora is None or config.lora.base == "fp32":
        return
    for parameter in weights_to_store_low(model, config.precision):
        parameter.data = parameter.data.to(DTYPES[config.precision])


def stream_dtype(precision: str) -> torch.dtype:
    """bf16 for the precision ``bf16``, else fp32, as the sum of many blocks may overflow in fp16."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def keep_stream_in_bf16(model: nn.Module) -> None:
    """Make the repeated blocks take hidden states in bf16, and the norms inside them return bf16, in place. Only for
    transformers models, whose blocks take the hidden states as first argument, unless the model needs them in fp32;
    blocks of other models may take anything, such as times.

    Norms, softmax and the loss are still computed in fp32, and weights and gradients are fp32. Loss curves differ from
    those of autocast alone by no more than those of different seeds (docs/strategies.md).
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
    # without autocast, as when a user loads a run and calls its model, linear layers accept only their own dtype
    return value.bfloat16() if torch.is_autocast_enabled(value.device.type) else value


def choose_precision(wanted: str, device: torch.device) -> str:
    """Resolve the setting ``precision`` to ``fp32``, ``bf16`` or ``fp16``.

    ``auto`` is bf16 on a GPU that supports it, else fp32. Some CPUs with bf16 instructions run it four times as fast as
    fp32, others at half the speed; and oneDNN caches a kernel for each new shape, so memory grows for many steps.

    Raises:
        UserError: bf16 is requested on a GPU without bf16.
    """
    if wanted == "auto":
        return "bf16" if _has_fast_bf16(device) else "fp32"
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("this GPU has no bf16", where="precision", remedy="set precision=fp16 or precision=fp32")
    return wanted


def choose_dtypes(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with every ``auto`` dtype resolved. Raises as :func:`choose_precision`."""
    muon = choose_precision(config.optim.muon_precision, device)
    optim = config.optim.model_copy(update={"muon_precision": muon})
    return config.model_copy(update={"precision": choose_precision(config.precision, device), "optim": optim})


def _has_fast_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The autocast context for forward passes."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class LossScaler:
    """Keeps fp16 gradients in range: the loss is multiplied by a scale that halves at each overflow and doubles after
    2,000 steps without one (Micikevicius et al. 2018, arXiv:1710.03740; constants as in torch's ``GradScaler``).

    The caller determines whether a step overflowed from the global gradient norm, so that all ranks agree under every
    strategy. (torch's scaler only sees one rank's gradients.) For other precisions the scale is always 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.scale = 2.0**16 if self.enabled else 1.0
        self._steps_without_overflow = 0

    def update(self, overflowed: bool) -> None:
        """Call after each step."""
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
