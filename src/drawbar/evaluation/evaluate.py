"""Evaluation: sums and counts over every sample exactly once, whatever the number of processes and the batch size."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.data.dataset import EncodedDataset
from drawbar.data.loader import EvalLoader, RowDataset
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.dist import World
from drawbar.tasks.task import Task
from drawbar.tracking.trackers import json_number


@dataclass(frozen=True)
class Split:
    """One encoded part of the data."""

    name: str
    records: Sequence[dict[str, Any]]
    samples: EncodedDataset
    rows: RowDataset
    """What batches are made of: the samples, or packs of them."""


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
    micro_batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate on one split.

    Args:
        progress: called with (batches done, batches in all) of this rank.

    Raises:
        UserError: the split has no units to compute a loss over, or ``predict`` returns too few or too many.
    """
    loader = EvalLoader(
        split.rows, micro_batch=micro_batch, rank=world.rank, world_size=world.size, collate=task.collate
    )
    loss, weight, predictions = 0.0, 0.0, []
    for done, micro in enumerate(loader, start=1):
        result = engine.eval_step(micro.batch)
        if micro.counts:
            loss += result.loss
            weight += result.weight
            predictions.extend(_with_ids(task, micro.batch.ids, result.predictions))
        if progress is not None:
            progress(done, len(loader))
    loss, weight = world.sum(loss), world.sum(weight)
    gathered = world.gather(predictions)
    if weight == 0:
        raise UserError(
            f"the {split.name} data has nothing to compute a loss over",
            where=f"data.{split.name}",
            remedy="check that its samples have labels",
        )
    merged = _merge(split, [pair for part in gathered for pair in part]) if gathered is not None else []
    scores = world.from_first(lambda: {**task.loss_scores(loss, weight, merged), **task.score(merged)})
    return Evaluation({name: float(value) for name, value in scores.items()}, merged)


def check_metric(task: Task, split: Split, metric: str) -> None:
    """Refuse, before any training, a metric that no evaluation can give.

    Only where the task has no ``score`` of its own: what that one returns is not known before it is called.

    Raises:
        UserError: it names the scores that there are.
    """
    if type(task).score is Task.score:
        names = task.loss_scores(1.0, 1.0, [{**split.records[0], "id": 0}])
        if metric not in names:
            raise unknown_metric(metric, names, "set eval.metric to one of them")


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
    """The records that gave samples, in order, each with its prediction (a list of them, for several samples)."""
    of_record: dict[int, list[Any]] = {}
    for sample, prediction in sorted(predictions, key=lambda pair: pair[0]):
        of_record.setdefault(int(split.samples.record_of[sample]), []).append(prediction)
    merged = []
    for number in sorted({int(record) for record in split.samples.record_of}):
        record = {**split.records[number], "id": number}
        if number in of_record:
            found = of_record[number]
            record["prediction"] = found[0] if len(found) == 1 else found
        merged.append(record)
    return merged


def write_results(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Write ``scores.json`` and, where there are predictions, ``predictions.jsonl``. Each is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = {name: json_number(value) for name, value in evaluation.scores.items()}
    _write(folder / "scores.json", json.dumps({"step": step, **scores}, indent=2) + "\n")
    if any("prediction" in record for record in evaluation.records):
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in evaluation.records)
        _write(folder / "predictions.jsonl", "".join(lines))


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
