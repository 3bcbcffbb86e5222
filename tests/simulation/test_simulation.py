"""Simulated schedules of faults: nothing waits for ever, nothing is lost, and planted defects are found. All 10,000:
`make simulate`."""

import signal
from collections.abc import Iterator

import pytest
from planted import PLANTED
from run import shrunk
from schedules import Fault, Schedule, schedule_of
from training import simulated

from exhaustive import params
from simulation import Outcome, play

AT_ONCE = 50
"""Schedules of one test."""


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield


@pytest.mark.parametrize("first", params(range(0, 1000, AT_ONCE), [0, 50]))
def test_no_schedule_has_a_problem(first: int) -> None:
    outcomes = {seed: play(schedule_of(seed)) for seed in range(first, first + AT_ONCE)}
    problems = {seed: outcome.problems for seed, outcome in outcomes.items() if outcome.problems}
    assert not problems, "what happens: python tests/simulation/run.py --seed SEED"


def without_folder(outcome: Outcome) -> list[tuple[float, str, str]]:
    return [(seconds, who, what.partition("/simulation-")[0]) for seconds, who, what in outcome.trace]


@pytest.mark.parametrize("seed", params(range(40), [7]))
def test_a_seed_is_one_schedule(seed: int) -> None:
    first, second = play(schedule_of(seed), tracing=True), play(schedule_of(seed), tracing=True)
    assert without_folder(first) == without_folder(second)
    assert (first.turns, first.seconds) == (second.turns, second.seconds)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str) -> None:
    """From a seed that has it among other faults, down to the faults that it takes."""
    defect = PLANTED[name]

    def shows(schedule: Schedule) -> bool:
        return any(defect.says in problem for problem in play(schedule).problems)

    assert not shows(schedule_of(defect.seed))
    with defect.plant():
        assert shows(schedule_of(defect.seed))
        faults = shrunk(schedule_of(defect.seed), shows).faults
    assert sorted({fault.kind for fault in faults}) == sorted(defect.takes)
    assert len(faults) == len(defect.takes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_met(name: str) -> None:
    """Among the first schedules."""
    with PLANTED[name].plant():
        assert any(PLANTED[name].says in problem for seed in range(500) for problem in play(schedule_of(seed)).problems)


def test_a_rank_that_was_stopped_while_it_waited_ends_after_a_signal() -> None:
    faults = (
        Fault("slow disk", 0, at=1.0, seconds=4.0),
        Fault("stop", 1, at=3.0),
        Fault("signal the launcher", 0, at=4.0, number=signal.SIGTERM),
    )
    outcome = play(Schedule(1, faults=faults))
    assert not outcome.problems
    assert any("rank 1 (step 4, " in what and "was stopped" in what for _, _, what in outcome.trace)
