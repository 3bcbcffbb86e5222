"""Converts a checkpoint of a run to a folder of another format; and makes a model's folder, for ``task.model``, of the
weights in another trainer's checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import EMA
from drawbar.checkpoint.read import explain_unusable, read_snapshot
from drawbar.checkpoint.space import rust_errors_as_oserror
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.schema.run_config import RunConfig
from drawbar.convert.dcp_folders import read_dcp, write_dcp
from drawbar.data.tokenizer import load_tokenizer
from drawbar.errors import UserError
from drawbar.models.huggingface import from_hub, quiet_transformers, unused_weights
from drawbar.models.saving import save_transformers
from drawbar.runtime.log import logger
from drawbar.runtime.pretrained_files import read_config, read_generation_config
from drawbar.runtime.safetensors_reader import OnDemandTensors, parameters_on_meta
from drawbar.util.atomic_files import new_folder


def convert_run(config: RunConfig, checkpoint: str, to: str, folder: Path) -> int:
    """Write one checkpoint of a run as a folder of another format, tensor by tensor; returns its step.

    Args:
        checkpoint: ``latest``, ``best``, a step, or a path.
        to: ``dcp`` or ``deepspeed``.
        folder: absent or empty; it appears when it is complete.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; or the folder cannot be written.
    """
    folder = folder.absolute()
    check_new_folder(folder, "--output")
    if config.lora is not None:
        raise UserError(
            "a LoRA run has adapters alone, which are no whole model's state",
            where="--to",
            remedy="`drawbar export` writes them for peft, and with --merge the whole model",
        )
    if (config.optim.name, config.optim.state_dtype) != ("adamw", "fp32"):
        raise UserError(
            f"--to {to} writes the state of AdamW with moments in fp32, and the run's optimizer is {config.optim.name}"
            + (f" with moments in {config.optim.state_dtype}" if config.optim.name == "adamw" else ""),
            where="--to",
            remedy="`drawbar export` writes the weights",
        )
    path = CheckpointDirectory(config.run_dir / "checkpoints").resolve(checkpoint)
    snapshot = read_snapshot(path)
    state: Any = snapshot.optimizer
    moments = state.renamed({name: name for name in state if not name.endswith(f"/{EMA}")})
    model, optimizer = (_with_explained_errors(tensors, path) for tensors in (snapshot.model, moments))
    with writing(folder, "--output"), _disk_errors(), new_folder(folder) as draft:
        if to == "dcp":
            write_dcp(draft, model, optimizer)
        else:
            from drawbar.deepspeed.folders import write_universal  # a guest, which may not be there

            write_universal(draft, snapshot.step, model, optimizer)
    return snapshot.step


def _with_explained_errors(tensors: Any, path: Path) -> OnDemandTensors:
    """The tensors of the checkpoint ``path``, read on demand. Reading one raises a ``UserError`` if the
    checkpoint is damaged or the disk fails."""

    def get(name: str) -> Tensor:
        with explain_unusable(path):
            return tensors[name]

    return OnDemandTensors.of(tensors, get)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Context that raises the OSError behind an error of torch's file writers: after a failed write, they
    raise an error of their own, about what they could not write then."""
    try:
        yield
    except dcp.CheckpointException as error:  # torch puts together what has failed on each rank
        first = next(iter(error.failures.values()))[0]
        raise _disk_error(first) or first from error
    except RuntimeError as error:
        raise _disk_error(error) or error from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that led to ``error``, by its chain of causes; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def import_weights(source: Path, form: str, model_name: str, folder: Path) -> None:
    """Write the weights of a checkpoint as a folder for ``from_pretrained``, in fp32, with config and
    tokenizer.

    Args:
        form: ``dcp`` or ``deepspeed``.
        model_name: folder or hub name of the model that was trained; its weights are not read.
        folder: absent or empty; it appears when it is complete.

    Raises:
        UserError: the checkpoint cannot be read, or is another model's; there is no such model; or the disk
            takes no more.
    """
    folder = folder.absolute()
    check_new_folder(folder, "--output")
    if not source.is_dir():
        raise UserError(f"there is no folder {source}", where="SOURCE", remedy="name the folder of a checkpoint")
    model = _model_without_weights(model_name)
    read = _weights_of(model, _reader(form)(source), source)
    with writing(folder, "--output"), new_folder(folder) as draft, rust_errors_as_oserror(draft):
        save_transformers(model, read, draft, torch.float32, "5GB")
        _save_tokenizer(model_name, draft)


