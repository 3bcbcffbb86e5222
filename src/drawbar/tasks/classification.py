"""The built-in tasks ``sequence_classification`` and ``token_classification``."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import (
    ClassificationConfig,
    SequenceClassificationConfig,
    TokenClassificationConfig,
)
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.sources import Records
from drawbar.data.tables import value_at
from drawbar.data.tokenizer import Wrapping, encode_to_limit, prefix_space
from drawbar.errors import UserError
from drawbar.metrics.metric_registry import load_metrics
from drawbar.metrics.scores import CLASSIFICATION, OUTSIDE, is_entity_tag, with_task_classes
from drawbar.models.heads import predict_in_fp32
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch
from drawbar.tasks.labels import (
    Labels,
    check_found,
    check_label,
    check_listed,
    count_labels,
    describe_counts,
    ordered_for_model,
    warn_of_alike,
    warn_of_rare,
)
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import map_each, records_of, require
from drawbar.tasks.task_context import TaskContext


def _find_labels(
    task: PretrainedTask, column: str, listed: list[Any] | None, labels_of: Callable[[dict[str, Any]], list[Any]]
) -> dict[str, Any]:
    """The metadata of a new run's data: the labels, in the order of the model's outputs, and the names of the classes
    in the order of their numbers, where the files of the data give such names (``ClassLabel``).

    Args:
        column: the key that holds the labels in a record.
        listed: the setting ``task.labels``.
        labels_of: the labels of one record.
    """
    records = records_of(task, "train") if listed is None or task.data.train else []
    classes = records.class_names(column) if isinstance(records, Records) else None
    if listed is not None:
        labels = check_listed(listed)
    elif task.data.streaming:
        labels = _labels_of_stream(classes)
    else:
        every = chain.from_iterable(map_each(records, _with_class_names(classes, labels_of), task.skips_bad_records))
        labels = _labels_of_data(every, column, classes)
    config = task.pretrained_config()
    if config is not None:
        labels = ordered_for_model(labels, listed is not None, config, task.config.model)
    metadata = {"labels": labels} if classes is None else {"labels": labels, "classes": classes}
    if getattr(task.config, "class_weights", None) == "balanced":
        metadata["class_weights"] = _balanced_weights(task, labels_of, Labels(labels, classes))
    return metadata


def _balanced_weights(
    task: PretrainedTask, labels_of: Callable[[dict[str, Any]], list[Any]], labels: Labels
) -> list[float]:
    """A weight for each class, in inverse proportion to its number in the training data; their mean over all targets
    is 1 (scikit-learn's ``class_weight="balanced"``)."""
    if task.data.streaming:
        raise UserError(
            "a stream is not read to its end to count the labels",
            where="task.class_weights",
            remedy="give the weights: task.class_weights={negative: 1.0, positive: 3.0}",
        )
    outputs = map_each(
        records_of(task, "train"),
        lambda record: list(map(labels.output_of, labels_of(record))),
        task.skips_bad_records,
    )
    counts = Counter(chain.from_iterable(outputs))
    numbers = [counts[output] for output in range(len(labels.names))]
    return [sum(numbers) / (sum(map(bool, numbers)) * number) if number else 1.0 for number in numbers]


def _labels_of_stream(classes: list[str] | None) -> list[Any]:
    if classes is None:
        raise UserError(
            "a stream is not read to its end to find the labels",
            where="task.labels",
            remedy="list them: task.labels=[negative, positive]",
        )
    return list(classes)


def _with_class_names(
    classes: list[str] | None, labels_of: Callable[[dict[str, Any]], list[Any]]
) -> Callable[[dict[str, Any]], list[Any]]:
    """``labels_of`` with the names of classes, however a record writes them."""
    if classes is None:
        return labels_of
    known = Labels(list(classes), classes)
    return lambda record: [known.canonical(label) for label in labels_of(record)]


def _labels_of_data(every: Iterable[Any], column: str, classes: list[str] | None) -> list[Any]:
    """The classes, in their order; without them, all labels, sorted.

    Args:
        every: the labels of all records.
    """
    counts = count_labels(every)
    if classes is None:
        check_found(counts, column)
    else:
        counts = {name: counts.get(name, 0) for name in classes}
    logger.info("labels in %r of the training data: %s", column, describe_counts(counts))
    warn_of_alike(counts, column)
    if classes is None:
        warn_of_rare(counts, column)
    return list(counts)


class ClassificationTask(PretrainedTask):
    """A task that predicts labels, whose loss may weigh them."""

    config: ClassificationConfig

    @cached_property
    def labels(self) -> Labels:
        """The labels, in the order of the model's outputs."""
        return Labels(self.dataset_metadata["labels"], self.dataset_metadata.get("classes"))

    @cached_property
    def class_weights_C(self) -> torch.Tensor | None:
        """The weight of each class in the loss, in float64; None if all have the same."""
        wanted = self.config.class_weights
        if wanted is None:
            return None
        if wanted == "balanced":
            found = self.dataset_metadata.get("class_weights")
            if found is None:
                raise UserError(
                    "the labels were not counted: the run that this one continues has other weights",
                    where="task.class_weights",
                    remedy="give the weights: task.class_weights={negative: 1.0, positive: 3.0}",
                )
            return torch.tensor(found, dtype=torch.float64)
        weights_C = torch.ones(len(self.labels.names), dtype=torch.float64)
        for label, weight in wanted.items():
            try:
                weights_C[self.labels.output_of(label)] = weight
            except UserError as error:
                raise UserError(error.what, where="task.class_weights", remedy="name the task's labels") from error
        return weights_C

    def _cross_entropy(self, logits_NC: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """The sum, with the weights; divided by ``_weight_of_targets``, it is torch's mean."""
        weights_C = self.class_weights_C
        return functional.cross_entropy(
            logits_NC,
            labels_N,
            None if weights_C is None else weights_C.to(logits_NC),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=self.loss_terms.in_training().label_smoothing,
        )

    def _weight_of_targets(self, labels: torch.Tensor) -> float:
        targets_N = labels[labels != IGNORED_LABEL]
        weights_C = self.class_weights_C
        return targets_N.numel() if weights_C is None else float(weights_C.to(targets_N.device)[targets_N].sum())


class SequenceClassification(ClassificationTask):
    """A label for each text (or pair of texts), several labels, or a number."""

    Config = SequenceClassificationConfig
    config: SequenceClassificationConfig
    head = "sequence_classification"
    label_placement = "sample"
    special_tokens = {"pad_token": "<|pad|>"}
    """BART classifies a text at the last end token of its row: with padding of end tokens, that would be padding."""

    def __init__(self, context: TaskContext | RunConfig) -> None:
        super().__init__(context)
        if self.config.metrics is None:
            usual = {"single_label": ["accuracy"], "multi_label": ["f1_micro"], "regression": ["pearson", "spearman"]}
            self.metrics = load_metrics(usual[self.config.problem])
        unfit = [name for name in self.config.metrics or () if name in CLASSIFICATION]
        if unfit and self.config.problem == "regression":
            raise UserError(
                f"{', '.join(unfit)}: a score of labels; a regression predicts numbers, which are hardly ever equal",
                where="task.metrics",
                remedy="name pearson, spearman, mse or mae",
            )
        for setting in ("class_weights", "label_smoothing"):
            if getattr(self.config, setting) and self.config.problem != "single_label":
                raise UserError(
                    f"{setting} is for records with one label each; task.problem is {self.config.problem}",
                    where=f"task.{setting}",
                    remedy="remove it, or set task.problem=single_label",
                )

    def find_dataset_metadata(self) -> dict[str, Any]:
        if self.config.problem == "regression":
            return {"labels": self.config.labels}
        return _find_labels(self, self.config.label_column, self.config.labels, self._labels_of)

    def _labels_of(self, record: dict[str, Any]) -> list[Any]:
        column = self.config.label_column
        label = require(record, column, "task.label_column", object)
        if self.config.problem != "multi_label":
            return [check_label(label, column)]
        if not isinstance(label, list):
            raise UserError(
                f"{column!r} is {type(label).__name__}, not a list of labels",
                remedy="write lists of labels ([] for none), or set task.problem=single_label",
            )
        return [check_label(one, column) for one in label]

    @cached_property
    def labels(self) -> Labels:
        suggests_regression = self.config.problem == "single_label"
        metadata = self.dataset_metadata
        return Labels(metadata["labels"] or [], metadata.get("classes"), suggests_regression)

    def texts(self, record: dict[str, Any]) -> list[str]:
        text = require(record, self.config.text_column, "task.text_column")
        if self.config.text_pair_column is None:
            return [text]
        return [text, require(record, self.config.text_pair_column, "task.text_pair_column")]

    def model_fields(self) -> dict[str, Any]:
        pad = {"pad_token_id": self.pad_token_id}  # decoders find the last token by it
        if self.config.problem == "regression":
            return {"num_labels": 1, "problem_type": "regression", **pad}
        return {**self.labels.model_fields(), "problem_type": f"{self.config.problem}_classification", **pad}

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        model = super()._prepare_model(model)
        if self.config.problem == "regression":
            predict_in_fp32(model, outputs=1)
        return model

    def wrapping_for(self, tokenizer: Any) -> Wrapping | None:
        """As ``super()``; for pairs, ``self.wrapping`` where the tokenizer puts nothing between two texts."""
        wanted = super().wrapping_for(tokenizer)
        joined = self.config.text_pair_column is not None and not tokenizer.num_special_tokens_to_add(pair=True)
        return self.wrapping if wanted is None and joined else wanted

    def tokenizer_options(self) -> dict[str, Any]:
        return super().tokenizer_options() | {"model_input_names": self.tokenizer.model_input_names}

    def encode(self, record: dict[str, Any], train: bool) -> Sample | None:
        limit = self.data.sequence_length
        encoded, cut = encode_to_limit(self.tokenizer, limit, "data.sequence_length", *self.texts(record))
        if not encoded["input_ids"]:  # an empty text, around which the tokenizer puts nothing
            return None
        sample: dict[str, Any] = {**encoded, **({"truncated": True} if cut else {})}
        if self.has_labels:
            sample["labels"] = self._target(record)
        return sample

    def _target(self, record: dict[str, Any]) -> Any:
        column = self.config.label_column
        match self.config.problem:
            case "single_label":
                return self.labels.output_of(*self._labels_of(record))
            case "multi_label":
                chosen = np.zeros(len(self.labels.names), dtype=np.float32)
                chosen[[self.labels.output_of(one) for one in self._labels_of(record)]] = 1.0
                return chosen
        return as_number(require(record, column, "task.label_column", object), column)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        logits_BC = outputs.logits.float()
        match self.config.problem:
            case "single_label":
                return self._cross_entropy(logits_BC, batch["labels"])
            case "multi_label":
                return functional.binary_cross_entropy_with_logits(logits_BC, batch["labels"], reduction="sum")
        return functional.mse_loss(logits_BC.squeeze(-1), batch["labels"].float(), reduction="sum")

    def num_targets(self, batch: Batch) -> float:
        """Samples, by the weights of their classes; for ``multi_label`` samples × labels, each of which is a separate
        decision."""
        if self.config.problem == "single_label":
            return self._weight_of_targets(batch["labels"])
        return batch["labels"].numel()

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        logits_BC = self.forward(model, batch).logits
        match self.config.problem:
            case "single_label":
                return [self.labels.names[number] for number in logits_BC.argmax(-1).tolist()]
            case "multi_label":
                return [
                    [name for name, one in zip(self.labels.names, row, strict=True) if one > 0]
                    for row in logits_BC.tolist()
                ]
        return logits_BC.squeeze(-1).float().tolist()

    @property
    def gives_probabilities(self) -> bool:
        return self.config.problem != "regression"

    def probabilities(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The probability of each label; for ``multi_label``, each label's is independent of the others."""
        logits_BC = self.forward(model, batch).logits.float()
        single = self.config.problem == "single_label"
        return [self.labels.named(row) for row in (logits_BC.softmax(-1) if single else logits_BC.sigmoid()).tolist()]

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        if self.config.problem == "single_label":
            self.metrics = with_task_classes(self.metrics, self.labels.names)
        return super().score(records)

    def references(self, records: list[dict[str, Any]]) -> list[Any]:
        labels = [value_at(record, self.config.label_column) for record in records]
        match self.config.problem:
            case "single_label":
                return [self.labels.canonical(label) for label in labels]
            case "multi_label":
                return [[self.labels.canonical(one) for one in label] for label in labels]
        return [float(label) for label in labels]


def as_number(label: Any, column: str) -> float:
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise UserError(f"{column!r} is {label!r}, which is no number", remedy="correct the record")
    return number


class TokenClassification(ClassificationTask):
    """A label for each word. The first token of a word represents it; the others are not targets."""

    Config = TokenClassificationConfig
    config: TokenClassificationConfig
    head = "token_classification"
    label_placement = "token"

    def build_tokenizer(self) -> Any:
        return prefix_space(super().build_tokenizer())

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        if self.config.metrics is None:  # F1 of entities where labels are of the form B-…, I-…, O
            spans = all(is_entity_tag(str(name)) for name in self.labels.names)
            self.metrics = load_metrics(["entity_f1" if spans else "tag_accuracy"])
        return super().score(records)

    def find_dataset_metadata(self) -> dict[str, Any]:
        return _find_labels(self, self.config.labels_column, self.config.labels, self._tags)

    def _words(self, record: dict[str, Any]) -> list[str]:
        column = self.config.tokens_column
        words = require(record, column, "task.tokens_column", list)
        for position, word in enumerate(words, start=1):
            if not isinstance(word, str):
                raise UserError(
                    f"word {position} in {column!r} is {type(word).__name__}, not text: {str(word)[:60]!r}",
                    remedy='correct the record: write every word as text, a number as "12"',
                )
        return words

    def _tags(self, record: dict[str, Any]) -> list[Any]:
        tags = require(record, self.config.labels_column, "task.labels_column", list)
        if len(tags) != len(self._words(record)):
            raise UserError(
                f"the record has {len(self._words(record))} words and {len(tags)} labels",
                remedy="correct the record: each word has one label",
            )
        return [check_label(tag, self.config.labels_column) for tag in tags]

    def texts(self, record: dict[str, Any]) -> list[str]:
        return ["".join(f" {word}" for word in self._words(record))]  # as ``prefix_space`` will write them

    def model_fields(self) -> dict[str, Any]:
        return self.labels.model_fields()

    def encode(self, record: dict[str, Any], train: bool) -> Sample | None:
        words = self._words(record)
        if not words:
            return None
        # without labels, any label marks the tokens that a prediction is wanted for
        targets = [self.labels.output_of(tag) for tag in self._tags(record)] if self.has_labels else [0] * len(words)
        limit = self.data.sequence_length
        encoded, cut = encode_to_limit(
            self.tokenizer, limit, "data.sequence_length", self._with_spaces(words), is_split_into_words=True
        )
        if not encoded["input_ids"]:
            return None
        numbers = encoded.word_ids()
        labels = [
            targets[word] if word is not None and word != last else IGNORED_LABEL
            for word, last in zip(numbers, [None, *numbers], strict=False)
        ]
        return {"input_ids": encoded["input_ids"], "labels": labels, **({"truncated": True} if cut else {})}

    def _with_spaces(self, words: list[str]) -> list[str]:
        """The words as the tokenizer takes a list of them."""
        return [*words[:1], *(f" {word}" for word in words[1:])] if self._words_need_spaces else words

    @cached_property
    def _words_need_spaces(self) -> bool:
        """Whether words in a list need a space before them, by which byte-level tokenizers recognize words. Others
        split texts at spaces, and some byte-level ones write that space by themselves (``prefix_space``)."""
        return "ByteLevel" in repr(self.tokenizer.backend_tokenizer.pre_tokenizer) and not getattr(
            self.tokenizer, "add_prefix_space", False
        )

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return self._cross_entropy(outputs.logits.float().flatten(0, 1), batch["labels"].flatten())

    def num_targets(self, batch: Batch) -> float:
        return self._weight_of_targets(batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The labels of a sample's words; none for those that were cut off or have no tokens."""
        chosen_BL = self.forward(model, batch).logits.argmax(-1).tolist()
        return [
            [self.labels.names[number] for number, label in zip(row, labels, strict=True) if label != IGNORED_LABEL]
            for row, labels in zip(chosen_BL, batch["labels"].tolist(), strict=True)
        ]

    def probabilities(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The probability of each label, for each word that has a prediction."""
        shares_BLC = self.forward(model, batch).logits.float().softmax(-1).tolist()
        return [
            [self.labels.named(share) for share, label in zip(shares, labels, strict=True) if label != IGNORED_LABEL]
            for shares, labels in zip(shares_BLC, batch["labels"].tolist(), strict=True)
        ]

    def postprocess(self, record: dict[str, Any], prediction: list[Any]) -> list[Any]:
        """Insert ``O`` (among probabilities: None) for each word without tokens, such as a zero-width space; no model
        sees it, here or exported."""
        if is_user_defined(self, "encode", "predict"):
            return prediction  # a user's own encode or predict may count other words
        words = self._words(record)
        if len(prediction) == len(words):
            return prediction
        numbers = set(self.tokenizer(self._with_spaces(words), is_split_into_words=True, verbose=False).word_ids())
        seen = sorted(number for number in numbers if number is not None)
        found = dict(zip(seen, prediction, strict=False))  # words that were cut off have none
        end = len(words) if len(found) == len(seen) else max(found, default=-1) + 1
        unseen = None if isinstance(next(iter(prediction), None), dict) else OUTSIDE
        return [found.get(number, unseen) for number in range(end)]

    def references(self, records: list[dict[str, Any]]) -> list[Any]:
        return [[self.labels.canonical(tag) for tag in self._tags(record)] for record in records]
