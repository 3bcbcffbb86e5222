"""Makes a short training, and records losses, gradient norms, gradients and weights."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.errors import ExitCode, UserError
from drawbar.parallel.pipeline.stages import LocalStages
from drawbar.parallel.replicas import unequal_replicas
from drawbar.parity.comparison import Fault, StepStart, Trace
from drawbar.parity.workload import Workload, has_dropout
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console


def train(
    workload: Workload,
    config: RunConfig,
    world: Distributed,
    console: Console | None = None,
    start: StepStart | None = None,
    until: int | None = None,
) -> Trace:
    """Make the steps after ``start`` (by default the first ones); every rank of ``world`` calls it.

    Args:
        config: the workload's, with a case applied to it, or that of the reference.
        start: where to continue from.
        until: the last step; by default the workload's.

    Raises:
        UserError: the data cannot be read, or the configuration cannot be run so.
    """
    engine = workload.engine(config, world)  # first: what cannot be run here is refused before the data are encoded
    with closing(engine):
        loader = workload.loader(config, world, console)
        engine.total_steps = workload.total_steps(config, loader.steps_per_epoch)
        first, last = 1, until or workload.steps
        if start is not None:
            values = {**start.engine.values, "precision": config.precision}
            # copies: an optimizer keeps what it is given, and changes it
            moments = {name: tensor.clone() for name, tensor in start.engine.optimizer.items()}
            engine.load(EngineState(start.engine.model, moments, values))
            loader.load(start.data)
            first = start.step + 1
        trace = Trace(first_trained_step=first)
        for step, micro_batches in loader.steps(first - 1, last):
            record = partial(_record_gradients, trace, step, (first, last), engine, world)
            with engine.inspecting(record), _name_users_method(engine.task):
                result = engine.train_step(micro_batches)
            trace.losses[step] = float(result.loss)
            trace.grad_norms[step] = float(result.grad_norm)
            trace.skipped += [step] if result.skipped else []
            if step == last - 1 and config.precision != "fp32":
                trace.before_last = StepStart(step, engine.state(), loader.state())
        trace.weights = dict(engine.state().model)
        trace.ties = groups_of_tied_names(trace.weights)
        trace.unequal += unequal_weights(engine, world, trace.ties, "after the last step")
    reports = world.gather(repr((trace.losses, trace.grad_norms)))
    for rank, report in enumerate(reports or []):
        if report != repr((trace.losses, trace.grad_norms)):  # as text, NaN is equal to itself
            trace.unequal.append(Fault("", f"rank {rank} reports other losses or gradient norms than rank 0"))
    return trace


def _name_users_method(task: Task) -> AbstractContextManager[None]:
    """Context of a training step. If the user defines one of these methods, an error names the task's method that
    raised it; else it passes unchanged, and the result of the case names the module that raised it."""
    has_own = is_user_defined(task, "forward", "loss", "num_targets")
    return name_failing_method(task) if has_own else nullcontext()


def train_with_dropout(workload: Workload, config: RunConfig, world: Distributed) -> list[Fault]:
    """Replicas that differ after two steps with the model's own dropout, seeded as in a run; on rank 0.

    Tensor-parallel ranks must draw the same numbers: where one draws more than another, replicas drift apart.
    """
    workload = replace(workload, keeps_dropout=True)
    loader = workload.loader(config, world)
    engine = workload.engine(config, world, workload.total_steps(config, loader.steps_per_epoch))
    with closing(engine):
        if not any(has_dropout(module) for module in modules_of(engine)):
            return []
        seed_everything(config.run.seed, world.dims.seed_rank(world.rank))
        for _, micro_batches in loader.steps(0, 2):
            engine.train_step(micro_batches)
        return unequal_weights(engine, world, [], "after two steps with dropout")


def _record_gradients(trace: Trace, step: int, ends: tuple[int, int], engine: Engine, world: Distributed) -> None:
    """Record the gradients of the first and of the last step; those of all steps would be too many."""
    if step not in ends:
        return
    trace.gradients[step] = engine.gradients()
    trace.unequal += unequal_shards(engine.gradients_equal_on_replicas(), world, "gradients", f"in step {step}")


def check_finite(trace: Trace) -> None:
    """Refuse a reference that nothing can be compared with.

    Raises:
        UserError: its loss, or its gradient, is not a number.
    """
    for what, values in (("loss", trace.losses), ("gradient norm", trace.grad_norms)):
        for step, value in values.items():
            if not math.isfinite(value):
                raise UserError(
                    f"the {what} of step {step} is {value}, in one process and fp32: there is nothing to compare with",
                    remedy="mend the task, or lower optim.lr",
                    exit_code=ExitCode.FAILED,
                )


def modules_of(engine: Engine) -> list[nn.Module]:
    """The model, or the stages of it, that this rank computes with, without what replicates it."""
    return list(engine.module.stage_modules) if isinstance(engine.module, LocalStages) else [engine.module]


def clean_name(name: str) -> str:
    """A module's or parameter's name without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts)


def groups_of_tied_names(tensors: dict[str, Tensor]) -> list[list[str]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def unequal_weights(engine: Engine, world: Distributed, ties: Sequence[Sequence[str]], when: str) -> list[Fault]:
    """:func:`unequal_shards` of the weights."""
    return unequal_shards(engine.equal_on_replicas(), world, "weights", when, ties)


def unequal_shards(
    tensors: Mapping[str, Tensor], world: Distributed, what: str, when: str, ties: Sequence[Sequence[str]] = ()
) -> list[Fault]:
    """The tensors that differ, in any bit, between ranks that hold the same shard; on rank 0."""
    named = {clean_name(name): tensor for name, tensor in tensors.items()}
    return [
        Fault(name, f"ranks {first[0]} and {other[0]} hold different {what} of {name} {when}")
        for name, (first, other, *_) in unequal_replicas(named, world, ties).items()
    ]
