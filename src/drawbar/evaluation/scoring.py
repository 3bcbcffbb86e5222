"""Evaluation: sums and counts over every sample exactly once, independent of number of processes and batch size."""

import json
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from drawbar.config.io.user_modules import raised_at
from drawbar.data.dataset import EncodedDataset
from drawbar.data.loader import Augment, EvalLoader, MicroBatchSize, SampleRows
from drawbar.data.sources import Record
from drawbar.distributed.liveness import is_peer_failure
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.pulse import Kind
from drawbar.engines.engine import Engine
from drawbar.engines.results import EvalResult
from drawbar.errors import ExitCode, UserError, nearest
from drawbar.tasks.batch import Batch, PredictFunction
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.util.atomic_files import replacing, write_durably
from drawbar.util.strict_json import json_line, json_number

SAMPLES_FILE = "samples.jsonl"
MOST_UNREAD = 1024
"""Maximum number of losses kept on the device: each takes at least 512 bytes of CUDA memory."""


@dataclass(frozen=True)
class Split:
    """One encoded part of the data."""

    name: str
    records: Sequence[dict[str, Any]]
    samples: EncodedDataset
    kept: bool = False
    """Whether the samples are in the cache for the next run."""
    reference: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The fields that ``Task.reference_fields`` gave the samples, each of shape (samples,)."""


@dataclass(frozen=True)
class WrittenText:
    """A text of the model, and what it was asked."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Evaluation:
    """Scores (the same on every rank) and, on rank 0, the records with their predictions."""

    scores: dict[str, float]
    records: list[dict[str, Any]]
    texts: Sequence[WrittenText] = ()
    """Those of ``eval.samples``."""


class EvaluationFailed(UserError):
    """An evaluation failed on some rank. Every rank raises this, so that together they can still save."""

    trace = ""
    """The traceback on that rank."""
    has_waited = False
    """Whether that rank had waited in vain for another one, whose error it hides."""

    @classmethod
    def of(cls, error: BaseException, world: Distributed) -> Self:
        """The message of ``error``, with the line that raised it unless it is a UserError."""
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        known = error
        if not isinstance(known, UserError):
            found = raised_at(error)
            known = UserError(
                f"{type(error).__name__}: {error}",
                where=f"{found[0]}, line {found[1]}" if found else None,
                remedy="correct what the message names; the log of the run has the whole traceback",
                exit_code=ExitCode.FAILED,
            )
        what = f"the evaluation failed{on_rank}: {known.what}"
        failed = cls(what, where=known.where, remedy=known.remedy, exit_code=known.exit_code)
        failed.__cause__ = error
        failed.origin = world.describe()
        failed.has_waited = is_peer_failure(error)
        failed.trace = "".join(traceback.format_exception(error)).rstrip()
        return failed


