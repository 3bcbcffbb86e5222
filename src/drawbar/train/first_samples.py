"""``first_samples.json``: the first training samples as text, with what is learned of them, for ``drawbar report``."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from drawbar.data.prefetch import unchanged
from drawbar.evaluation.scoring import Split
from drawbar.tasks.described import Span, described
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.task import Task
from drawbar.train.batches import make_augment
from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import FIRST_SAMPLES_FILE

COUNT = 3
MOST_CHARACTERS = 4000
"""Characters of a sequence that are kept."""


def save_first_samples(task: Task, split: Split, run_dir: Path) -> None:
    """Call on rank 0, which holds the run's lock. A task without tokens has nothing to show."""
    if task.tokenizer is None or "input_ids" not in split.samples.fields:
        return
    # a user's augment may draw from the global random generators, of which the run is about to make use
    augment = unchanged if is_user_defined(task, "augment") else make_augment(task, task.run_config, train=True)
    found: list[dict[str, Any]] = []
    with suppress(Exception):  # a tokenizer or labels of the user's own may read otherwise: no reason to end a run
        for number in range(min(COUNT, len(split.samples))):
            shown = described(task, augment(split.samples[number], 0))
            parts = {name: _first(spans) for name, spans in shown.parts.items()}
            found.append({**asdict(shown), "parts": parts, "record": int(split.samples.record_of[number])})
    write_atomically(run_dir / FIRST_SAMPLES_FILE, json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))


def _first(spans: Iterable[Span]) -> list[dict[str, Any]]:
    kept = list(spans)
    ends = list(accumulate(len(span.text) for span in kept))
    return [span._asdict() for span, end in zip(kept, ends, strict=True) if end <= MOST_CHARACTERS]
