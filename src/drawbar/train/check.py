"""A task's methods, tried on a few samples before training: an error names the method."""

import json
import math
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from drawbar.config.schema.run_config import EvalSection, RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.executors import NotOneNumber, no_gradient, not_one_number
from drawbar.engines.results import EvalResult
from drawbar.errors import UserError
from drawbar.evaluation.samples import write_samples
from drawbar.evaluation.scoring import Split, merge_scores, predictions_by_record, unknown_metric, with_prediction
from drawbar.models.lora import saved_tensors
from drawbar.runtime.log import logger
from drawbar.runtime.safetensors_reader import STORED_DTYPES
from drawbar.runtime.torch_internals import _BatchNorm
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import is_user_defined, method_error
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.batches import OpenedSplit, first_samples, make_augment

TRIED_SAMPLES = 8


def check_on_samples(
    task: Task,
    engine: Engine,
    opened: tuple[OpenedSplit, OpenedSplit | None],
    config: RunConfig,
    world: Distributed,
    console: Console,
) -> Split:
    """Try the task, the model and the settings on a few samples, before the run starts and before the data are encoded,
    which may take hours. Collective.

    Returns:
        The first training samples.

    Raises:
        UserError: as ``check_saved_state``, ``first_samples``, ``check_task``, ``check_evaluation``, ``check_mode`` and
            ``engine.check_savable`` do.
    """
    train, validation = opened
    world.set_activity("trying the task on a sample")
    check_saved_state(task, engine)
    tried = first_samples(train, task, config, world, console)
    check_task(task, engine, tried)
    if validation is not None:
        first = first_samples(validation, task, config, world, console)
        check_evaluation(task, engine, validation, first, config.eval)
        check_mode(config.eval)
    engine.check_savable()
    return tried


def check_mode(section: EvalSection) -> None:
    """Refuse a configuration whose ``eval.mode`` is still undecided.

    Raises:
        UserError: the metric is user-defined, and ``eval.mode`` is not set.
    """
    if section.mode == "auto":
        raise UserError(
            f"drawbar does not know whether a lower or a higher {section.metric} is better",
            where="eval.mode",
            remedy="set eval.mode=min or eval.mode=max",
        )


def with_rows_alone(task: Task, engine: Engine, config: RunConfig) -> RunConfig:
    """The configuration with micro-batches of one sample, if other samples in a batch would change a sample's loss.

    Raises:
        UserError: the loss would change, and rows hold several samples (``data.batching: packed``).
    """
    if not isinstance(task, PretrainedTask) or not task.computes_alone(engine.meta_model):
        return config
    family = engine.meta_model.config.model_type
    if config.data.batching == "packed":
        raise UserError(
            f"this {family} model computes a sample differently next to a longer one, and packed rows hold several",
            where="data.batching",
            remedy="set data.batching=grouped; with rotary embeddings of the kind longrope, a data.sequence_length of "
            "the model's original_max_position_embeddings or less will do as well",
        )
    if config.train.micro_batch != 1 and engine.world.is_rank0:
        logger.warning(
            "this %s model computes a sample differently next to a longer one: train.micro_batch is set to 1, and "
            "evaluation also takes one sample at a time",
            family,
        )
    train = config.train.model_copy(update={"micro_batch": 1, "micro_batch_tokens": None})
    return config.model_copy(update={"train": train})


def check_saved_state(task: Task, engine: Engine) -> None:
    """Check that a checkpoint can store all of the model's state. Not collective: every rank knows the names and types
    of the whole model.

    Raises:
        UserError: a module defines ``get_extra_state``, or a saved tensor is a copy, or has a dtype that checkpoints do
            not store.
    """
    for name, module in engine.meta_model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise method_error(
                task,
                "build_model",
                f"returns a model with state that checkpoints do not restore: {name or 'it'} is a "
                f"{type(module).__name__}, which defines get_extra_state",
                "keep that state in buffers (register_buffer), and remove get_extra_state and set_extra_state",
            )
    live = {id(tensor) for tensor in (*engine.meta_model.parameters(), *engine.meta_model.buffers())}
    for name, value in saved_tensors(engine.meta_model, engine.config).items():
        if isinstance(value, torch.Tensor) and id(value) not in live:
            raise method_error(
                task,
                "build_model",
                f"returns a model whose checkpoints cannot be loaded: {name} in its state_dict is a copy, not a "
                "parameter or buffer of the model",
                "leave parameters and buffers in state_dict as they are, without a hook or a _save_to_state_dict of "
                "your own",
            )
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if kind not in STORED_DTYPES.values():
            raise method_error(
                task,
                "build_model",
                f"returns a model that checkpoints cannot store: {name} is {kind}",
                f"make it one of {', '.join(str(dtype).removeprefix('torch.') for dtype in STORED_DTYPES.values())}; a "
                "buffer that need not be saved can be of any type, with persistent=False",
            )


