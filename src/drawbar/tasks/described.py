"""A sample in words: its tokens as text, with what is learned of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.tasks.classification import ClassificationTask
from drawbar.tasks.preference import PairTask
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task


class Span(NamedTuple):
    """Tokens that follow one another, as text."""

    text: str
    is_learned: bool
    is_special: bool = False


@dataclass(frozen=True)
class DescribedSample:
    """What of a sample a person can read."""

    tokens: int
    learned: int
    """Its targets."""
    parts: dict[str, list[Span]]
    """Its sequences by name; the name of a single one is empty."""
    label: str | None
    """Of a sample that has one label."""
    end: str | None
    """With what a text that is learned ends."""


def described(task: Task, sample: Sample) -> DescribedSample:
    """A sample of tokens, with the task's tokenizer, in words."""
    tokens, labels = sample["input_ids"], sample.get("labels")
    if isinstance(task, PairTask):
        named = task.parts_of(sample).items()
        parts = {name: spans_of(task, tokens[at], None if labels is None else labels[at]) for name, at in named}
    elif task.label_placement == "decoder" and labels is not None:
        parts = {"source": spans_of(task, tokens, None), "target": spans_of(task, labels, labels)}
    else:
        parts = {"": spans_of(task, tokens, labels)}
    last = [span for found in parts.values() for span in found if span.is_learned][-1:]
    writes = task.label_placement in ("next_token", "decoder") and last
    end = f"learns to end with {last[0].text}" if writes and last[0].is_special else "learns no end token"
    has_label = task.label_placement == "sample" and labels is not None
    return DescribedSample(
        len(tokens),
        targets_of(task, sample),
        parts,
        _label(task, labels) if has_label else None,
        end if writes else None,
    )


def targets_of(task: Task, sample: Sample) -> int:
    """How many targets a sample has."""
    if "labels" not in sample:
        return 0
    if task.label_placement == "sample" or np.ndim(sample["labels"]) != 1:
        return 1
    return sum(_learned(task, np.asarray(sample["labels"])))


def _learned(task: Task, labels: np.ndarray) -> list[bool]:
    """Whether each position's label is a target. The first token of a sample is predicted from nothing."""
    learned = labels != IGNORED_LABEL
    if task.label_placement == "next_token":
        learned[:1] = False
    return learned.tolist()


def spans_of(task: Task, tokens: Sequence[int], labels: Sequence[int] | None) -> list[Span]:
    """The tokens of a sample as text. Labels that are not the tokens themselves follow theirs: ``Ada→B-PER``."""
    tokenizer = task.tokenizer
    ids = np.asarray(tokens).tolist()
    by_token = labels is not None and task.label_placement != "sample" and np.shape(labels) == np.shape(ids)
    targets = np.asarray(labels if by_token else [IGNORED_LABEL] * len(ids))
    learned = _learned(task, targets)
    special = set(tokenizer.all_special_ids)
    keys = [  # a token with another label than itself stays alone
        (is_learned, token in special, place if is_learned and label != token else None)
        for place, (token, label, is_learned) in enumerate(zip(ids, targets.tolist(), learned, strict=True))
    ]
    spans = []
    for (is_learned, is_special, place), group in groupby(zip(keys, ids, strict=True), key=itemgetter(0)):
        text = tokenizer.decode([token for _, token in group], clean_up_tokenization_spaces=False)
        if place is not None:
            text += f"→{_label_of_token(task, int(targets[place]))}"
        spans.append(Span(text, is_learned, is_special))
    return spans


def _label_of_token(task: Task, label: int) -> str:
    if isinstance(task, PretrainedTask) and not isinstance(task, ClassificationTask):
        return str(task.tokenizer.decode([label]))
    return _label(task, label)


def _label(task: Task, label: Any) -> str:
    if isinstance(task, ClassificationTask) and np.ndim(label) == 0 and task.labels.names:
        return str(task.labels.names[int(label)])
    return str(np.asarray(label).tolist())
