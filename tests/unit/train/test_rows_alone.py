"""Models that compute a sample otherwise beside a longer one get one sample at a time, in training and evaluation."""

from pathlib import Path

import pytest

from conftest import make_project
from drawbar.errors import UserError
from runs import fit_in, losses, scores

LONGROPE = (
    "task.from_scratch.rope_parameters={rope_type: longrope, rope_theta: 10000.0, "
    "short_factor: [1, 1, 1, 1], long_factor: [2, 4, 8, 16], original_max_position_embeddings: 16}"
)
SETTINGS = (LONGROPE, "data.batching=grouped", "train.steps=4", "train.global_batch=4", "eval.every=4")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def test_losses_and_scores_do_not_depend_on_the_micro_batch(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for rows in (4, 1):
        capfd.readouterr()
        name = f"of-{rows}"
        fit_in(project, *SETTINGS, f"run.name={name}", f"train.micro_batch={rows}", f"eval.micro_batch={rows}")
        told = capfd.readouterr().err
        assert ("train.micro_batch is set to 1" in told) == (rows == 4)
        assert "the model sees the padding" not in told  # no sample is beside another
        found.append((losses(project / "runs" / name), scores(project / "runs" / name)))
    assert found[0] == found[1]


def test_rows_within_the_original_length_stay_together(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit_in(project, *SETTINGS, "data.sequence_length=16")
    assert "one sample at a time" not in capfd.readouterr().err


def test_packed_rows_are_refused(project: Path) -> None:
    with pytest.raises(UserError, match="packed rows hold several") as refused:
        fit_in(project, *SETTINGS, "data.batching=packed")
    assert refused.value.where == "data.batching"
