"""Some faults of the soak; ``make soak`` runs two hundred."""

from pathlib import Path

import pytest
from soak import soak
from soak_plan import schedule


@pytest.mark.exhaustive
def test_a_run_under_a_supervisor_is_one_that_nothing_happens_to(tmp_path: Path) -> None:
    report, problems = soak(tmp_path, seed=5, faults=4)
    assert not problems, report


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_has_as_many_faults_as_asked_for_and_can_be_repeated(seed: int) -> None:
    lives = list(schedule(seed, faults=200))
    assert sum(len(life.faults) for life in lives) == 200
    assert lives == list(schedule(seed, faults=200))
    for life in lives:
        assert all(fault.who < life.layout.ranks for fault in life.faults)
        assert life.planted in (life.faults, life.faults[:-1])
