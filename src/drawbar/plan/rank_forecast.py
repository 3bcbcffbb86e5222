"""The forecast of one rank: what a step takes, counted in two steps of its engine on fake tensors."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drawbar.config.parallel_dims import AXES, ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.loader import MicroBatch
from drawbar.engines.build import assemble_engine
from drawbar.engines.engine import Engine
from drawbar.engines.updaters import TorchUpdater
from drawbar.parallel.zero1 import local_optimizer
from drawbar.plan.fake_world import FakeWorld, fake_tensors
from drawbar.plan.step_recorder import (
    GRADIENTS,
    OFFLOADED,
    OPTIMIZER,
    PARAMETERS,
    Peak,
    StepRecorder,
    size_of,
)
from drawbar.plan.worst_batch import rows_and_count, targets_and_fake, worst_micro_batch
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from drawbar.train.checkpoint_layouts import checkpoint_bytes


@dataclass(frozen=True)
class RankForecast:
    """What one rank takes."""

    rank: int
    stage: int
    """Its coordinate along ``pp``: its pipeline stage; with ``interleaved``, which gives it two, the first of them."""
    parameters: int
    """In bytes; so are ``gradients`` and ``optimizer``."""
    gradients: int
    optimizer: int
    peak: Peak
    sent: dict[str, int]
    """Bytes that the rank sends in a step, by axis of the mesh."""
    flops: float
    """Floating-point operations of the rank in a step, recomputation included."""
    rows: int
    """Rows in a micro-batch."""
    micro_batches: int
    """Number of micro-batches in a step."""
    checkpoint: int
    """Bytes of one checkpoint, of all ranks together."""


def forecast_rank(
    build_task: Callable[[RunConfig], Task],
    config: RunConfig,
    sample: Sample,
    dims: ParallelDims,
    rank: int,
    ranks_per_node: int,
    devices_are_cpus: bool,
) -> RankForecast:
    """Make two steps as one rank of a run, with no more micro-batches than are needed to tell what a whole step takes
    (see ``_counts``), and return that.

    Args:
        build_task: from a configuration to a task without weights (``TaskContext.weightless``).
        config: resolved, and one that can be run on fake tensors: see ``run_forecast``.
        sample: the longest one, see ``longest_sample``.
        devices_are_cpus: whether the ranks' devices are CPUs.

    Raises:
        UserError: the strategy cannot run this model on so many ranks.
    """
    with FakeWorld(rank, dims, ranks_per_node) as world:
        task = build_task(config)
        rows, count = rows_and_count(config, world, sample)
        micro = worst_micro_batch(task, config, sample, rows)
        meta_model = task.build_meta_model()  # needs real tensors, and the engine asks for it where all are fake
        task.build_meta_model = lambda: meta_model  # type: ignore[method-assign]
        with fake_tensors() as mode, StepRecorder(partial(_axes_of, dims), devices_are_cpus) as recorder:
            engine = assemble_engine(task, config, world, total_steps=100)
            assert isinstance(engine.updater, TorchUpdater), "DeepSpeed is estimated"
            parameters = list(engine.module.parameters())
            recorder.follow(parameters, PARAMETERS)
            recorder.logits_widths = _vocabularies(engine, dims)
            targets, fake = targets_and_fake(task, micro, engine.cross_entropy != "plain", mode)
            recorder.begin()
            few, most = _counts(config, dims, count)
            steps = [
                _step(engine, recorder, [fake] * made, targets * made * world.dp_ranks.size) for made in (few, most)
            ]
            optimizers = list(map(local_optimizer, engine.updater.optimizers))
            optimizer = list(chain.from_iterable(map(_state, optimizers)))
            updated = size_of(chain.from_iterable(map(_updated, optimizers)))
            recorder.follow(optimizer, OPTIMIZER)
            first, last = steps
            return RankForecast(
                rank=rank,
                stage=dims.coordinates(rank)["pp"],
                parameters=size_of(parameters),
                gradients=last.gradients,
                optimizer=size_of(optimizer),
                peak=recorder.peak(offloaded=OFFLOADED if config.parallel.offload and not devices_are_cpus else ()),
                sent={
                    axis: round(_extrapolated(first.sent[axis], sent, few, most, count))
                    for axis, sent in last.sent.items()
                },
                flops=_extrapolated(first.flops, last.flops, few, most, count),
                rows=rows,
                micro_batches=count,
                checkpoint=checkpoint_bytes(engine, size_of(optimizer) / max(1, updated)),
            )


@dataclass(frozen=True)
class _Step:
    """What one step took."""

    gradients: int
    flops: float
    sent: Counter[str]


def _step(engine: Engine, recorder: StepRecorder, micro_batches: list[MicroBatch[Batch]], targets: float) -> _Step:
    flops, sent, found = recorder.flops, Counter(recorder.traffic), 0

    def note_gradients() -> None:
        nonlocal found
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        recorder.follow(gradients, GRADIENTS)
        found = size_of(gradients)

    with engine.inspecting(note_gradients):
        engine.train_step(micro_batches, targets)
    return _Step(found, recorder.flops - flops, recorder.traffic - sent)


def _counts(config: RunConfig, dims: ParallelDims, count: int) -> tuple[int, int]:
    """How many micro-batches the first and the second step have. The difference of the two steps gives what each
    further micro-batch takes, and the second one reaches the most micro-batches that the rank holds at once: a stage
    holds all of them with GPipe, as many as there are stages with 1F1B, and more than that with ``interleaved``, where
    a rank has two stages."""
    if dims.pp == 1:
        return min(count, 1), min(count, 2)
    if config.parallel.schedule in ("gpipe", "interleaved"):
        return min(count, dims.pp), count
    return min(count, dims.pp), min(count, 2 * dims.pp)


def _extrapolated(first: float, last: float, few: int, most: int, count: int) -> float:
    """The value for ``count`` micro-batches, linear in their number: ``first`` is that for ``few``, ``last`` for
    ``most``."""
    return last if most == few else last + (count - most) * (last - first) / (most - few)


def _state(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _updated(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer updates."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _vocabularies(engine: Engine, dims: ParallelDims) -> set[int]:
    """The sizes that the last dim of logits may have: the vocabulary, and a tensor-parallel rank's part of it."""
    config: Any = getattr(engine.meta_model, "config", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) if hasattr(config, "get_text_config") else None
    return set() if vocabulary is None else {vocabulary, -(-vocabulary // dims.tp)}


def _axes_of(dims: ParallelDims, ranks: list[int]) -> str:
    """The mesh axes along which these ranks differ, joined by ``+``."""
    places = [dims.coordinates(rank) for rank in ranks]
    return "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)
