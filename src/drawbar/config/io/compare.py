"""Compares two configurations of one run, and decides which differences a resumed run may have."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.config.io.fields import show
from drawbar.config.io.load_config import load_config
from drawbar.config.io.source import config_of_run, read_file
from drawbar.config.schema.guest_section import guest_sections
from drawbar.config.schema.run_config import RunConfig, TrainSection
from drawbar.config.schema.task_sections import COLUMNS_BY_SHAPE, names_no_column
from drawbar.errors import UserError

MAY_CHANGE: dict[str, str] = {
    "launch": "how processes start, not what they compute",
    "tracking": "what is written about the run, not the run",
    "callbacks": "what is done alongside the run, not the run",
    "device": "the same run on other hardware",
    "parallel": "every strategy computes the same update up to rounding; reduce_dtype and fp8 round differently",
    **dict.fromkeys(guest_sections(), "how or where it is computed, not what"),
    "train.micro_batch": "the update does not depend on how a global batch is split",
    "checkpoint": "when and how the state is saved, not what it is",
    "train.micro_batch_tokens": "the update does not depend on how a global batch is split",
    "train.on_spike": "what happens at a spike from now on",
    "train.spike_threshold": "what counts as a spike from now on",
    "train.steps": "training continues to this step; the learning rate of the remaining steps is recomputed",
    "train.epochs": "training continues to this epoch; the learning rate of the remaining steps is recomputed",
    "optim.schedule_steps": "the learning rate of the remaining steps is recomputed",
    "data.on_bad_record": "the readable records are the same; the run met no bad ones, or skipped them",
    "data.padding_free": "the same numbers, summed in another order",
    "data.workers": "the samples are the same, whichever process encodes them",
    "data.cache": "where encoded samples are stored, not what they are",
    "data.rebuild": "whether samples are encoded again; a resumed run uses the same ones",
    "eval.every": "evaluation does not change the weights",
    "eval.at_start": "evaluation does not change the weights",
    "eval.patience": "when to stop is decided again",
    "eval.micro_batch": "scores do not depend on how the data are split",
    "task.attention": "another kernel for the same numbers",
    "task.cross_entropy": "the same loss, summed in another order",
    "run.dir": "the location of the run, which may have been moved",
    "run.name": "the name of the run; a fork has another name",
    "data.test": "training does not read it",
    "data.limit.test": "training does not read it",
}
"""Settings and whole sections that may change when a run is resumed, each with the reason."""

INHERITED_IF_AUTO = ("eval.mode",)
"""Settings that a run's ``config.yaml`` stores resolved: a later ``auto`` keeps that value. (Others, such as the
precision, stay ``auto`` in the file; the checkpoints store their resolved values.)"""

READING = (
    *("data.validation_share", "data.columns", "data.separator", "data.rename", "data.sample_by"),
    "data.on_bad_record",
)
"""Settings of how the records of every split are read."""

LENGTH = ("train.steps", "train.epochs")
"""Settings of how long to train: with a larger value, a complete run can continue."""

SCHEDULE = (*LENGTH, "optim.schedule_steps")
"""Settings that may change, but affect the learning rate of the remaining steps, so a change is logged."""

ABSENT = "(absent)"
"""Stands for a key that one of the two configurations does not have."""


@dataclass(frozen=True)
class Difference:
    """A setting with two values."""

    key: str
    old: Any
    new: Any


def differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Settings that differ, except those that may change (``MAY_CHANGE``) or keep the stored value
    (``INHERITED_IF_AUTO``, and columns derived from the shape of the records), by dotted key in the file's order."""
    found = _all_differences(old, new)
    by_shape = [f"task.{name}" for name in COLUMNS_BY_SHAPE] if names_no_column(new.task) else []
    return [
        difference
        for difference in found
        if not (_may_change(difference.key) or _keeps_stored_value(difference) or difference.key in by_shape)
    ]


def render_differences(found: Sequence[Difference]) -> str:
    """A human-readable table: a line per setting with its old and new value."""
    rows = [("setting", "was", "is now")] + [(item.key, show(item.old), show(item.new)) for item in found]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {now}" for key, was, now in rows)


def changed_records(old: RunConfig, new: RunConfig, split: str) -> list[str]:
    """Changed settings that give a split other records than it had in the run; empty if the run has no such split."""
    shared = old.data.validation is None and old.data.validation_share is not None  # part of the training data
    splits = [split, "train"] if split == "validation" and shared else [split]
    if all(getattr(old.data, name) is None for name in splits):
        return []
    keys = [*READING, *(f"data.{name}" for name in splits), *(f"data.limit.{name}" for name in splits)]
    found = _all_differences(old, new)
    return [item.key for item in found if any(item.key == key or item.key.startswith(f"{key}.") for key in keys)]


