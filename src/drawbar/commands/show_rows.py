"""``drawbar prepare --show``: training rows as text, with what the model learns of them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.sources import Records
from drawbar.errors import visible
from drawbar.evaluation.scoring import Split
from drawbar.tasks.described import Span, described
from drawbar.tasks.task import Task
from drawbar.train.batches import make_augment, order_and_rows

LEARNED, SPECIAL, CONTEXT = "bold green", "magenta", "bright_black"
LEGEND = f"[{LEARNED}]learned[/], [{CONTEXT}]only read[/], [{SPECIAL}]special tokens[/]"
PLAIN_LEGEND = "⟦learned⟧, only read"
MOST_SHOWN = 60
"""Characters of a field that is no text."""


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
        where = getattr(records, "where", "record {}".format)
        numbered = ((record, where(number)) for number, record in enumerate(records))
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
    shown = described(task, sample)
    facts = [f"sample {sample['id']}, {where}: {shown.tokens:,} tokens", f"{shown.learned:,} learned"]
    facts += ["truncated at data.sequence_length"] if _is_truncated(task, record) else []
    facts += [] if shown.end is None else [shown.end]
    console.print(", ".join(facts), markup=False)
    for name, found in shown.parts.items():
        title = f"{name}: " if name else ""
        console.print(Text(title).append_text(_styled(found, console.is_terminal)))
    if shown.label is not None:
        console.print(f"→ {shown.label}", style=LEARNED if console.is_terminal else None, markup=False)


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
