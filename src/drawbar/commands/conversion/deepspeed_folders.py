"""Checkpoints of DeepSpeed: ZeRO's, which hold flat partitions, and universal ones, with a folder for each parameter.

DeepSpeed itself makes universal checkpoints of ZeRO's (``ds_to_universal``), and reads them under every stage and on
any number of processes (``checkpoint: {load_universal: true}``). So drawbar writes universal checkpoints only, and
reads a ZeRO checkpoint by converting it to a universal one first.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drawbar.checkpoint.space import REMEDIES
from drawbar.commands.conversion.foreign_state import ForeignState, check_complete, disk_errors
from drawbar.errors import UserError
from drawbar.optim.state import ADAM_KEYS
from drawbar.parallel.deepspeed.deepspeed_state import import_deepspeed
from drawbar.runtime.on_demand_tensors import OnDemandTensor, OnDemandTensors
from drawbar.runtime.safetensors_reader import StoredTensors

WEIGHT = "fp32"
"""Name of the file with a parameter's weight, without ``.pt``."""
_TAG = "universal"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The file that DeepSpeed reads under ZeRO stages 1 and 2, and the one under stage 3; both get the same content."""
_MOST_GROUPS = 64
"""How many empty parameter groups are written. DeepSpeed pairs them with the groups of its optimizer, and loads nothing
for a group without a counterpart: so there must be at least as many as the optimizer has."""


def write_universal(folder: Path, step: int, model: StoredTensors, optimizer: StoredTensors) -> None:
    """Write a universal checkpoint into an existing empty folder, tensor by tensor.

    The settings of the optimizer (learning rate, decay) are those of the engine that reads it. DeepSpeed takes weights
    and moments of what it trains from such a checkpoint, and nothing of buffers and frozen weights.
    """
    version = import_deepspeed(torch.device("cpu")).__version__
    zero = folder / _TAG / "zero"
    for tensors, names in ((model, {name: (name, WEIGHT) for name in model}), (optimizer, _split(optimizer))):
        for name, (parameter, key) in names.items():
            place = zero / parameter
            place.mkdir(parents=True, exist_ok=True)
            tensor = tensors[name]
            _save(tensor if key == "step" else {"param": tensor}, place / f"{key}.pt")
    state = {"ds_version": version, "param_groups": [{}] * _MOST_GROUPS}
    inner = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{}]}  # stage 3 looks there
    _save({**state, "optimizer_state_dict": inner}, zero / "optimizer_state.pt")
    counters = {"global_steps": step, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1, "module": {}}
    for name in _MODEL_FILES:
        _save({**counters, "lr_scheduler": {"last_batch_iteration": step - 1}}, folder / _TAG / name)
    (folder / "latest_universal").write_text(_TAG)


def _save(content: Any, path: Path) -> None:
    with disk_errors(), path.open("wb") as file:  # given a path, torch does not say what was wrong with the disk
        torch.save(content, file)


def _split(optimizer: StoredTensors) -> dict[str, tuple[str, str]]:
    """``<parameter>/<key>`` → parameter and key."""
    return {name: (name.rpartition("/")[0], name.rpartition("/")[2]) for name in optimizer}


def read_deepspeed(folder: Path, model: nn.Module, scratch: Path) -> ForeignState:
    """The weights and the optimizer state of a checkpoint of ZeRO stage 1, 2 or 3 for ``model``, or of a universal one.

    A ZeRO checkpoint is first converted by DeepSpeed's own ``ds_to_universal``, in this process; it holds one rank's
    file at a time. No file is unpickled without restrictions: torch is forced to ``weights_only``, also where
    DeepSpeed's code asks for the contrary, and allows a few of DeepSpeed's classes besides its own.

    Args:
        folder: ``global_step500``, or the folder that has it and ``latest``.
        scratch: an empty folder for the universal checkpoint. It takes the disk space of optimizer state and fp32
            weights, and twice that during the conversion.

    Raises:
        UserError: the folder is no such checkpoint, or that of another model or optimizer; or deepspeed is missing.
    """
    folder = _checkpoint_folder(folder)
    universal = folder
    with _reading(folder):
        states = _model_states(folder)
        if not (folder / "zero").is_dir():
            universal = scratch / _TAG
            _check_names(folder, set(model.state_dict()))
            _make_universal(folder, universal)
        step = _optimizer_step(universal)
    weights = _weights(universal, model, states.get("module") or {})
    return ForeignState(states["global_steps"], weights, _moments(universal, model, step))


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
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REMEDIES:  # of the disk that is written to
            raise
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


def _check_names(folder: Path, names: set[str]) -> None:
    """Refuse files that name a parameter that the model does not have. DeepSpeed makes a folder for each name in the
    files, so a name such as ``../x`` would be one elsewhere."""
    for path in sorted(folder.glob("*_states.pt")):
        states = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        optimizer = states.get("optimizer_state_dict") or {}
        shapes = states.get("param_shapes") or []
        named = [states.get("module") or {}, *(optimizer.get("param_slice_mappings") or [])]
        named += shapes if isinstance(shapes, list) else [shapes]
        foreign = sorted({name for group in named for name in group} - names)
        if foreign:
            raise UserError(
                f"{path.name} has {foreign[0]}, which the model of the configuration does not have",
                where="SOURCE",
                remedy="name the configuration of the model that wrote the folder",
            )


def _make_universal(folder: Path, universal: Path) -> None:
    """Convert a ZeRO checkpoint to a universal one."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with redirect_stdout(sys.stderr):
        ds_to_universal.main(
            Namespace(input_folder=str(folder), output_folder=str(universal), inject_missing_state=True, **options)
        )


