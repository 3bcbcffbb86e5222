"""The largest micro-batches that a run may get: every sample as long as the settings allow."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.loader import TOKEN_FIELDS, MicroBatch
from drawbar.data.packing import RowLayout
from drawbar.distributed.process_group import Distributed
from drawbar.engines.executors import count_targets, with_targets
from drawbar.models.segments import find_segments
from drawbar.runtime.torch_internals import FakeTensorMode, _disable_current_modes
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import method_error
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.batches import FIRST_RECORDS, OpenedSplit, batch_maker, first_samples, train_micro_batch

_DECODER_FIELDS = ("labels", "decoder_input_ids")


def longest_sample(task: Task, config: RunConfig, world: Distributed, records: Any) -> Sample:
    """The first sample of the training data, stretched to the longest that the settings allow. Samples without
    ``input_ids`` have no length that settings limit: of these, one is put together of the largest arrays (by number of
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
    tokens, length = len(sample["input_ids"]), config.data.sequence_length
    target_length = getattr(config.task, "target_length", None) or length
    unstretched = ("id", "ids", *(("labels",) if task.label_placement == "sample" else ()))
    for name, value in sample.items():
        if np.ndim(value) == 0 or name in unstretched:
            continue
        if task.label_placement == "decoder" and name in _DECODER_FIELDS:
            sample[name] = np.resize(value, target_length)
        elif len(value) == tokens:
            sample[name] = np.resize(value, (length, *np.shape(value)[1:]))
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
