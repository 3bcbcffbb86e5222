"""Some faults of the soak; ``make soak`` runs two hundred."""

import json
from pathlib import Path

import pytest
from soak import Lived, problems_of, soak
from soak_oracle import history, read_starts, wrong_resumes, wrong_samples
from soak_plan import ALONE, Fault, Layout, Life, schedule


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


TWO = Layout(2, "ddp")
IDS = {1: [[4, 1], [3, 2]], 2: [[5], [0, 6]], 3: [[1], [2]]}
"""The samples of each step on two ranks."""


def write_notes(path: Path, *lives: tuple[int, range]) -> None:
    """The notes of lives that begin after a step, and make some."""
    lines = []
    for life, (begun, steps) in enumerate(lives):
        own = {"life": str(life), "start": f"drawbar-{life}", "time": 10.0 + life}
        lines.append(own | {"rank": 0, "begun": begun})
        for step in steps:
            lines += [own | {"rank": rank, "step": step, "ids": ids} for rank, ids in enumerate(IDS[step])]
            lines.append(own | {"rank": 0, "done": step})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_history_is_that_of_the_last_life_to_make_each_step(tmp_path: Path) -> None:
    write_notes(tmp_path / "notes.jsonl", (0, range(1, 3)), (1, range(2, 3)), (1, range(2, 4)))
    made = history(read_starts(tmp_path / "notes.jsonl"))
    assert {step: start.life for step, start in made.items()} == {1: 0, 2: 2, 3: 2}


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [("[0, 6]", "[0, 6]", 0), ("[0, 6]", "[6, 0]", 1), ("[0, 6]", "[0, 7]", 2), ("[0, 6]", "[0]", 2)],
)
def test_other_samples_or_another_order_are_noticed(old: str, new: str, count: int, tmp_path: Path) -> None:
    write_notes(tmp_path / "notes.jsonl", (0, range(1, 4)))
    write_notes(tmp_path / "replayed.jsonl", (0, range(1, 4)))
    whole = {"life": None, "start": "process 7", "rank": 0, "time": 1.0}
    alone = [whole | {"begun": 0}, *(whole | {"step": step, "ids": ids[0] + ids[1]} for step, ids in IDS.items())]
    (tmp_path / "alone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alone))
    notes = tmp_path / "notes.jsonl"
    notes.write_text(notes.read_text().replace(old, new))
    assert len(list(wrong_samples(tmp_path, history(read_starts(notes)), [TWO], steps=3))) == count
    assert len(list(wrong_samples(tmp_path, history(read_starts(notes)), [TWO], steps=4))) == count + 1


@pytest.mark.parametrize(("newest", "damage", "count"), [(1, "", 0), (2, "", 1), (2, "rm", 0)])
def test_a_saved_step_that_is_lost_is_noticed(newest: int, damage: str, count: int, tmp_path: Path) -> None:
    write_notes(tmp_path / "notes.jsonl", (0, range(1, 3)), (1, range(2, 4)))
    told = [Lived(Life(TWO, (), damage), 0, newest=newest), Lived(Life(TWO, ()), 1, newest=3)]
    assert len(list(wrong_resumes(told, read_starts(tmp_path / "notes.jsonl")))) == count
    told = [told[0], Lived(Life(TWO, ()), 2, newest=newest), told[1]]  # one that ended while starting
    assert len(list(wrong_resumes(told, read_starts(tmp_path / "notes.jsonl")))) == count


@pytest.mark.parametrize(
    ("err", "code", "count"),
    [
        ("error: rank 1 (step 3, forward) was killed by SIGKILL", 1, 0),
        ("error: rank 0 (step 3, forward) was killed by SIGKILL", 1, 1),
        ("error: rank 1 (step 4, forward) was killed by SIGKILL", 1, 1),
        ("Traceback (most recent call last):\nerror: rank 1 (step 3, forward) was killed by SIGKILL", 2, 2),
    ],
)
def test_a_message_that_names_another_rank_or_step_is_noticed(err: str, code: int, count: int) -> None:
    lived = Lived(Life(TWO, (Fault("kill", 1, 1, "forward"),)), 0, code=code, met=[(1.0, 3)], err=err)
    assert len(list(problems_of(lived))) == count
    assert list(problems_of(Lived(Life(ALONE, (Fault("kill", 0, 1, "forward"),)), 0)))
