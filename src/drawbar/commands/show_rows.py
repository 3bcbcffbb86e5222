"""``drawbar prepare --show``: training rows as text, with what the model learns of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.sources import Records
from drawbar.errors import visible
from drawbar.evaluation.scoring import Split
from drawbar.tasks.classification import ClassificationTask
from drawbar.tasks.preference import PairTask
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.train.batches import make_augment, order_and_rows

LEARNED, SPECIAL, CONTEXT = "bold green", "magenta", "bright_black"
LEGEND = f"[{LEARNED}]learned[/], [{CONTEXT}]only read[/], [{SPECIAL}]special tokens[/]"
PLAIN_LEGEND = "⟦learned⟧, only read"
MOST_SHOWN = 60
"""Characters of a field that is no text."""


class Span(NamedTuple):
    """Tokens that follow one another, as text."""

    text: str
    is_learned: bool
    is_special: bool = False


def show_rows(task: Task, split: Split, config: RunConfig, count: int) -> None:
    """Print the first rows of the first epoch, on standard output."""
    sampler, rows = order_and_rows(task, split, config)
    chosen = [rows.read(row) for row in sampler.rows(0, np.arange(min(count, sampler.size))).tolist()]
    record_of = split.samples.record_of
    places = _found(split.records, {int(record_of[sample["id"]]) for samples in chosen for sample in samples})
    augment = make_augment(task, config, train=True)
    console = Console(highlight=False, soft_wrap=True)
    console.print("\n" + (LEGEND if console.is_terminal else PLAIN_LEGEND))
    for number, samples in enumerate(chosen, start=1):
        tokens = sum(len(sample["input_ids"]) for sample in samples if "input_ids" in sample)
        share = f": {len(samples)} samples, {tokens:,} of {task.row_length:,} tokens"
        console.print(f"\n[bold]row {number}[/]{share if config.data.batching == 'packed' else ''}")
        for sample in samples:
            record, where = places[int(record_of[sample["id"]])]
            _print_sample(console, task, augment(sample, 0), record, where)


def _found(records: Iterable[Mapping[str, Any]], wanted: set[int]) -> dict[int, tuple[Mapping[str, Any], str]]:
    """The wanted records by number, and where each is; the others are read once, as far as the last of these."""
    numbered: Iterator[tuple[Mapping[str, Any], str]]
    if isinstance(records, Records):
        numbered = ((found.record, found.where) for found in records.reading())
    else:
        numbered = ((record, f"record {number}") for number, record in enumerate(records))
    kept = {}
    for number, one in zip(range(max(wanted) + 1), numbered, strict=False):
        if number in wanted:
            kept[number] = one
    return kept


def _print_sample(console: Console, task: Task, sample: Sample, record: Mapping[str, Any], where: str) -> None:
    if "input_ids" not in sample or task.tokenizer is None:
        console.print(f"sample {sample['id']}, {where}", markup=False)
        for name, value in sample.items():
            console.print(f"  {name}: {_shape_and_values(value)}", markup=False)
        return
    tokens, labels = sample["input_ids"], sample.get("labels")
    facts = [f"sample {sample['id']}, {where}: {len(tokens):,} tokens", f"{targets_of(task, sample):,} learned"]
    if isinstance(task, PairTask):
        spans = {
            f"{name}: ": spans_of(task, tokens[part], None if labels is None else labels[part])
            for name, part in task.parts_of(sample).items()
        }
    elif task.label_placement == "decoder" and labels is not None:
        spans = {"source: ": spans_of(task, tokens, None), "target: ": spans_of(task, labels, labels)}
    else:
        spans = {"": spans_of(task, tokens, labels)}
    if _is_truncated(task, record):
        facts.append("truncated at data.sequence_length")
    if task.label_placement in ("next_token", "decoder"):
        last = [span for found in spans.values() for span in found if span.is_learned][-1:]
        facts += [f"learns to end with {span.text}" if span.is_special else "learns no end token" for span in last]
    console.print(", ".join(facts), markup=False)
    for name, found in spans.items():
        console.print(Text(name).append_text(_styled(found, console.is_terminal)))
    if task.label_placement == "sample" and "labels" in sample:
        console.print(
            f"→ {_label(task, sample['labels'])}", style=LEARNED if console.is_terminal else None, markup=False
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


def _styled(spans: Iterable[Span], in_color: bool) -> Text:
    text = Text()
    for is_learned, group in groupby(spans, key=lambda span: span.is_learned):
        inside = [(_shown(span.text), _style(span)) for span in group]
        text.append_text(Text.assemble(*inside) if in_color else Text(_bracketed(inside, is_learned)))
    return text


def _bracketed(inside: Iterable[tuple[str, str]], is_learned: bool) -> str:
    text = "".join(part for part, _ in inside)
    return f"⟦{text}⟧" if is_learned else text


def _style(span: Span) -> str:
    if span.is_special:
        return f"bold {SPECIAL}" if span.is_learned else SPECIAL
    return LEARNED if span.is_learned else CONTEXT


def _shown(text: str) -> str:
    """The text with marks at the ends of lines, and with terminal escapes shown."""
    return "↵\n".join(map(visible, text.split("\n")))


def _is_truncated(task: Task, record: Mapping[str, Any]) -> bool:
    found = task.encode(dict(record), True)
    return any("truncated" in sample for sample in (found if isinstance(found, list) else [found or {}]))


def _shape_and_values(value: Any) -> str:
    shape = f"{list(np.shape(value))} " if np.ndim(value) else ""
    text = str(np.asarray(value).tolist())
    return f"{shape}{text[:MOST_SHOWN]}{'…' if len(text) > MOST_SHOWN else ''}"
