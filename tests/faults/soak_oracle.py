"""What the soak's run must equal: a run of one process that nothing happens to, and, bit for bit, one that changes its
ranks and strategy at the same steps and to which nothing else happens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from soak import Lived
from soak_plan import ALONE, Layout

from harness import run_cli
from runs import largest_difference, losses, scores, weights

TOLERANCE = 1e-5
"""Of losses, relative; the order of additions in fp32 differs from layout to layout. As for all strategies' tests."""


@dataclass
class Start:
    """Processes that were started together, and what they noted."""

    life: int
    begun: int = 0
    at: float = 0.0
    done: dict[int, float] = field(default_factory=dict)
    """When each step was done."""
    ids: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """The samples of each step on each rank, in order."""

    @property
    def reached(self) -> int:
        """The last step that was at least begun."""
        return max([self.begun, *self.ids])


@dataclass
class Differences:
    """The greatest ones from the run of one process."""

    loss: float
    score: float
    weight: float
    useful: float
    """Seconds of the steps in the history that has survived."""
    segments: int
    """Layouts of that history, one after another."""


def read_starts(path: Path) -> list[Start]:
    """The starts of a run, in order. Of a start whose first rank never began, nothing counts."""
    starts: dict[str, Start] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        start = starts.setdefault(line["start"], Start(int(line["life"] or 0)))
        if "begun" in line and line["rank"] == 0:
            start.begun, start.at = line["begun"], line["time"]
        elif "done" in line:
            start.done[line["done"]] = line["time"]
        elif "ids" in line:
            start.ids.setdefault(line["step"], {}).setdefault(line["rank"], []).extend(line["ids"])
    return [start for start in starts.values() if start.at]


def history(starts: Sequence[Start]) -> dict[int, Start]:
    """Which start has made each step of the history that survived: the last one that went on from before it."""
    made: dict[int, Start] = {}
    for start in starts:
        made = {step: by for step, by in made.items() if step <= start.begun}
        made |= dict.fromkeys(range(start.begun + 1, start.reached + 1), start)
    return made


def samples(start: Start, step: int, layout: Layout) -> list[int]:
    """Those of a step. Raises AssertionError if ranks that hold parts of one model saw different ones."""
    of_rank = start.ids[step]
    group = layout.ranks // layout.replicas
    for first in range(0, layout.ranks, group):
        seen = [of_rank[rank] for rank in range(first, first + group) if rank in of_rank]
        assert all(ids == seen[0] for ids in seen), f"step {step}: {seen}"
    return [number for rank in range(0, layout.ranks, group) for number in of_rank.get(rank, [])]


def compare(project: Path, told: Sequence[Lived], settings: Sequence[str], steps: int) -> tuple[Differences, list[str]]:
    """How the run differs from those that nothing happens to, and what of that is wrong."""
    starts = read_starts(project / "notes.jsonl")
    made = history(starts)
    layouts = [lived.life.layout for lived in told]
    segments = segments_of({step: layouts[start.life] for step, start in made.items()})
    train(project, "alone", [*settings, *ALONE.settings()])
    for layout, last in segments:
        train(project, "replayed", [*settings, *layout.settings(), f"train.steps={last}"])
    problems = [*wrong_resumes(told, starts), *wrong_samples(project, made, layouts, steps)]
    problems += differs_from_replayed(project / "runs", steps)
    ours, alone = (project / "runs" / name for name in ("tiny", "alone"))
    found = Differences(
        loss=largest_difference(losses(alone), losses(ours)),
        score=largest_difference(validation_losses(alone), validation_losses(ours)),
        weight=largest_of_weights(weights(alone, steps), weights(ours, steps)),
        useful=useful_seconds(made),
        segments=len(segments),
    )
    problems += [f"the greatest difference of a loss is {found.loss:.1e}"] * (found.loss > TOLERANCE)
    problems += [f"the greatest difference of a score is {found.score:.1e}"] * (found.score > TOLERANCE)
    return found, problems


def differs_from_replayed(runs: Path, steps: int) -> Iterator[str]:
    """What is not equal, bit for bit, to the run that has only changed its layout."""
    if losses(runs / "tiny") != losses(runs / "replayed"):
        yield "its losses differ from those of the run with the same layouts"
    final = weights(runs / "tiny", steps)
    for name, tensor in weights(runs / "replayed", steps).items():
        if not torch.equal(final[name], tensor):
            yield f"{name} differs from that of the run with the same layouts"


def validation_losses(run: Path) -> dict[int, float]:
    return {step: score["eval/validation/loss"] for step, score in scores(run).items()}


def largest_of_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((other[name] - tensor).abs().max()) for name, tensor in one.items())


def train(project: Path, name: str, settings: Sequence[str]) -> None:
    """A run that nothing happens to."""
    command = ("train", "config.yaml", *settings, f"run.name={name}")
    done = run_cli(*command, cwd=project, env={"SOAK_NOTES": f"{name}.jsonl"}, timeout=900)
    assert done.code == 0, done.err


def segments_of(layouts: dict[int, Layout]) -> list[tuple[Layout, int]]:
    """The layouts of a history one after another, each with its last step."""
    ends = [step for step in layouts if layouts.get(step + 1) != layouts[step]]
    return [(layouts[step], step) for step in sorted(ends)]


def wrong_samples(project: Path, made: dict[int, Start], layouts: Sequence[Layout], steps: int) -> Iterator[str]:
    """Steps of the history that have not trained the samples of the run of one process, or not on the same ranks and
    in the same order as the run with the same layouts. Within a step, each layout has its own order."""
    (alone,) = read_starts(project / "alone.jsonl")
    replayed = history(read_starts(project / "replayed.jsonl"))
    if sorted(made) != list(range(1, steps + 1)):
        yield f"the history has {len(made)} of {steps} steps"
    for step, start in made.items():
        seen = samples(start, step, layouts[start.life])
        if sorted(seen) != sorted(alone.ids[step][0]):
            yield f"step {step} has trained {seen} instead of {alone.ids[step][0]}"
        if start.ids[step] != replayed[step].ids[step]:
            yield f"step {step} has trained {start.ids[step]} instead of {replayed[step].ids[step]}"


def wrong_resumes(told: Sequence[Lived], starts: Sequence[Start]) -> Iterator[str]:
    """Lives that began at an older checkpoint than the newest whole one that was there. One that was torn stays until a
    life begins; those that end while starting leave it."""
    first = {start.life: start for start in reversed(starts)}
    torn = 0
    for before, after in pairwise(told):
        torn = before.newest if before.life.damage else torn
        if after.number not in first:
            continue
        if before.newest != torn and first[after.number].begun < before.newest:
            yield f"life {after.number} began at step {first[after.number].begun}, but step {before.newest} was saved"
        torn = 0


def useful_seconds(made: dict[int, Start]) -> float:
    """The time of the steps that have survived."""
    return sum(
        start.done[step] - start.done.get(step - 1, start.at) for step, start in made.items() if step in start.done
    )
