"""Checkpoints of DeepSpeed: ZeRO's, which hold flat partitions, and universal ones, with a folder for each
parameter.

DeepSpeed reads universal checkpoints under every stage and on any number of processes (``checkpoint:
{load_universal: true}``). So drawbar writes no others. Of a ZeRO checkpoint, DeepSpeed's ``zero_to_fp32``
puts the weights together."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawbar.deepspeed.state import import_deepspeed
from drawbar.errors import UserError
from drawbar.runtime.safetensors_reader import OnDemandTensor, OnDemandTensors, StoredTensors

WEIGHT = "fp32"
"""Name of the file with a parameter's weight, without ``.pt``."""
_TAG = "universal"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The file that DeepSpeed reads under ZeRO stages 1 and 2, and the one under stage 3; both get the same
content."""
_MOST_GROUPS = 64
"""How many empty parameter groups are written. DeepSpeed pairs them with the groups of its optimizer, and
loads nothing
for a group without a counterpart: so there must be at least as many as the optimizer has."""


def write_universal(folder: Path, step: int, model: StoredTensors, optimizer: StoredTensors) -> None:
    """Write a universal checkpoint into an existing empty folder, tensor by tensor; ``optimizer`` is by
    ``<parameter>/<key>``.

    The settings of the optimizer (learning rate, decay) are those of the engine that reads it. DeepSpeed
    takes weights and moments of what it trains from such a checkpoint, and nothing of buffers and frozen
    weights."""
    version = import_deepspeed(torch.device("cpu")).__version__
    zero = folder / _TAG / "zero"
    weights = {f"{name}/{WEIGHT}": (model, name) for name in model}
    for file, (tensors, name) in (weights | {name: (optimizer, name) for name in optimizer}).items():
        path = zero / f"{file}.pt"  # a folder for each parameter
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(tensors[name] if path.stem == "step" else {"param": tensors[name]}, path)
    state = {"ds_version": version, "param_groups": [{}] * _MOST_GROUPS}
    inner = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{}]}  # stage 3 looks there
    _save({**state, "optimizer_state_dict": inner}, zero / "optimizer_state.pt")
    counters = {"global_steps": step, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1, "module": {}}
    for name in _MODEL_FILES:
        _save({**counters, "lr_scheduler": {"last_batch_iteration": step - 1}}, folder / _TAG / name)
    (folder / "latest_universal").write_text(_TAG)


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch does not say what was wrong with the disk
        torch.save(content, file)


def read_deepspeed(folder: Path) -> OnDemandTensors:
    """The weights and buffers of a checkpoint of ZeRO stage 1, 2 or 3, or of a universal one, by name.

    A universal checkpoint that was made of one of stage 3 has flat tensors. The weights of stages 1 and 2 are
    all in memory; files of other checkpoints are mapped. No file is unpickled without restrictions: torch is
    forced to ``weights_only``, even where DeepSpeed's code asks otherwise, and allows a few of
    DeepSpeed's classes besides its own.

    Args:
        folder: ``global_step500``, or the folder that has it and ``latest``.

    Raises:
        UserError: the folder is no such checkpoint, or deepspeed is missing.
    """
    folder = _checkpoint_folder(folder)
    with _reading(folder):
        found = _universal_weights(folder) if (folder / "zero").is_dir() else _zero_weights(folder)
    return OnDemandTensors(
        {name: OnDemandTensor(tensor.shape, tensor.dtype, tensor.contiguous) for name, tensor in found.items()}
    )


def _zero_weights(folder: Path) -> Mapping[str, Any]:
    """Tensors, or under stage 3 objects that put one together when its ``contiguous()`` is called."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(sys.stderr):
        found: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
            str(folder.parent), folder.name, lazy_mode=True
        )
    return found


def _universal_weights(folder: Path) -> dict[str, Tensor]:
    """What is trained is in a folder for each parameter; buffers and frozen weights are the module's, which
    has empty tensors for what stage 3 has partitioned."""
    module = _load(min(folder.glob("*_model_states.pt"))).get("module") or {}
    found = {name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor) and tensor.numel()}
    for path in sorted((folder / "zero").rglob(f"{WEIGHT}.pt")):
        saved = _load(path)
        name = path.parent.relative_to(folder / "zero").as_posix()
        found[name] = saved["param"] if isinstance(saved, dict) else saved
    return found


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _checkpoint_folder(folder: Path) -> Path:
    for latest in ("latest", "latest_universal"):
        if (folder / latest).is_file():
            tag = (folder / latest).read_text(encoding="utf-8", errors="replace").strip()
            if "\0" not in tag and Path(tag).name == tag and (folder / tag).is_dir():
                return folder / tag
    if next(folder.glob("*_model_states.pt"), None) is None:
        raise UserError(
            f"{folder} is no checkpoint of DeepSpeed: it has no …_model_states.pt",
            where="SOURCE",
            remedy="name the folder that DeepSpeed has written: global_step500, or the one that has it and `latest`",
        )
    return folder


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Context in which torch unpickles only its own safe classes and a few of DeepSpeed's, and errors become
    UserErrors."""
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    safe: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(safe):
            yield
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            f"DeepSpeed cannot read {folder}: {str(error).splitlines()[0] if str(error) else repr(error)}",
            where="SOURCE",
            remedy="see that the files of all ranks are there, and as DeepSpeed has written them",
        ) from error
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
