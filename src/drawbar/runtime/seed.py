"""Seeds, and the state of every random generator that a step may draw from."""

import os
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.utils.deterministic


def seed_everything(seed: int, seed_rank: int = 0) -> None:
    """Seed Python, NumPy and torch (CPU and GPU).

    Args:
        seed_rank: ranks with the same number draw the same numbers, as tensor-parallel ranks must (see
            ``ParallelDims.seed_rank``); the dropout of others differs.
    """
    mixed = (seed * 1_000_003 + seed_rank) % 2**63
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def use_deterministic_kernels() -> None:
    """Use kernels whose results are the same in every run, though some are slower (CUDA's scatter-adds). Operators for
    which torch has none raise (for example, cumulative sums of floats on CUDA). Call this before any kernel runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch raises at every matrix product on CUDA
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else torch writes NaN to all memory that it allocates
    torch.backends.cudnn.benchmark = False


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of all generators, as tensors, so that a checkpoint needs no pickle."""
    _, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor(inner["key"].astype(np.int64)),
        "numpy_position": torch.tensor([inner["pos"], numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def rng_bytes() -> bytes:
    """The state of all generators on the host: equal bytes if nothing was drawn in between."""
    return b"".join(part.numpy().tobytes() for part in rng_state(torch.device("cpu")).values())


def note_host_generators() -> Callable[[], None]:
    """Return a function that restores the present state of all generators on the host. Faster than ``rng_state``."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)

    return put_back


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned. A device whose state was not saved keeps its current state."""
    torch.set_rng_state(state["torch"])
    gauss = float(state["python_gauss"][0])
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"][0])))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