def check_task(task: Task, engine: Engine, split: Split) -> None:
    """Try a task on a batch of the first training sample once, and of the same sample twice. Collective.

    Raises:
        UserError: a method fails, ``loss`` returns a mean or has no gradient, ``num_targets`` is not a count or does
            not grow with the samples, or ``predict`` or ``collate`` loses samples. The error names the method.
    """
    with name_failing_method(task):
        example = make_augment(task, task.run_config, train=True)(split.samples[0], 0)
    one, two = (_evaluate(task, engine, [example] * count) for count in (1, 2))
    if two.num_targets and is_user_defined(task, "forward", "loss"):
        _check_gradient(task, engine, example)
    of_one, of_two = float(one.loss), float(two.loss)
    are_finite = math.isfinite(of_one) and math.isfinite(of_two)
    if not _on_all_ranks(engine, are_finite):
        return  # an untrained model may have such a loss; training will show whether it persists
    if one.num_targets and math.isclose(two.num_targets, one.num_targets, rel_tol=1e-3):
        raise method_error(
            task,
            "num_targets",
            f"returns {one.num_targets:g} for one sample, and also for two copies of it",
            "return the number of targets that the loss sums over: tokens, or samples",
        )
    if of_one and math.isclose(of_two, of_one, rel_tol=1e-2):
        raise method_error(
            task,
            "loss",
            f"returns {of_one:g} for one sample, and also for two copies of it, so it is a mean",
            'return the sum over the batch (reduction="sum"); drawbar divides by num_targets(batch)',
        )
    _warn_of_batch_norm(engine)


def compare_with_neighbours(task: Task, engine: Engine, split: Split) -> None:
    """Warn if the shortest sample has a different loss in a batch with the longest one than alone: the model then sees
    the padding, or treats the batch as a whole. Collective."""
    if isinstance(task, PretrainedTask) and task.computes_alone(engine.meta_model):
        return  # samples never share a batch: see with_rows_alone
    samples = split.samples
    if "input_ids" in samples.fields:
        sizes = samples.lengths
    else:
        tried = (samples[number].values() for number in range(min(len(samples), TRIED_SAMPLES)))
        sizes = np.array([sum(np.size(value) for value in values) for values in tried])
    shortest, longest = int(sizes.argmin()), len(sizes) - 1 - int(sizes[::-1].argmax())  # distinct even if sizes equal
    with name_failing_method(task):
        augment = make_augment(task, task.run_config, train=True)
        ends = [augment(samples[number], 0) for number in (shortest, longest)]

    def both_ways() -> tuple[float, float]:
        of_each = [float(_evaluate(task, engine, [sample]).loss) for sample in ends]
        return sum(of_each), float(_evaluate(task, engine, ends).loss)

    alone, together = both_ways()
    limit = 1e-4 if engine.config.precision == "fp32" else 2e-2
    differ = math.isfinite(alone) and not math.isclose(alone, together, rel_tol=limit)
    # once more: collate may draw random numbers
    if _on_all_ranks(engine, differ) and (alone, together) == both_ways() and engine.world.is_rank0:
        logger.warning(
            "the loss of two samples is %.6g if each is alone, and %.6g if they are in one batch: the model sees the "
            "padding, or treats the batch as a whole. Losses and scores will depend on train.micro_batch, "
            "eval.micro_batch and the number of processes. A loss that compares samples needs train.micro_batch to be "
            "a process's whole share of train.global_batch; micro-batches of 1 help only if the loss is meaningful "
            "for a single sample",
            alone,
            together,
        )


def _warn_of_batch_norm(engine: Engine) -> None:
    modules = engine.module.named_modules()
    found = next((name for name, module in modules if isinstance(module, _BatchNorm)), None)
    if found is not None and engine.world.is_rank0:
        logger.warning(
            "the layer %s normalizes over the samples of a micro-batch: in training, losses depend on "
            "train.micro_batch and on the number of processes",
            found,
        )


