"""The memory of a GPU, as torch counts it and as its driver does."""

import subprocess
from typing import Any


def memory(device: Any) -> dict[str, float | None]:
    """GiB of the device at the highest: in tensors, in torch's cache; and what nvidia-smi says is used now, by all
    processes, with libraries and fragments. None where there is no such thing."""
    import torch

    found: dict[str, float | None] = {"allocated_gib": None, "reserved_gib": None, "nvidia_smi_gib": None}
    if device.type != "cuda":
        return found
    found["allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    found["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    used = nvidia_smi("memory.used", device)
    return found | {"nvidia_smi_gib": None if used is None else float(used) / 2**10}


def nvidia_smi(fields: str, device: Any = None) -> str | None:
    """What nvidia-smi says of these fields, of one device or of all; None where there is none, or it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if device is not None:
        import torch

        # by its number there, CUDA_VISIBLE_DEVICES would be left out
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