def _model_states(folder: Path) -> dict[str, Any]:
    """The model states of the first rank: counters, and the module's weights and buffers, memory-mapped."""
    path = min(folder.glob("*_model_states.pt"))
    states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if type(states.get("global_steps")) is not int:
        raise ValueError(f"{path.name} does not say how many steps were made")
    return states


def _optimizer_step(universal: Path) -> Tensor | None:
    """How often all parameters were updated, by ``optimizer_state.pt``, where stage 3 keeps it; None if it is not
    there: stages 1 and 2 keep it for each parameter."""
    path = universal / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    state = (saved.get("optimizer_state_dict") or {}).get("state") or {}
    return None if 0 not in state else torch.as_tensor(state[0]["step"], dtype=torch.float32).clone()


def _weights(universal: Path, model: nn.Module, module: Mapping[str, Tensor]) -> OnDemandTensors:
    """Trained weights from the universal checkpoint; buffers and frozen weights from
    ``module``, where they have their full shape (under stage 3, it has empty tensors for partitioned weights)."""
    live = model.state_dict(keep_vars=True)
    by_tensor: dict[int, OnDemandTensor] = {}
    found = {}
    for name, tensor in live.items():
        path = universal / "zero" / name / f"{WEIGHT}.pt"
        if path.is_file():
            # buffers, which only drawbar writes there, may be of any type: a counter, complex numbers
            dtype = torch.float32 if isinstance(tensor, nn.Parameter) else tensor.dtype
            by_tensor[id(tensor)] = OnDemandTensor(tensor.shape, dtype, partial(_load, path, tensor.shape, dtype))
        elif name in module and module[name].shape == tensor.shape:
            whole = OnDemandTensor(tensor.shape, module[name].dtype, partial(module.__getitem__, name))
            by_tensor.setdefault(id(tensor), whole)
    for name, tensor in live.items():
        if id(tensor) in by_tensor:
            found[name] = by_tensor[id(tensor)]
    return OnDemandTensors(found)


def _moments(universal: Path, model: nn.Module, step: Tensor | None) -> OnDemandTensors:
    """The optimizer's tensors from the universal checkpoint, by ``<parameter>/<key>``.

    Args:
        step: how often all parameters were updated; used for a parameter that has moments and no ``step.pt``.
    """
    found = {}
    for name, parameter in model.named_parameters():
        for key in ADAM_KEYS:
            path = universal / "zero" / name / f"{key}.pt"
            shape = torch.Size() if key == "step" else parameter.shape
            if path.is_file():
                load = partial(_load, path, shape, torch.float32)
                found[f"{name}/{key}"] = OnDemandTensor(shape, torch.float32, load)
            elif key == "step" and step is not None and f"{name}/exp_avg" in found:
                found[f"{name}/step"] = OnDemandTensor(shape, torch.float32, step.clone)
    check_complete(found, lambda name: f"{universal / 'zero' / name}.pt")
    return OnDemandTensors(found)


def _load(path: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    tensor = torch.as_tensor(loaded["param"] if isinstance(loaded, dict) else loaded, dtype=dtype)
    if tensor.numel() != shape.numel():
        raise UserError(
            f"{path.parent.name} has {tensor.numel()} numbers in the folder, and {list(shape)} in the model",
            where="SOURCE",
            remedy="name the configuration of the model that wrote the folder",
        )
    return tensor.reshape(shape)