def evaluate(
    engine: Engine,
    task: Task,
    split: Split,
    world: Distributed,
    micro_batch: MicroBatchSize,
    augment: Augment,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop_wanted: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate on one split, and on each of its sources that has a name (``NAME/loss``). Rows are padded and sorted by
    length, regardless of ``data.batching``.

    Args:
        micro_batch: maximum size of one forward.
        augment: see ``drawbar.data.prefetch.Augment``.
        progress: called with (batches done, total batches) of this rank.
        stop_wanted: whether this rank was asked to stop; called after each batch.

    Returns:
        None if any rank was asked to stop: all of them abandon the evaluation after the same batch.

    Raises:
        EvaluationFailed: a batch or the scoring failed, or the split has no targets to compute a loss over.
        Exception: a batch failed on this rank while others waited for it in a collective of the forward, until that
            timed out.
    """
    world.barrier("evaluating")  # waits for a busy rank as long as it takes; a collective of the forward would time out
    engine.share_buffers()
    parts = parts_of(split)
    loader = _loader(engine, task, split, world, micro_batch, augment, [part.samples for part in parts])
    batches, results = iter(loader), [_RankResults() for _ in parts]
    world.set_activity(f"evaluating {split.name}", Kind.CALLBACK)
    with engine.evaluating():
        for done, part in enumerate(loader.parts, start=1):
            failure = None
            try:
                micro = next(batches)
                result = engine.eval_step(micro.batch)
                if not micro.is_padding:
                    results[part].add(result, _with_ids(task, micro.batch.ids, result.predictions))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - every rank raises it, below
                failure = error
            if not _agree_to_go_on(failure, stop_wanted(), world):
                return None
            world.set_activity(_progress_text("evaluating", split, done, len(loader)), Kind.CALLBACK)
            progress(done, len(loader))
    return _score(task, split, parts, results, world)


class Part(NamedTuple):
    """The samples and records of one source."""

    name: str | None
    samples: range
    records: range


def parts_of(split: Split) -> list[Part]:
    """The sources of a split, if one of them has a name; else all of it as one part."""
    streams = getattr(split.records, "streams", [])
    if all(stream.name is None for stream in streams):
        return [Part(None, range(len(split.samples)), range(split.samples.records))]
    samples, records = split.samples.samples_of_sources.tolist(), split.samples.records_of_sources
    starts = [0, *accumulate(samples)], [0, *accumulate(records)]
    parts = [
        Part(stream.name, range(starts[0][i], starts[0][i + 1]), range(starts[1][i], starts[1][i + 1]))
        for i, stream in enumerate(streams)
    ]
    empty = next((part.name for part in parts if part.name is not None and not part.samples), None)
    if empty is not None:
        raise UserError(
            f"the source {empty!r} gives no sample",
            where=f"data.{split.name}",
            remedy="check its files and data.limit, or leave its name out",
        )
    return [part for part in parts if part.samples]


@dataclass
class _RankResults:
    """Sums and predictions of one rank."""

    loss: float = 0.0
    """The sum of the losses read so far, in batch order."""
    unread: list[torch.Tensor] = field(default_factory=list)
    """The losses (0-d) of later batches, still on the device, as reading each would make the host wait."""
    num_targets: float = 0.0
    predictions: list[tuple[int, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Add the unread losses; the host waits for the device here."""
        for loss in torch.stack(self.unread).tolist() if self.unread else ():
            self.loss += loss  # not sum(), whose result depends on the version of Python
        self.unread = []

    def add(self, result: EvalResult, predictions: list[tuple[int, Any]]) -> None:
        self.unread.append(result.loss)
        if len(self.unread) == MOST_UNREAD:
            self.read()
        self.num_targets += result.num_targets
        self.predictions += predictions


class _Vote(IntEnum):
    """A rank's vote after each batch; the largest vote wins."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


def _agree_to_go_on(failure: BaseException | None, stop: bool, world: Distributed) -> bool:
    """Agree on whether to continue with the next batch. A failure on one rank is raised on all."""
    own = _Vote.FAIL if failure is not None else _Vote.STOP if stop else _Vote.GO_ON
    try:
        agreed = world.max(own)
    except (RuntimeError, UserError):
        if failure is not None:
            raise failure from None  # the other ranks did not vote: they waited for this one in the forward
        raise
    if agreed == _Vote.FAIL:
        own_error = None if failure is None else EvaluationFailed.of(failure, world)
        errors = [error for error in world.all_gather(own_error) if error is not None]
        raise min(errors, key=lambda error: error.has_waited)
    return agreed == _Vote.GO_ON


def _score(
    task: Task, split: Split, parts: Sequence[Part], results: Sequence[_RankResults], world: Distributed
) -> Evaluation:
    """The scores from the results of all ranks."""
    sums = []
    for own in results:
        own.read()
        sums.append((world.dp_ranks.sum_of_leaders(own.loss), world.dp_ranks.sum_of_leaders(own.num_targets)))
    gathered = world.dp_ranks.gather_from_leaders([pair for own in results for pair in own.predictions])
    records: list[dict[str, Any]] = []

    def score() -> dict[str, float]:
        try:
            records.extend(_merge(task, split, [pair for part in gathered or [] for pair in part]))
            total, count = (math.fsum(one) for one in zip(*sums, strict=True))
            scores = _scores(task, split, total, count, records)
            for part, (loss, num_targets) in zip(parts, sums, strict=True):
                if part.name is not None:
                    inside = [record for record in records if record["id"] in part.records]
                    of_part = _scores(task, split, loss, num_targets, inside)
                    scores |= {f"{part.name}/{name}": value for name, value in of_part.items()}
            return {name: float(value) for name, value in scores.items()}
        except (Exception, SystemExit) as error:
            raise EvaluationFailed.of(error, world) from error

    return Evaluation(world.from_rank0(score, "scoring"), records)


def _loader(
    engine: Engine,
    task: Task,
    split: Split,
    world: Distributed,
    micro_batch: MicroBatchSize,
    augment: Augment,
    parts: Sequence[range] | None = None,
) -> EvalLoader[Batch]:
    """This rank's batches, of one sample each if other samples would change its loss or prediction."""
    model = engine.meta_model
    alone = isinstance(task, PretrainedTask) and (task.computes_alone(model) or task.predicts_alone(model))
    return EvalLoader(
        SampleRows(split.samples),
        micro_batch=MicroBatchSize(rows=1) if alone else micro_batch,
        dp_rank=world.dp_ranks.rank,
        dp_size=world.dp_ranks.size,
        collate=task.collate,
        augment=augment,
        parts=parts,
    )


def _progress_text(what: str, split: Split, done: int, total: int) -> str:
    return f"{what} {split.name}: {done} of {total} batches done"


def _scores(
    task: Task, split: Split, loss: float, num_targets: float, records: list[dict[str, Any]]
) -> dict[str, float]:
    if num_targets == 0:
        raise UserError(
            f"the {split.name} data has nothing to compute a loss over",
            where=f"data.{split.name}",
            remedy="check that its samples have labels",
        )
    return merge_scores(task, task.loss_scores(loss, num_targets, records), task.score(records))


def merge_scores(task: Task, of_loss: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    """Merge the results of ``loss_scores`` and ``score`` into one dict.

    Raises:
        UserError: both return a score of the same name.
    """
    both = sorted(of_loss.keys() & own.keys())
    if both:
        raise UserError(
            f"{type(task).__name__}.score and loss_scores both return {both[0]!r}",
            where="task.metrics",
            remedy="give one of them another name",
        )
    return {**of_loss, **own}


def predict(
    engine: Engine,
    task: Task,
    split: Split,
    world: Distributed,
    micro_batch: MicroBatchSize,
    augment: Augment,
    predict_fn: PredictFunction,
    progress: Callable[[int, int], None] = lambda done, total: None,
    within: Callable[[], AbstractContextManager[None]] | None = None,
) -> list[tuple[int, Any]]:
    """(sample, result of ``predict_fn``) of each sample, in any order, on rank 0; on others an empty list. Needs no
    labels.

    Args:
        within: the context of the steps; by default ``engine.evaluating``. For the others see ``evaluate``.
    """
    world.barrier("predicting")  # as in evaluate()
    predictions: list[tuple[int, Any]] = []
    loader = _loader(engine, task, split, world, micro_batch, augment)
    with (within or engine.evaluating)():
        for done, micro in enumerate(loader, start=1):
            found = _with_ids(task, micro.batch.ids, engine.predict_step(micro.batch, predict_fn))
            predictions += found if not micro.is_padding else []
            world.set_activity(_progress_text("predicting", split, done, len(loader)), Kind.CALLBACK)
            progress(done, len(loader))
    gathered = world.dp_ranks.gather_from_leaders(predictions)
    return [pair for part in gathered or () for pair in part]


def unknown_metric(metric: str, scores: Iterable[str], remedy: str) -> UserError:
    """The error for an ``eval.metric`` that is not one of the scores."""
    names = sorted(scores)
    near = nearest(metric, names) or next((name for name in names if metric in name.split("_")), None)
    hint = f"; did you mean {near}?" if near else ""
    return UserError(
        f"eval.metric is {metric!r}, but the scores are {', '.join(names)}{hint}",
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


def _merge(task: Task, split: Split, predictions: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    """The records that gave samples, in order, each with its number and its prediction."""
    of_record = predictions_by_record(split, predictions)
    numbers = np.unique(split.samples.record_of).tolist()
    return [with_prediction(task, number, split.records[number], of_record) for number in numbers]


def with_prediction(task: Task, number: int, record: Record, predictions: Mapping[int, Any]) -> dict[str, Any]:
    """The record as passed to a task's ``score``: with its number, and its prediction if any."""
    scored = {"id": number, **record}
    if number in predictions:
        scored["prediction"] = task.postprocess(record, predictions[number])
    return scored


def predictions_by_record(split: Split, predictions: list[tuple[int, Any]]) -> dict[int, Any]:
    """The prediction of each record by its number; a list of them, for a record of several samples."""
    found: dict[int, list[Any]] = {}
    for sample, prediction in sorted(predictions, key=lambda pair: pair[0]):
        found.setdefault(int(split.samples.record_of[sample]), []).append(prediction)
    return {number: several[0] if len(several) == 1 else several for number, several in found.items()}


def write_results(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Write ``scores.json`` and, if there are any, ``predictions.jsonl`` and the texts of this and of earlier steps,
    ``samples.jsonl``, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"step": step, "records": len(evaluation.records)}
    scores = {name: json_number(value) for name, value in evaluation.scores.items()}
    write_durably(folder / "scores.json", json.dumps({**numbers, **scores}, indent=2) + "\n")
    if any("prediction" in record for record in evaluation.records):
        with replacing(folder / "predictions.jsonl") as file:
            for record in evaluation.records:
                file.write(json_line(record))
    if evaluation.texts:
        path = folder / SAMPLES_FILE
        before = path.read_text("utf-8").splitlines() if path.exists() else []
        lines = [f"{line}\n" for line in before if json.loads(line)["step"] < step]
        lines += [json_line({"step": step, **asdict(text)}).decode() for text in evaluation.texts]
        write_durably(path, "".join(lines))
