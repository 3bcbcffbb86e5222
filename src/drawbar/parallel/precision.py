"""Precision: autocast for the matrix products over fp32 weights, and the loss scaler that fp16 needs."""

from contextlib import AbstractContextManager, nullcontext

import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.util.dtypes import DTYPES


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
