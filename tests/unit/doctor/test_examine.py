"""What a configuration would do on this machine, and why training would refuse it."""

from pathlib import Path

import pytest

import drawbar
from drawbar.jobs.doctor import examine
from drawbar.launch.findings import Level


@pytest.mark.parametrize(
    ("settings", "processes", "says"),
    [
        (["train.micro_batch=3"], 1, "train.micro_batch"),
        (["parallel.tensor=2"], 3, "3 processes"),
        (["deepspeed.config=ds.json"], 1, "train_batch_size"),
    ],
)
def test_settings_that_a_run_would_refuse(
    settings: list[str], processes: int, says: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "ds.json").write_text('{"train_batch_size": 6}')
    loaded = drawbar.load_config(project / "config.yaml", settings)
    found = list(examine._run(loaded, {}, processes, processes, given=True))
    assert any(says in finding.what for finding in found if finding.level is Level.PROBLEM), found
    assert "strategy" in [finding.where for finding in found if finding.level is Level.OK]


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_of_the_hub_and_a_rank_that_is_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    loaded = drawbar.load_config(project / "config.yaml", ["task.model=a/b/c", "task.from_scratch=null"])
    sections = examine.examine(loaded, True)
    hub, rank, processes = sections["Hugging Face Hub"][0], sections["Run"][0], sections["Run"][1]
    assert (hub.level, rank.level) == (Level.PROBLEM, Level.PROBLEM)
    assert "nor a valid name on the Hugging Face Hub" in hub.what
    assert "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers" in rank.what
    assert processes.what == "2 on this machine (as the launcher says)"