def check_evaluation(task: Task, engine: Engine, whole: OpenedSplit, split: Split, section: EvalSection) -> None:
    """Try an evaluation on the first samples of a split. Collective.

    Args:
        split: with the first samples of the ``whole``.

    Raises:
        UserError: a method of the task fails (the error names the method), two scores have the same name, none is
            that of ``eval.metric``, or the task writes no ``eval.samples``.
    """
    count = _count_samples_of_whole_records(split)
    if not count:
        return
    samples = [split.samples[number] for number in range(count)]
    with name_failing_method(task):
        augment = make_augment(task, task.run_config, train=False)
        rows = [augment(sample, 0) for sample in samples]
    result = _evaluate(task, engine, rows)
    of_records = split.samples.record_of[: len(samples)].tolist()
    first = dict(islice(enumerate(split.records), of_records[-1] + 1))  # without reading all of them on every rank
    predictions = predictions_by_record(split, list(enumerate(result.predictions or ())))
    with name_failing_method(task):
        records = [with_prediction(task, number, first[number], predictions) for number in dict.fromkeys(of_records)]
    try:
        with name_failing_method(task):
            of_loss, own = task.loss_scores(float(result.loss), result.num_targets or 1.0, records), task.score(records)
    except UserError as error:
        if isinstance(error.__cause__, ZeroDivisionError):
            return  # a score may divide by a count that happens to be 0 in these few samples
        raise
    for method, scores in (("loss_scores", of_loss), ("score", own)):
        if not isinstance(scores, dict) or not all(isinstance(value, float | int) for value in scores.values()):
            raise method_error(
                task, method, f"returns {scores!r:.80}", 'return a dict of plain numbers: {"accuracy": 0.9}'
            )
    scores = merge_scores(task, of_loss, own)
    names = [stream.name for stream in getattr(whole.records, "streams", []) if stream.name is not None]
    of_sources = [f"{source}/{name}" for source in names for name in scores]
    if section.metric not in (*scores, *of_sources):
        raise unknown_metric(section.metric, [*scores, *of_sources], "set eval.metric to one of them")
    write_samples(engine, task, split, records, section.model_copy(update={"sample_tokens": 1}))


def _count_samples_of_whole_records(split: Split) -> int:
    """How many of the first samples to try: those of complete records, as predictions are joined by record. 0 if the
    first record alone has more than ``TRIED_SAMPLES`` samples."""
    of_records = split.samples.record_of[: TRIED_SAMPLES + 1].tolist()
    if len(of_records) <= TRIED_SAMPLES:
        return len(of_records)
    return of_records.index(of_records[TRIED_SAMPLES])


def _evaluate(task: Task, engine: Engine, samples: list[Sample]) -> EvalResult:
    with name_failing_method(task):
        batch = task.collate(samples)
    wanted = [number for sample in samples for number in sample["ids"]]
    if not isinstance(batch, Batch):
        raise method_error(task, "collate", f"returns {type(batch).__name__}", "return a drawbar.Batch(tensors, ids)")
    if list(batch.ids) != wanted:
        raise method_error(
            task,
            "collate",
            f"gives the ids {batch.ids} for samples {wanted}",
            'give Batch the ids of all its samples, in order: ids=[n for s in samples for n in s["ids"]]',
        )
    with name_failing_method(task):
        try:
            result = engine.eval_step(batch)
        except NotOneNumber as error:
            raise not_one_number(task, error) from error
    _check_num_targets(task, batch, result)
    _check_predictions(task, result.predictions, wanted)
    return result


def _check_num_targets(task: Task, batch: Batch, result: EvalResult) -> None:
    """Refuse a ``num_targets`` that is not a count, or a user's own that is 0 for a batch with a loss, unless all of
    its ``labels`` are ignored."""
    found: object = result.num_targets  # a user's own method may return anything
    if not isinstance(found, Real) or not math.isfinite(found) or found < 0:
        raise method_error(
            task,
            "num_targets",
            f"returns {found!r:.80}, which is not a number of targets",
            "return a plain number, 0 or more (for a tensor, tensor.item())",
        )
    labels = batch.get("labels")
    all_ignored = labels is not None and bool((labels == IGNORED_LABEL).all())
    if not found and result.loss and is_user_defined(task, "num_targets") and not all_ignored:
        raise method_error(
            task,
            "num_targets",
            f"returns 0 for a batch of {len(batch.ids)} with a loss of {result.loss:g}",
            "return the number of targets that the loss sums over: tokens, or samples",
        )


def _check_gradient(task: Task, engine: Engine, example: Sample) -> None:
    """Refuse a loss with a gradient in neither training nor evaluation mode. Some losses have none
    for a single sample or in evaluation mode, and batch normalization refuses a single sample in training mode."""
    for count, training in ((1, False), (2, True)):
        with name_failing_method(task):
            batch = task.collate([example] * count).to(engine.world.device)
            found = engine.executor.has_gradient(batch, training)
        if _on_all_ranks(engine, found):
            return
    raise no_gradient(task)


def _on_all_ranks(engine: Engine, answer: bool) -> bool:
    """Whether ``answer`` is true on every rank: the next check has collectives, so either all ranks run it or none."""
    return engine.world.sum_counts([int(answer)]) == [engine.world.size]


def _check_predictions(task: Task, predictions: Any, ids: list[int]) -> None:
    if predictions is None and not task.predicts:
        return
    if not isinstance(predictions, list) or len(predictions) != len(ids):
        what = f"{len(predictions)} values" if isinstance(predictions, list) else type(predictions).__name__
        raise method_error(
            task,
            "predict",
            f"returns {what} for {len(ids)} samples",
            "return a list with one prediction for each sample, in the order of batch.ids",
        )
    try:
        json.dumps(predictions)
    except (TypeError, ValueError) as error:
        raise method_error(
            task,
            "predict",
            f"returns predictions that JSON cannot represent: {error}",
            "return plain numbers, strings, lists and dicts: tensor.tolist()",
        ) from error
