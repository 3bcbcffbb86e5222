"""``Task``: what a user writes. Override one method or all of them.

The engine calls ``forward``, ``num_targets`` and your ``loss`` for each batch, ``predict`` to evaluate. A task need not
divide a loss, move a tensor to a device or ask how many processes there are: the engine does.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import nn

from drawbar.config.schema.run_config import DataSection, RunConfig, TaskConfig, run_config_type
from drawbar.data.class_labels import ClassNumber
from drawbar.data.dataset import Sample
from drawbar.data.packing import LabelPlacement
from drawbar.data.sources import Records, open_records
from drawbar.data.tables import columns_of, misread_header, value_at
from drawbar.errors import UserError
from drawbar.runtime.safetensors_reader import parameters_on_meta
from drawbar.tasks.batch import Batch, pad_and_stack
from drawbar.tasks.method_errors import call_for_attribute, method_error, undefined_method_error
from drawbar.tasks.task_context import TaskContext


class WatchedRecord(dict[str, Any]):
    """A copy of a record. Taking all of its columns at once counts as looking at each."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.read: set[str] = set()
        """The columns that were looked at so far."""

    def __getitem__(self, column: str) -> Any:
        self.read.add(column)
        return super().__getitem__(column)

    def __contains__(self, column: object) -> bool:
        self.read.add(str(column))
        return super().__contains__(column)

    def get(self, column: str, default: Any = None) -> Any:
        self.read.add(column)
        return super().get(column, default)

    def __iter__(self) -> Iterator[str]:
        self.read |= super().keys()
        return super().__iter__()

    def keys(self) -> Any:
        self.read |= super().keys()
        return super().keys()

    def values(self) -> Any:
        self.read |= super().keys()
        return super().values()

    def items(self) -> Any:
        self.read |= super().keys()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


T = TypeVar("T")


