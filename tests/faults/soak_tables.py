"""What the faults of the soak have cost, as tables for ``docs/reliability.md``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from soak import Lived
from soak_oracle import Differences, Start, read_starts
from soak_plan import Fault


@dataclass(frozen=True)
class Attempt:
    """The ranks of one start, from their beginning to their end."""

    lived: Lived
    fault: Fault | None
    by_launcher: bool
    began: float
    met: float
    over: float
    start: Start | None
    """None if they have not come to their first step."""

    @property
    def to_a_step(self) -> float | None:
        """Seconds from the beginning to the first step that was done."""
        return min(self.start.done.values()) - self.began if self.start and self.start.done else None


def attempts_of(told: Sequence[Lived], starts: Sequence[Start]) -> Iterator[Attempt]:
    for lived in told:
        began = lived.began
        for number, over in enumerate(lived.over):
            has_met = number < len(lived.met)
            yield Attempt(
                lived,
                lived.life.faults[number] if has_met else None,
                number > 0,
                began,
                lived.met[number][0] if has_met else over,
                over,
                next((start for start in starts if start.life == lived.number and began <= start.at <= over), None),
            )
            began = over


def tables(project: Path, told: Sequence[Lived], found: Differences) -> str:
    """All that was measured, as Markdown."""
    attempts = list(attempts_of(told, read_starts(project / "notes.jsonl")))
    faults = sum(attempt.fault is not None for attempt in attempts)
    wall = told[-1].ended - told[0].began
    resizes = sum(one.life.layout != other.life.layout for one, other in pairwise(told))
    restarts = sum(attempt.by_launcher for attempt in attempts)
    return f"""\
{faults} faults, {resizes} changes of ranks or strategy; {len(told)} starts by the supervisor, {restarts} by a launcher;
{told[-1].newest} steps, made by {found.segments} layouts one after another, in {wall / 60:.0f} minutes.

{table_of_faults(attempts)}

{table_of_starts(attempts)}

The steps that have survived took {found.useful:.0f} s of {wall:.0f} s: a goodput of {found.useful / wall:.1%}.
A fault costs {(wall - found.useful) / max(1, faults):.1f} s on average.

Greatest difference from the run of one process: losses {found.loss:.1e} and scores {found.score:.1e} (relative),
weights {found.weight:.1e} (absolute).
"""


def table_of_faults(attempts: Sequence[Attempt]) -> str:
    """By kind: how often, how long until all ranks had ended, and how many steps were made again."""
    again: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {}
    for number, attempt in enumerate(attempts):
        if attempt.fault is None:
            continue
        kind = attempt.fault.kind
        seconds.setdefault(kind, []).append(attempt.over - attempt.met)
        following = next((later.start for later in attempts[number + 1 :] if later.start), None)
        if attempt.start and following:
            again.setdefault(kind, []).append(attempt.start.reached - following.begun)
    rows = [
        f"| {kind} | {len(found)} | {median(found):.1f} | {max(found):.1f} | {_of_steps(again.get(kind, []))} |"
        for kind, found in sorted(seconds.items())
    ]
    head = "| fault | times | s to the end: median | most | steps made again: mean | most |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- |", *rows])


def _of_steps(steps: Sequence[int]) -> str:
    return f"{mean(steps):.1f} | {max(steps)}" if steps else "– | –"


def table_of_starts(attempts: Sequence[Attempt]) -> str:
    """By the number of ranks: how long from the beginning of a command, or of a restart, to the next step done."""
    rows = []
    for ranks in sorted({attempt.lived.life.layout.ranks for attempt in attempts}):
        cells = [str(ranks)]
        for by_launcher in (False, True):
            found = [
                attempt.to_a_step
                for attempt in attempts
                if attempt.lived.life.layout.ranks == ranks and attempt.by_launcher == by_launcher and attempt.to_a_step
            ]
            cells += [str(len(found)), f"{median(found):.1f}", f"{max(found):.1f}"] if found else ["0", "–", "–"]
        rows.append(f"| {' | '.join(cells)} |")
    head = "| ranks | commands | s to the next step: median | most | restarts by the launcher | s: median | most |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *rows])
