"""Number formats: autocast for the matrix products over fp32 weights, and the loss scaler that fp16 needs."""

from contextlib import AbstractContextManager, nullcontext

import torch

from drawbar.errors import UserError


def choose_precision(wanted: str, device: torch.device) -> str:
    """``fp32``, ``bf16`` or ``fp16`` for the setting ``precision``.

    ``auto`` is bf16 where the hardware multiplies it faster than fp32, which is asked of the hardware, not measured:
    a measurement could answer differently when the run resumes.

    Raises:
        UserError: bf16 or fp16 is asked of a device that has none.
    """
    if wanted == "auto":
        return "bf16" if _bf16_is_fast(device) else "fp32"
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("this GPU has no bf16", where="precision", remedy="set precision=fp16 or precision=fp32")
    return wanted


def _bf16_is_fast(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return False
    features = torch.cpu.get_capabilities()
    # x86: AVX512-BF16 or AMX; Arm: the bf16 matrix extension
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The context that forward passes run in."""
    if precision == "fp32":
        return nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler: at work for fp16, a bystander otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
