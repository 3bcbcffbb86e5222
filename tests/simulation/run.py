"""Plays simulated schedules, each as its seed says, and shrinks those in which something is wrong.

python tests/simulation/run.py [--seeds N] [--first SEED] [--jobs N]
python tests/simulation/run.py --seed SEED --trace
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # pytest has done this
    sys.path.insert(0, str(Path(__file__).parent))

from schedules import Schedule, schedule_of, simpler

if TYPE_CHECKING:
    from simulation import Outcome

CHUNK = 50
"""Seeds that a process plays before it tells how they ended."""
MOST_SHOWN = 5
"""The most schedules that are shrunk and shown."""
TRIES = 150
"""The most schedules that are played to shrink one."""

Played = tuple[int, "Outcome"]
"""A seed, and how its schedule ended."""


def play_seeds(seeds: Iterable[int]) -> list[Played]:
    """Play the schedules of these seeds."""
    from training import simulated

    from simulation import play

    gc.freeze()  # what is imported by now stays
    found = []
    with simulated():
        for seed in seeds:
            found.append((seed, replace(play(schedule_of(seed)), trace=[])))
    return found


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The simplest schedule on the way from this one that still fails."""
    tries = 0
    again = True
    while again:
        again = False
        for candidate in simpler(schedule):
            tries += 1
            if tries > TRIES:
                return schedule
            if fails(candidate):
                schedule, again = candidate, True
                break
    return schedule


def show(schedule: Schedule, tracing: bool) -> bool:
    """Print what happens in a schedule. Returns whether something is wrong."""
    from training import simulated

    from simulation import play

    with simulated():
        outcome = play(schedule, tracing)
    print(schedule)
    for seconds, who, what in outcome.trace:
        print(f"  {seconds:8.3f}  {who}: {what}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    return bool(outcome.problems)


def shrink_and_show(seed: int) -> None:
    from training import simulated

    from simulation import play

    with simulated():
        smallest = shrunk(schedule_of(seed), lambda schedule: bool(play(schedule).problems))
    print(f"\nseed {seed} has a problem; the simplest schedule that has one, too:")
    show(smallest, tracing=False)


def chunks(first: int, count: int) -> Iterator[range]:
    for begin in range(first, first + count, CHUNK):
        yield range(begin, min(begin + CHUNK, first + count))


def play_all(first: int, count: int, jobs: int) -> int:
    """Play all seeds, and print how they ended. Returns the number in which something is wrong."""
    began = time.monotonic()
    played: list[Played] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for outcomes in pool.map(play_seeds, chunks(first, count)):
            played += outcomes
            if len(played) % 1000 < CHUNK:
                failed = sum(bool(outcome.problems) for _, outcome in played)
                print(f"{len(played)} schedules, {time.monotonic() - began:.0f} s, {failed} with a problem", flush=True)
    took = time.monotonic() - began
    failed = [seed for seed, outcome in played if outcome.problems]
    for seed in failed[:MOST_SHOWN]:
        shrink_and_show(seed)
    print(f"\n{table([outcome for _, outcome in played])}\n\n{count} schedules in {took:.0f} s")
    print(f"{len(failed)} with a problem{': seeds ' * bool(failed)}{', '.join(map(str, failed))}")
    return len(failed)


def table(outcomes: "list[Outcome]") -> str:
    """How the schedules ended, as a table."""
    ends = Counter(outcome.ending or "not" for outcome in outcomes)
    lines = ["| how the first command ended | schedules |", "| --- | --- |"]
    lines += [f"| {ending} | {number} |" for ending, number in ends.most_common()]
    turns, seconds = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("turns", "seconds"))
    mixed = sum(outcome.is_mixed for outcome in outcomes)
    lines += ["", f"{turns:,} turns, {seconds / 3600:.1f} simulated hours"]
    return "\n".join([*lines, f"{mixed} in which two runs wrote in one temporary folder: known"] if mixed else lines)


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets have an order, too: the same in each process
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="play only this one, and print what happens")
    parser.add_argument("--trace", action="store_true", help="with the operations of the disk")
    asked = parser.parse_args()
    if asked.seed is not None:
        sys.exit(show(schedule_of(asked.seed), asked.trace))
    sys.exit(bool(play_all(asked.first, asked.seeds, asked.jobs)))


if __name__ == "__main__":
    main()
