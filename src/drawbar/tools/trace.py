"""A short training, and all that can be seen of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drawbar.config.schema import RunConfig
from drawbar.engines.engine import Engine
from drawbar.engines.native import NativeEngine
from drawbar.errors import ExitCode, UserError
from drawbar.parallel.stages import Parts
from drawbar.runtime.dist import World
from drawbar.tools.compare import GRADIENT_FLOOR, Note, Tolerances, Trace, norm, usual_size
from drawbar.tools.subject import Subject
from drawbar.tracking.console import Console

Part = tuple[str, tuple[tuple[int, int], ...]]
"""A parameter's name, and where along which axes of its mesh the part stands."""


def train(
    subject: Subject, config: RunConfig, world: World, tolerances: Tolerances, console: Console | None = None
) -> Trace:
    """Make the first steps; every rank of ``world`` calls it.

    Args:
        config: the subject's, run in one of its ways.
        tolerances: what replicas of one value may differ by.

    Raises:
        UserError: the configuration cannot be run so, or the loss is no number.
    """
    loader = subject.loader(config, world, console)
    engine = subject.engine(config, world, loader.steps_per_epoch)
    trace = Trace()
    with closing(engine):
        for step, micro_batches in loader.steps(0, subject.steps):
            with before_update(engine, partial(_look, trace, step, subject.steps, engine, world, tolerances)):
                result = engine.train_step(micro_batches)
            trace.losses.append(float(result.loss))
            trace.grad_norms.append(float(result.grad_norm))
            trace.skipped += [step] if result.skipped else []
        trace.weights = dict(engine.state().model)
        trace.ties = tied_names(trace.weights)
        weights = {clean_name(name): parameter for name, parameter in native(engine).comparable().items()}
        trace.unequal += unequal_parts(weights, world, tolerances.weights, "weights", "after the last step")
    reports = world.gather((trace.losses, trace.grad_norms))
    for rank, report in enumerate(reports or []):
        if not _alike(report, (trace.losses, trace.grad_norms), tolerances):
            trace.unequal.append(Note("", f"rank {rank} reports other losses or gradient norms than rank 0"))
    return trace


def _look(trace: Trace, step: int, last: int, engine: Engine, world: World, tolerances: Tolerances) -> None:
    """Keep the gradients of the first and of the last step; each step's would be too many."""
    if step not in (1, last):
        return
    trace.gradients[step] = engine.gradients()
    gradients = {clean_name(name): gradient for name, gradient in native(engine).comparable_gradients().items()}
    trace.unequal += unequal_parts(gradients, world, tolerances.gradients, "gradients", f"in step {step}")


@contextmanager
def before_update(engine: Engine, look: Callable[[], None]) -> Iterator[None]:
    """Call ``look()`` in the step made inside, when its gradients are complete, and neither clipped nor used."""
    kept, native(engine).before_update = native(engine).before_update, look
    try:
        yield
    finally:
        native(engine).before_update = kept


def check_finite(trace: Trace) -> None:
    """Refuse a reference that nothing can be compared with.

    Raises:
        UserError: its loss, or its gradient, is no number.
    """
    for what, values in (("loss", trace.losses), ("gradient norm", trace.grad_norms)):
        for step, value in enumerate(values, 1):
            if not math.isfinite(value):
                raise UserError(
                    f"the {what} of step {step} is {value}, in one process and fp32: there is nothing to compare with",
                    remedy="mend the task, or lower optim.lr",
                    exit_code=ExitCode.FAILED,
                )


def native(engine: Engine) -> NativeEngine:
    assert isinstance(engine, NativeEngine), "every engine of this program is one"
    return engine


def modules_of(engine: Engine) -> list[nn.Module]:
    """The model, or the stages of it, that this rank computes with, without what replicates it."""
    module = native(engine).module
    return list(module.parts) if isinstance(module, Parts) else [module]


def clean_name(name: str) -> str:
    """A module's or parameter's name without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts)


def tied_names(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names of one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def unequal_parts(tensors: Mapping[str, Tensor], world: World, tolerance: float, what: str, when: str) -> list[Note]:
    """Which tensors differ between ranks that hold the same part of them; on rank 0.

    Ranks exchange three numbers for each tensor, not the tensor: its norm, its sum, its product with a fixed vector.
    """
    prints = {_part(name, tensor): _print(tensor) for name, tensor in tensors.items()}
    reports: Sequence[dict[Part, list[float]]] | None = world.gather(prints)
    if reports is None or world.size == 1:
        return []
    floor = GRADIENT_FLOOR * usual_size({name: _local(tensor) for name, tensor in tensors.items()})
    firsts: dict[Part, tuple[int, list[float]]] = {}
    worst: dict[str, tuple[float, int, int]] = {}
    for rank, report in enumerate(reports):
        for part, values in report.items():
            first, expected = firsts.setdefault(part, (rank, values))
            size = max(expected[0], values[0], floor * math.sqrt(values[3]))
            apart = max(abs(one - other) for one, other in zip(values[:3], expected[:3], strict=True))
            name = part[0]
            if not apart <= tolerance * size and not worst.get(name, (0.0, 0, 0))[0] >= apart / size:
                worst[name] = (apart / size, first, rank)
    return [
        Note(name, f"ranks {first} and {rank} hold different {what} of {name} {when} (by {value:.1e})")
        for name, (value, first, rank) in sorted(worst.items(), key=lambda item: -item[1][0])
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _part(name: str, tensor: Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return name, ()
    at = tensor.device_mesh.get_coordinate() or []
    cut = [(axis, at[axis]) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return name, tuple(cut)


def _print(tensor: Tensor) -> list[float]:
    local = _local(tensor).flatten().double()
    vector = torch.arange(local.numel(), device=local.device, dtype=torch.float64).cos()
    return [norm(local), float(local.sum()), float(local @ vector), float(local.numel())]


def _alike(one: Any, other: Any, tolerances: Tolerances) -> bool:
    limits = (tolerances.loss, tolerances.grad_norm)
    return all(
        math.isclose(a, b, rel_tol=limit) or (math.isnan(a) and math.isnan(b))
        for found, expected, limit in zip(one, other, limits, strict=True)
        for a, b in zip(found, expected, strict=True)
    )
