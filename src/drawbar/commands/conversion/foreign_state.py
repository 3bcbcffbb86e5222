"""``ForeignState``: the content of another program's checkpoint, under the names of the model that will resume from
it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from drawbar.checkpoint.load import explain_read_errors
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.models.lora import saved_tensors
from drawbar.optim.state import check_optimizer_state, missing_adam_key
from drawbar.parallel.weights import check_weights
from drawbar.runtime.on_demand_tensors import OnDemandTensor, OnDemandTensors
from drawbar.runtime.safetensors_reader import shape_of


@dataclass(frozen=True)
class ForeignState:
    """A checkpoint of another program."""

    step: int
    """Optimizer steps made."""
    model: Mapping[str, Tensor]
    """Weights and buffers by the model's names, in the types that they are stored in."""
    optimizer: Mapping[str, Tensor]
    """Optimizer state by ``<parameter>/<key>``, where ``<key>`` is one of ``ADAM_KEYS``."""


def check_complete(state: Iterable[str], place: Callable[[str], str]) -> None:
    """Refuse a parameter that has some of AdamW's tensors and lacks others. One that has none is accepted: it never got
    a gradient.

    Args:
        state: names of the optimizer's tensors, ``<parameter>/<key>``.
        place: from such a name to the name in the folder.

    Raises:
        UserError: it names the tensor that is missing.
    """
    missing = missing_adam_key(state)
    if missing is not None:
        parameter = missing.rpartition("/")[0]
        raise UserError(
            f"the folder does not have all that AdamW keeps of {parameter}: {place(missing)} is missing",
            where="SOURCE",
            remedy="restore it from a copy, or use another folder",
        )


def convert_to_model(
    state: ForeignState, model: nn.Module, config: RunConfig, source: Path
) -> tuple[OnDemandTensors, OnDemandTensors]:
    """Weights and optimizer state as drawbar keeps them: in the types of the model, moments in fp32; each is read and
    converted when it is asked for.

    Args:
        model: on the meta device.
        source: the folder that is converted, for errors.

    Raises:
        UserError: they do not fit the model, or there is no optimizer state.
    """
    live = saved_tensors(model, config)
    check_weights(live, state.model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_optimizer_state(set(parameters), state.optimizer)
    if not state.optimizer:
        raise UserError("there is no optimizer state in the folder", where="SOURCE", remedy=_WITHOUT_OPTIMIZER)
    for name in state.optimizer:
        parameter, _, key = name.rpartition("/")
        wanted = torch.Size() if key == "step" else parameters[parameter].shape
        if shape_of(state.optimizer, name) != wanted:
            raise UserError(
                f"the optimizer's {key} of {parameter} is {list(shape_of(state.optimizer, name))} in the folder, "
                f"and should be {list(wanted)}",
                where="SOURCE",
                remedy="name the configuration of the model that wrote the folder",
            )

    def converted(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> OnDemandTensor:
        def get() -> Tensor:
            with explain_read_errors(source):
                return tensors[name].to(dtype)

        return OnDemandTensor(shape_of(tensors, name), dtype, get)

    by_tensor: dict[int, OnDemandTensor] = {}
    weights = {
        name: by_tensor.setdefault(id(tensor), converted(state.model, name, tensor.dtype))
        for name, tensor in live.items()
    }
    moments = {name: converted(state.optimizer, name, torch.float32) for name in state.optimizer}
    return OnDemandTensors(weights), OnDemandTensors(moments)


_WITHOUT_OPTIMIZER = (
    "a run cannot go on from weights alone; begin a new one from them: write them as a Hugging Face folder, and name "
    "that in task.model"
)


def keeps_adamw_state(config: RunConfig) -> bool:
    """Whether the run's optimizer state is what other programs keep, too: AdamW's, with moments in fp32."""
    return config.optim.name == "adamw" and config.optim.state_dtype == "fp32"


@contextmanager
def disk_errors() -> Iterator[None]:
    """Context that raises the OSError behind an error of torch's file writers: after a failed write, they raise an
    error of their own, about what they could not write then."""
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