def check_same(folder: Path, config: RunConfig, stored_step: int | None = None) -> list[Difference]:
    """Check that an existing run can be resumed with this configuration.

    Args:
        folder: the run directory; for a run in an object store, a folder with only its ``config.yaml``.
        stored_step: the newest step in the object store; None for a run directory.

    Returns:
        Changes in the length of the training and of its schedule.

    Raises:
        UserError: ``config`` belongs to another run, or asks for fewer steps than were made; or the run's own
            configuration is damaged.
    """
    with config_of_run(folder) as path:
        old = load_config(path, task=type(config.task)).config
    changed = differences(old, config)
    made = _newest_step(folder) if stored_step is None else stored_step
    if changed:
        what = f"the run {config.run.name} exists already, with another configuration:\n{render_differences(changed)}"
        if stored_step is not None:
            what += f"\nthe store has its checkpoints up to step {stored_step:,}"
        raise UserError(
            what,
            where=str(folder),
            remedy=f"to resume the run, set {_as_before(changed)}; for a new one, choose another run.name"
            f"{_other_ways(made) if stored_step is None else ''}",
        )
    if config.train.steps is not None:
        check_not_fewer_steps(made, config.train.steps, config.train)
    return [difference for difference in _all_differences(old, config) if difference.key in SCHEDULE]


def changed_schedule(source: Path, config: RunConfig) -> list[Difference]:
    """A fork's changes in the length of the training and the schedule of the run ``source``. Reads only the text of the
    source's configuration, as its task may be unknown here."""
    path = source / "config.yaml"
    values = read_file(path).values if path.exists() else {}
    then = {f"{name}.{key}": value for name in ("train", "optim") for key, value in (values.get(name) or {}).items()}
    sections = {"train": config.train, "optim": config.optim}
    found = []
    for key in SCHEDULE:
        section, _, name = key.partition(".")
        new = getattr(sections[section], name)
        if then.get(key, new) != new:
            found.append(Difference(key, then[key], new))
    return found


def check_not_fewer_steps(made: int, total_steps: int, config: TrainSection) -> None:
    """Refuse to train for fewer steps than were made.

    Args:
        made: steps of the checkpoint to resume from.
        total_steps: number of steps that ``config`` asks for.
    """
    if made > total_steps:
        setting, value = _length(config)
        raise UserError(
            f"{setting}={value} asks for {total_steps:,} steps, but {made:,} are made already",
            where=setting,
            remedy=f"set {setting} to a value of {made:,} steps or more, or start a new run under another run.name",
        )


def check_new_steps(made: int, total_steps: int, config: TrainSection) -> None:
    """Refuse a new run that has no steps left to make after those of the checkpoint it starts from. Arguments as for
    ``check_not_fewer_steps``."""
    if made >= total_steps:
        setting, value = _length(config)
        raise UserError(
            f"{setting}={value} asks for {total_steps:,} steps, and the run that it starts from has made {made:,}",
            where=setting,
            remedy=f"set {setting} to a value of more than {made:,} steps",
        )


def _other_ways(made: int) -> str:
    """Other remedies for a run directory with other settings."""
    if made:
        return ", or delete the folder; or continue from its weights under a new name: --fork NEWNAME"
    return ", or delete the folder, which has no checkpoint yet"


def _length(config: TrainSection) -> tuple[str, float | None]:
    """The setting that determines how long to train, and its value."""
    return ("train.epochs", config.epochs) if config.steps is None else ("train.steps", config.steps)


def _newest_step(folder: Path) -> int:
    """The step of a run's newest checkpoint, from its name only; 0 if there is none."""
    steps = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*/")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _all_differences(old: RunConfig, new: RunConfig) -> Iterator[Difference]:
    return _differences(old.model_dump(mode="json"), new.model_dump(mode="json"), "")


def _as_before(changed: Sequence[Difference]) -> str:
    """The old values as ``key=value`` arguments: if only a default has changed, there is no line to edit in a file."""
    if len(changed) > 3 or any(item.old == ABSENT for item in changed):
        return "these as they were"
    return " ".join(shlex.quote(f"{item.key}={show(item.old)}") for item in changed)


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[Difference]:
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name, ABSENT), new.get(name, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield Difference(f"{prefix}{name}", before, after)


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _keeps_stored_value(difference: Difference) -> bool:
    return difference.key in INHERITED_IF_AUTO and difference.new == "auto"
