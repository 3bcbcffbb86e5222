"""Evaluation: sums and counts over every sample exactly once, whatever the number of processes and the batch size."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drawbar.data.dataset import EncodedDataset
from drawbar.data.loader import EvalLoader, MicroBatch, MicroBatchSize, SampleRows, Vary
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.dist import World
from drawbar.runtime.files import write_whole
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from drawbar.tracking.trackers import json_number


@dataclass(frozen=True)
class Split:
    """One encoded part of the data."""

    name: str
    records: Sequence[dict[str, Any]]
    samples: EncodedDataset


@dataclass(frozen=True)
class Evaluation:
    """Scores (the same on every rank) and, on rank 0, the records with their predictions."""

    scores: dict[str, float]
    records: list[dict[str, Any]]


def evaluate(
    engine: Engine,
    task: Task,
    split: Split,
    world: World,
    micro_batch: MicroBatchSize,
    vary: Vary,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate on one split. Rows are padded, and sorted by length, whatever training does.

    Args:
        micro_batch: most that one forward takes.
        vary: see ``drawbar.data.loader.Vary``.
        progress: called with (batches done, batches in all) of this rank.

    Raises:
        UserError: the split has no units to compute a loss over, or ``predict`` returns too few or too many.
    """
    world.barrier("evaluating")  # a rank that still does something else is not waited for in a collective
    loss, weight, predictions = 0.0, 0.0, []
    for micro in _batches(task, split, world, micro_batch, vary, progress):
        result = engine.eval_step(micro.batch)
        if micro.counts:
            loss += result.loss
            weight += result.weight
            predictions.extend(_with_ids(task, micro.batch.ids, result.predictions))
    loss, weight = world.data.sum(loss), world.data.sum(weight)
    gathered = world.data.gather(predictions)
    if weight == 0:
        raise UserError(
            f"the {split.name} data has nothing to compute a loss over",
            where=f"data.{split.name}",
            remedy="check that its samples have labels",
        )
    with world.working("merging the predictions"):
        merged = _merge(split, [pair for part in gathered for pair in part]) if gathered is not None else []
    scores = world.from_first(lambda: _scores(task, loss, weight, merged), "scoring")
    return Evaluation({name: float(value) for name, value in scores.items()}, merged)


def _batches(
    task: Task,
    split: Split,
    world: World,
    micro_batch: MicroBatchSize,
    vary: Vary,
    progress: Callable[[int, int], None] | None,
) -> Iterator[MicroBatch[Batch]]:
    """This rank's batches; ``progress`` hears of each when it is done."""
    loader = EvalLoader(
        SampleRows(split.samples),
        micro_batch=micro_batch,
        rank=world.data.rank,
        world_size=world.data.size,
        collate=task.collate,
        vary=vary,
    )
    for done, micro in enumerate(loader, start=1):
        yield micro
        world.note(f"evaluating {split.name}: {done} of {len(loader)} batches done")
        if progress is not None:
            progress(done, len(loader))


def _scores(task: Task, loss: float, weight: float, records: list[dict[str, Any]]) -> dict[str, float]:
    of_loss, own = task.loss_scores(loss, weight, records), task.score(records)
    both = sorted(of_loss.keys() & own.keys())
    if both:
        raise UserError(
            f"{type(task).__name__}.score and loss_scores both return {both[0]!r}",
            where="task.metrics",
            remedy="give one of them another name",
            exit_code=ExitCode.FAILED,
        )
    return {**of_loss, **own}


def predict(
    engine: Engine,
    task: Task,
    split: Split,
    world: World,
    micro_batch: MicroBatchSize,
    vary: Vary,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, Any]:
    """The predictions by the number of their record, on rank 0. No labels are needed. Args as for ``evaluate``."""
    world.barrier("predicting")  # as in evaluate()
    predictions: list[tuple[int, Any]] = []
    for micro in _batches(task, split, world, micro_batch, vary, progress):
        found = _with_ids(task, micro.batch.ids, engine.predict_step(micro.batch))
        predictions += found if micro.counts else []
    gathered = world.data.gather(predictions)
    return _by_record(split, [pair for part in gathered for pair in part]) if gathered is not None else {}


def unknown_metric(metric: str, scores: Iterable[str], remedy: str) -> UserError:
    """The error of an ``eval.metric`` that is none of the scores."""
    return UserError(
        f"eval.metric is {metric!r}, but the scores are {', '.join(sorted(scores))}",
        where="eval.metric",
        remedy=remedy,
    )


def _with_ids(task: Task, ids: list[int], predictions: list[Any] | None) -> list[tuple[int, Any]]:
    if predictions is None:
        return []
    if len(predictions) != len(ids):
        raise UserError(
            f"{type(task).__name__}.predict returned {len(predictions)} predictions for {len(ids)} samples",
            remedy="return one prediction for each sample of the batch, in the order of batch.ids",
            exit_code=ExitCode.FAILED,
        )
    return list(zip(ids, predictions, strict=True))


def _merge(split: Split, predictions: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    """The records that gave samples, in order, each with its number and its prediction."""
    of_record = _by_record(split, predictions)
    merged = []
    for number in np.unique(split.samples.record_of).tolist():
        record = {"id": number, **split.records[number]}
        if number in of_record:
            record["prediction"] = of_record[number]
        merged.append(record)
    return merged


def _by_record(split: Split, predictions: list[tuple[int, Any]]) -> dict[int, Any]:
    """The prediction of each record by its number; a list of them, for a record of several samples."""
    found: dict[int, list[Any]] = {}
    for sample, prediction in sorted(predictions, key=lambda pair: pair[0]):
        found.setdefault(int(split.samples.record_of[sample]), []).append(prediction)
    return {number: several[0] if len(several) == 1 else several for number, several in found.items()}


def write_results(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Write ``scores.json`` and, where there are predictions, ``predictions.jsonl``. Each is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = {name: json_number(value) for name, value in evaluation.scores.items()}
    write_whole(folder / "scores.json", json.dumps({"step": step, **scores}, indent=2) + "\n")
    if any("prediction" in record for record in evaluation.records):
        lines = (json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in evaluation.records)
        write_whole(folder / "predictions.jsonl", "".join(lines))