class Task:
    """A model, its data, its loss and its scores."""

    Config: type[TaskConfig] = TaskConfig
    """This task's own options; each field is a key under ``task:`` and a command-line override."""

    label_placement: LabelPlacement | None = None
    """Where the ``labels`` of a sample are placed: ``next_token``, ``token``, ``sample`` or ``decoder``, see
    :data:`drawbar.data.packing.LabelPlacement` (``next_token``: one under each token, and the loss shifts them). A task
    that says so can be packed (``data.batching: packed``): its batches then have ``segment_ids``, which go to the
    model."""

    has_segments: bool = False
    """Whether each batch of ``collate`` has ``segment_ids``, as a sample has several sequences of tokens: a model must
    not look from one into another."""

    needed_length: float = math.inf
    """The smallest ``data.sequence_length`` with which one of the records that ``encode`` dropped would give a sample,
    for the error message where no record gives one; infinite where that is not known."""

    def __init__(self, context: TaskContext | RunConfig) -> None:
        """Built from a RunConfig alone, the task itself makes its tokenizer and finds the metadata of its data."""
        self.task_context = context if isinstance(context, TaskContext) else TaskContext(context)
        self.run_config: RunConfig = self.task_context.run_config
        self.config: Any = self.run_config.task
        self.data: DataSection = self.run_config.data
        self.has_checkpoint = self.task_context.has_checkpoint
        self.has_labels = self.task_context.has_labels

    @cached_property
    def tokenizer(self) -> Any:
        """The run's tokenizer: what ``build_tokenizer`` returned when the run began."""
        given = self.task_context.tokenizer
        return call_for_attribute(self, "build_tokenizer", "tokenizer") if given is None else given

    @cached_property
    def dataset_metadata(self) -> dict[str, Any]:
        """What ``find_dataset_metadata`` returned when the run began, as JSON has it."""
        given = self.task_context.dataset_metadata
        if given is not None:
            return given
        found = call_for_attribute(self, "find_dataset_metadata", "dataset_metadata")
        try:
            return json.loads(json.dumps(found))  # as a resumed run will read them
        except (TypeError, ValueError) as error:
            remedy = "return a dict of plain numbers, strings and lists: a set becomes sorted(...)"
            raise method_error(
                self, "find_dataset_metadata", f"returns what JSON cannot hold: {error}", remedy
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what ``encode``, ``augment`` and ``collate`` need of what the task was built from, and no attribute
        that was set later: a worker process builds its own task."""
        sections = {name: getattr(self.run_config, name) for name in type(self.run_config).model_fields}
        known = (self.tokenizer, self.dataset_metadata, self.has_labels, self.task_context.initial_model)
        return _rebuild, (type(self), sections, *known)

    def __copy__(self) -> Self:
        """A copy with the same attributes: without this method, Python would copy by ``__reduce__``."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def build_tokenizer(self) -> Any:
        """The tokenizer, or None for a task that needs none. Called once, on rank 0; it is sent to the others."""
        return None

    def find_dataset_metadata(self) -> dict[str, Any]:
        """What must be known about the training data before it is encoded (such as its labels), as plain values.

        Called once, on rank 0 of a new run; kept in the run's ``task.json``, and found in ``self.dataset_metadata``
        from then on.
        """
        return {}

    def build_model(self) -> nn.Module:
        """The model, in fp32, on the CPU."""
        raise undefined_method_error(
            self, "build_model", "define build_model(self) in it: it returns the model, a torch.nn.Module"
        )

    def build_meta_model(self) -> nn.Module:
        """The model of ``build_model`` without its weights (parameters on the meta device, buffers as they are), for
        strategies that spread a model over ranks before any of them holds it."""
        with parameters_on_meta():
            return self.build_model()

    def stored_weights(self, meta_model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """The initial weights of all parameters of ``meta_model`` by name, where they can be read from files one by
        one; None if ``build_model`` must make them."""
        return None

    @property
    def row_length(self) -> int:
        """The most tokens that a sample, or a packed row, may have."""
        return self.data.sequence_length

    @property
    def skips_bad_records(self) -> bool:
        """Whether ``data.on_bad_record`` says so."""
        return self.data.on_bad_record == "skip"

    def records(self, split: str) -> Iterable[dict[str, Any]]:
        """The records of ``train``, ``validation`` or ``test``: plain dicts, in a fixed order.

        Raises:
            UserError: ``data.<split>`` is not set, or cannot be read.
        """
        return open_records(self.data, split)

    def encode(self, record: dict[str, Any], train: bool) -> Sample | list[Sample] | None:
        """One record as a sample, or as several; None drops the record; dropped records are counted.

        It may be called again for a record and must depend on nothing but its arguments, ``has_labels``, the task's own
        options, ``data.sequence_length``, tokenizer, ``dataset_metadata`` and ``encoding_files``: the result is kept.
        """
        return record

    def parts_read(self, record: dict[str, Any]) -> dict[str, bool]:
        """Whether ``encode`` reads each column of a record, for the log: what is not read is named once."""
        watched = WatchedRecord(record)
        samples = self.encode(watched, train=True)
        whole = any(sample is watched for sample in (samples if isinstance(samples, list) else [samples]))
        return {column: whole or column in watched.read for column in record}

    def encoding_files(self) -> Iterable[str | Path]:
        """The files that ``encode`` reads besides the data and its own code, such as a word list.

        Their content is part of the cache key: if it changes, records are encoded again.
        """
        return []

    @property
    def augments(self) -> bool:
        """Whether ``augment`` changes samples."""
        return type(self).augment is not Task.augment

    def augment(self, sample: Sample, train: bool, rng: np.random.Generator) -> Sample:
        """A sample as one epoch sees it: the place for randomness. ``rng`` is a pure function of run.seed, epoch and
        sample (in an evaluation always the same), so no world size, batch size or restart changes the draw."""
        return sample

    def collate(self, samples: list[Sample]) -> Batch:
        """Samples as one batch of tensors."""
        return pad_and_stack(samples)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The model's outputs."""
        return model(**batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The SUM of the loss over the batch's targets (never a mean), as a 0-d tensor."""
        raise undefined_method_error(
            self, "loss", "define loss(self, outputs, batch) in it: it returns the sum of the batch's loss"
        )

    @property
    def uses_reference(self) -> bool:
        """Whether ``loss`` and ``predict`` need the fields of ``reference_fields`` in their batches."""
        return type(self).reference_fields is not Task.reference_fields

    def reference_fields(self, model: nn.Module, batch: Batch) -> list[dict[str, float]]:
        """What the model that training starts from says about each sample: numbers that become fields of the sample.
        Computed once, before training, and kept with the run."""
        raise NotImplementedError(f"{type(self).__name__} does not define reference_fields()")

    @property
    def uses_step_mean(self) -> bool:
        """Whether ``loss`` needs the field ``step_mean`` in a training batch."""
        return type(self).step_values is not Task.step_values

    def step_values(self, model: nn.Module, batch: Batch) -> list[float]:
        """A number for each sample, from the weights before a step. Their mean over the global batch becomes the field
        ``step_mean`` (0-d) of each of its batches."""
        raise NotImplementedError(f"{type(self).__name__} does not define step_values()")

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether ``loss`` takes logits whose vocabulary is sharded (``drawbar.parallel.styles.sharded_logits``)."""
        return False

    def num_targets(self, batch: Batch) -> float:
        """How many targets (tokens, examples or decisions) the loss is summed over, from the batch alone; by default
        its samples."""
        return len(batch.ids)

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """One prediction a sample, in the order of ``batch.ids``, as plain Python values."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict()")

    def postprocess(self, record: dict[str, Any], prediction: Any) -> Any:
        """Post-process a record's prediction (or probabilities) with the record itself, before scoring and writing."""
        return prediction

    @property
    def predicts(self) -> bool:
        """Whether this task predicts in an evaluation."""
        return type(self).predict is not Task.predict

    def probabilities(self, model: nn.Module, batch: Batch) -> list[Any]:
        """How likely each answer is, one value a sample, as ``predict`` gives predictions: ``{label: probability}``."""
        raise NotImplementedError(f"{type(self).__name__} does not define probabilities()")

    @property
    def gives_probabilities(self) -> bool:
        """Whether this task computes the probabilities of its predictions."""
        return type(self).probabilities is not Task.probabilities

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Scores from the records, each with its ``prediction`` (a list of them, for a record of several samples)."""
        return {}

    def loss_scores(self, loss: float, num_targets: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Scores of the summed loss, without predictions; ``records`` are those that were evaluated."""
        return {"loss": loss / num_targets}


def _rebuild(
    task_type: type[Task],
    sections: dict[str, Any],
    tokenizer: Any,
    metadata: dict[str, Any],
    has_labels: bool,
    initial_model: Path | None,
) -> Task:
    # the type of a configuration is made at run time for each task, and cannot be pickled itself
    run_config = run_config_type(task_type.Config).model_construct(**sections)
    return task_type(TaskContext(run_config, tokenizer, metadata, has_labels=has_labels, initial_model=initial_model))


def records_of(task: Task, split: str) -> Iterable[dict[str, Any]]:
    """What ``task.records(split)`` returns.

    Raises:
        UserError: it returns something that cannot be iterated over; and what ``task.records`` raises.
    """
    records = task.records(split)
    if not isinstance(records, Iterable):
        remedy = "return the records, a list of dicts, say, or yield them"
        raise method_error(task, "records", f"returns {type(records).__name__} for {split!r}, and no records", remedy)
    return records


def map_each(records: Iterable[dict[str, Any]], function: Callable[[dict[str, Any]], T], skip_bad: bool) -> Iterator[T]:
    """Yield ``function(record)`` for each record, for what must be known before records are encoded.

    Args:
        skip_bad: leave out records that ``function`` refuses, as ``data.on_bad_record=skip`` asks for.

    Raises:
        UserError: ``function`` refuses a record; the error names file and line.
    """
    for number, record in enumerate(records):
        try:
            yield function(record)
        except UserError as error:
            if not skip_bad:
                place = records.where(number) if isinstance(records, Records) else f"record {number}"
                raise UserError(error.what, where=error.where or place, remedy=error.remedy) from error


def require(record: dict[str, Any], column: str, setting: str, kind: type = str) -> Any:
    """A record's value under ``column``; of a ``ClassNumber`` its name, where ``kind`` is str.

    Args:
        column: the key of the value; ``translation.en`` is the key ``en`` of the dict under ``translation``.
        setting: the setting that names the column, for the message.
        kind: what the value must be an instance of.

    Raises:
        UserError: the record has no such column, or it holds something else. The caller of ``encode`` adds file and
        line.
    """
    try:
        value = value_at(record, column)
    except KeyError as error:
        raise UserError(
            f"the record has no {column!r}; it has {', '.join(map(repr, columns_of(record)))}",
            remedy=misread_header(column, record)
            or f"set {setting} to the right key, or data.columns where the file has no header",
        ) from error
    if kind is str and isinstance(value, ClassNumber):
        return value.name
    if not isinstance(value, kind):
        raise UserError(
            f"{column!r} is {type(value).__name__}, not {kind.__name__}: {str(value)[:60]!r}",
            remedy=f"correct the record, or set {setting} to the key that holds it",
        )
    return value
