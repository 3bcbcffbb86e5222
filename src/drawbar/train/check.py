"""A user's overrides, tried on a few samples before any training: what is wrong is named with its method."""

import json
import math
from itertools import islice
from typing import Any

from drawbar.data.dataset import Sample
from drawbar.engines.engine import Engine
from drawbar.engines.executors import NoNumber
from drawbar.engines.results import EvalResult
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split, joined, predictions_by_record, unknown_metric, with_prediction
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_fault import fault
from drawbar.tasks.overrides import name_failing_method
from drawbar.tasks.task import Task
from drawbar.train.batch_making import make_augment

TRIED_SAMPLES = 8


def check_task(task: Task, engine: Engine, split: Split) -> None:
    """Try a task on the first training sample, alone and twice in a batch; every rank calls it.

    Raises:
        UserError: a method fails, ``loss`` returns a mean, ``num_targets`` does not grow with the samples,
            or ``predict`` or ``collate`` loses samples. The error names the method.
    """
    with name_failing_method(task):
        example = make_augment(task, task.run_config, train=True)(split.samples[0], 0)
    one, two = (_evaluate(task, engine, [example] * count) for count in (1, 2))
    for result in (one, two):
        if not math.isfinite(result.loss):
            return  # an untrained model may have such a loss; training will show whether it stays
    if one.num_targets and math.isclose(two.num_targets, one.num_targets, rel_tol=1e-3):
        raise fault(
            task,
            "num_targets",
            f"returns {one.num_targets:g} for one sample, and for two of it as well",
            "return the number of targets that the loss sums over: tokens, or samples",
        )
    if one.loss and math.isclose(two.loss, one.loss, rel_tol=1e-2):
        raise fault(
            task,
            "loss",
            f"returns {one.loss:g} for one sample, and for two of it as well: a mean",
            'return the sum over the batch (reduction="sum"); drawbar divides by num_targets(batch)',
        )


def check_evaluation(task: Task, engine: Engine, split: Split, metric: str) -> None:
    """Try an evaluation on the first samples of a split; every rank calls it.

    Raises:
        UserError: a method of the task fails (the error names the method), two scores have one name, or none of
            them is ``metric``.
    """
    count = _whole_records(split)
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
            of_loss, own = task.loss_scores(result.loss, result.num_targets or 1.0, records), task.score(records)
    except UserError as error:
        if isinstance(error.__cause__, ZeroDivisionError):
            return  # a score may divide by a count that is 0 in these few samples only
        raise
    for method, scores in (("loss_scores", of_loss), ("score", own)):
        if not isinstance(scores, dict) or not all(isinstance(value, float | int) for value in scores.values()):
            raise fault(task, method, f"returns {scores!r:.80}", 'return a dict of plain numbers: {"accuracy": 0.9}')
    scores = joined(task, of_loss, own)
    if metric not in scores:
        raise unknown_metric(metric, scores, "set eval.metric to one of them")


def _whole_records(split: Split) -> int:
    """How many of the first samples to try: those of whole records, as predictions are put together by record. 0
    where the first record alone has more than ``TRIED_SAMPLES``."""
    of_records = split.samples.record_of[: TRIED_SAMPLES + 1].tolist()
    if len(of_records) <= TRIED_SAMPLES:
        return len(of_records)
    return of_records.index(of_records[TRIED_SAMPLES])


def _evaluate(task: Task, engine: Engine, samples: list[Sample]) -> EvalResult:
    with name_failing_method(task):
        batch = task.collate(samples)
    wanted = [number for sample in samples for number in sample["ids"]]
    if not isinstance(batch, Batch):
        raise fault(task, "collate", f"returns {type(batch).__name__}", "return a drawbar.Batch(tensors, ids)")
    if list(batch.ids) != wanted:
        raise fault(
            task,
            "collate",
            f"gives the ids {batch.ids} for samples {wanted}",
            'give Batch the ids of all its samples, in order: ids=[n for s in samples for n in s["ids"]]',
        )
    with name_failing_method(task):
        try:
            result = engine.eval_step(batch)
        except NoNumber as error:
            remedy = 'return a tensor with one element: the sum over the batch (reduction="sum")'
            raise fault(task, "loss", f"returns what is no number: {error}", remedy) from error
    _check_predictions(task, result.predictions, wanted)
    return result


def _check_predictions(task: Task, predictions: Any, ids: list[int]) -> None:
    if predictions is None:
        return
    if not isinstance(predictions, list) or len(predictions) != len(ids):
        what = f"{len(predictions)} values" if isinstance(predictions, list) else type(predictions).__name__
        raise fault(
            task,
            "predict",
            f"returns {what} for {len(ids)} samples",
            "return a list with one prediction for each sample, in the order of batch.ids",
        )
    try:
        json.dumps(predictions)
    except (TypeError, ValueError) as error:
        raise fault(
            task,
            "predict",
            f"returns what JSON cannot hold: {error}",
            "return plain numbers, strings, lists and dicts: tensor.tolist()",
        ) from error
