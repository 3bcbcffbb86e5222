"""``checkpoint.every`` as a length of time."""

import time
from pathlib import Path

import pytest

from drawbar import Callback, RunHandle, StepInfo
from drawbar.config.schema.section import interval_seconds
from drawbar.errors import UserError
from harness import run_cli
from runs import Fit


class Slow(Callback):
    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        time.sleep(0.25)


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def test_seconds() -> None:
    assert [interval_seconds(text) for text in ("90s", "30min", "2h", "1d")] == [90, 1800, 7200, 86400]


@pytest.mark.exhaustive
def test_a_checkpoint_every_second(fit: Fit, run: Path) -> None:
    fit("checkpoint={every: 1s, keep: 100, keep_best: false}", "eval.every=null", callbacks=[Slow()])
    saved = saved_steps(run)
    assert saved[-1] == 12
    assert 2 <= len(saved) <= 4  # 12 steps of a quarter of a second


@pytest.mark.exhaustive
def test_ranks_save_at_the_same_steps(project: Path) -> None:
    (project / "slow.py").write_text(
        "import time\nimport drawbar\n\n\nclass Slow(drawbar.Callback):\n"
        "    def on_step(self, run, info):\n        time.sleep(0.25)\n"
    )
    settings = ("checkpoint={every: 1s, keep: 100}", "eval.every=null", "callbacks=[slow:Slow]", "launch.nproc=2")
    done = run_cli("train", "config.yaml", *settings, cwd=project)
    assert done.code == 0, done.err
    assert len(saved_steps(project / "runs" / "tiny")) >= 2


@pytest.mark.parametrize("wrong", ["30", "30 min", "0s", "1.5h", "30m"])
def test_what_is_no_length_of_time(wrong: str, fit: Fit) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every|30min") as refused:
        fit(f"checkpoint.every='{wrong}'")
    assert "30min" in str(refused.value)