def _reader(form: str) -> Callable[[Path], OnDemandTensors]:
    """A function that returns the tensors of a folder by the names in it; weights are among them."""
    if form == "dcp":
        return read_dcp
    from drawbar.deepspeed.folders import read_deepspeed  # a guest, which may not be there

    return read_deepspeed


def _model_without_weights(name: str) -> PreTrainedModel:
    """The model on the meta device, as its ``config.json`` describes it."""

    def build(name: str, local_files_only: bool) -> PreTrainedModel:
        config = read_config(name, local_files_only=local_files_only)
        model_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
        if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
            raise UserError(
                f"architectures in {name}/config.json is {config.architectures}: no class of transformers",
                remedy="name the class there, as save_pretrained does",
            )
        with quiet_transformers(), parameters_on_meta():
            model = model_class(config)
        if model.can_generate():
            model.generation_config = read_generation_config(name, local_files_only=local_files_only)
        return model

    try:
        return from_hub(build, name)
    except UserError as error:  # which speaks of task.model, the same kind of name
        raise _of_another_model(error.what) from error


def _weights_of(model: PreTrainedModel, stored: OnDemandTensors, source: Path) -> Callable[[str], Tensor]:
    """From a name of the model's ``state_dict`` to the tensor in the checkpoint.

    Raises:
        UserError: the checkpoint lacks a parameter, has one of another shape, or has more of them.
    """
    parameters, tensors = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    prefix = _prefix(stored, list(parameters), source)
    own = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
    for name, parameter in parameters.items():
        is_flat = stored.shape(prefix + name) == (parameter.numel(),)
        if stored.shape(prefix + name) != parameter.shape and not is_flat:
            raise _of_another_model(
                f"{name} is {list(stored.shape(prefix + name))} in {source}, and {list(parameter.shape)} in the model"
            )
    unused = unused_weights(model, own - tensors.keys())
    if unused:
        raise _of_another_model(f"{source} has {unused[0]}, for which the model has no place")
    first_names = {id(parameter): name for name, parameter in parameters.items()}
    first_name = {name: first_names.get(id(tensor), name) for name, tensor in tensors.items()}
    for name, first in first_name.items():
        if first != name and name in own and not torch.equal(stored[prefix + name], stored[prefix + first]):
            raise _of_another_model(f"{name} and {first} are one tensor in the model, and two in {source}")

    def read(name: str) -> Tensor:
        name = first_name[name]
        # DeepSpeed's universal checkpoints lack buffers: they are then as the model's class makes them
        return stored[prefix + name].reshape(tensors[name].shape) if name in own else tensors[name].detach()

    return read


def _prefix(stored: OnDemandTensors, names: list[str], source: Path) -> str:
    """What stands before the names of all parameters in the checkpoint: ``model.``, say, or nothing.

    Raises:
        UserError: nothing fits all names, or several things do.
    """
    found = {key.removesuffix(names[0]) for key in stored if f".{key}".endswith(f".{names[0]}")}
    complete = [prefix for prefix in sorted(found) if all(prefix + name in stored for name in names)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        raise _of_another_model(f"the model's weights are in {len(complete)} places of {source}: {', '.join(complete)}")
    missing = next((name for prefix in sorted(found) for name in names if prefix + name not in stored), names[0])
    raise _of_another_model(f"{source} does not have all weights of the model: {missing} is missing")


def _of_another_model(what: str) -> UserError:
    return UserError(
        what,
        where="--model",
        remedy="name the model that was trained: a folder whose config.json is that of the checkpoint's model, with "
        "its architectures, sizes and ties",
    )


def _save_tokenizer(model_name: str, folder: Path) -> None:
    try:
        tokenizer = load_tokenizer(model_name)
    except UserError as error:
        logger.warning("the folder gets no tokenizer, and a run needs task.tokenizer: %s", error.what)
        return
    tokenizer.save_pretrained(str(folder))
