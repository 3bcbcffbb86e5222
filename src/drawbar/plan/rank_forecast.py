"""The forecast of one rank: what a step takes, counted in two steps of its engine on fake tensors, with the largest
micro-batches that it may get: every sample as long as the settings allow."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from drawbar.config.parallel_dims import AXES, ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.loader import TOKEN_FIELDS, MicroBatch
from drawbar.data.packing import RowLayout
from drawbar.distributed.process_group import Distributed
from drawbar.engines.build import assemble_engine
from drawbar.engines.engine import Engine
from drawbar.engines.executors import count_targets, with_targets
from drawbar.engines.updaters import TorchUpdater
from drawbar.models.segments import find_segments
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
from drawbar.runtime.torch_internals import FakeTensorMode, _disable_current_modes
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import method_error
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.batches import FIRST_RECORDS, OpenedSplit, batch_maker, first_samples, train_micro_batch
from drawbar.train.checkpoint_layouts import checkpoint_bytes

_DECODER_FIELDS = ("labels", "decoder_input_ids")


def longest_sample(task: Task, config: RunConfig, world: Distributed, records: Any) -> Sample:
    """The first sample of the training data, stretched to the longest that the settings allow. Samples without
    ``input_ids`` have no length that settings limit: of these, one is assembled from the largest arrays (by number of
    elements) that each field has in the first records.

    Raises:
        UserError: the first records cannot be read or encoded.
    """
    split = first_samples(OpenedSplit("train", records), task, config, world, Console())
    sample = dict(split.samples[0])
    if np.ndim(sample.get("input_ids", 0)) != 1:
        first = [split.samples[number] for number in range(min(len(split.samples), FIRST_RECORDS))]
        largest = {name: max((one[name] for one in first if name in one), key=np.size) for name in sample}
        return {**largest, **{name: sample[name] for name in ("id", "ids") if name in sample}}
    tokens, length = len(sample["input_ids"]), task.row_length
    target_length = getattr(config.task, "target_length", None) or length
    unstretched = ("id", "ids", *(("labels",) if task.label_placement == "sample" else ()))
    for name, value in sample.items():
        if np.ndim(value) == 0 or name in unstretched:
            continue
        if task.label_placement == "decoder" and name in _DECODER_FIELDS:
            sample[name] = np.resize(value, target_length)
        elif len(value) == tokens:
            sample[name] = np.asarray(value)[np.arange(length) * tokens // length]  # in order, as segments are
    if task.label_placement == "next_token" and "labels" in sample:
        sample["labels"] = sample["input_ids"]  # all are targets: where the first sample has a prompt, others have none
    return sample


def rows_and_count(config: RunConfig, world: Distributed, sample: Sample) -> tuple[int, int]:
    """Rows of the largest micro-batch, and how many micro-batches a rank has in a step, if all rows are as long as
    ``sample``."""
    has_tokens = "input_ids" in sample
    size, share = train_micro_batch(config, world, has_tokens), -(-config.train.global_batch // world.dp_ranks.size)
    rows = share if size.rows is None else min(share, size.rows)
    if size.tokens is not None:
        sides = [len(sample[name]) for name in TOKEN_FIELDS if np.ndim(sample.get(name, 0))]
        rows = min(rows, max(1, size.tokens // max(sides, default=1)))  # the longer side counts, as in loaders
    return rows, -(-share // rows)


def worst_micro_batch(task: Task, config: RunConfig, sample: Sample, rows: int) -> MicroBatch[Batch]:
    """A micro-batch of ``rows`` copies of the sample, on the host."""
    make = batch_maker(task, config)
    samples = [make.augment({**sample, "id": number, "ids": [number]}, 0) for number in range(rows)]
    if config.data.batching == "packed" and task.label_placement is not None:
        layout = RowLayout.of_sample(samples[0], task.label_placement)
        samples = [layout.join([one]) for one in samples]
    batch = make.collate(samples)
    if not isinstance(batch, Batch):  # as a run says before its first step (``check_task``)
        raise method_error(task, "collate", f"returns {type(batch).__name__}", "return a drawbar.Batch(tensors, ids)")
    return MicroBatch(batch)


def targets_and_fake(
    task: Task, micro: MicroBatch[Batch], loss_in_head: bool, mode: FakeTensorMode
) -> tuple[float, MicroBatch[Batch]]:
    """The number of targets of a micro-batch, and its copy without memory. What depends on the values of its tensors is
    computed first: that number, the positions of the targets, and the segments of packed rows."""
    with _disable_current_modes():
        with name_failing_method(task):
            targets = count_targets(task, [micro])
        (ready,) = with_targets(task, [micro], loss_in_head)
        sides = [ready.batch[name] for name in ("segment_ids", "decoder_segment_ids") if name in ready.batch]
        segments = find_segments(*sides) if sides else ()
    fake = Batch({name: mode.from_tensor(tensor) for name, tensor in ready.batch.items()}, ready.batch.ids)
    if segments:
        fake["segment_ids"].segments = tuple(_fake_fields(one, mode) for one in segments)
    return targets, MicroBatch(fake)


def _fake_fields(segments: Any, mode: FakeTensorMode) -> Any:
    tensors = {name: mode.from_tensor(value) for name, value in vars(segments).items() if isinstance(value, Tensor)}
    groups = tuple(
        group if group.real is None else replace(group, real=mode.from_tensor(group.real)) for group in segments.groups
    )
    return replace(segments, **tensors, groups=groups)


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
        UserError: the strategy cannot run this model on this many ranks.
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
            updated = size_of(dict.fromkeys(chain.from_iterable(map(_updated, optimizers))))
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
