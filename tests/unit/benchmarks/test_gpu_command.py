"""What ``python -m benchmarks gpu`` writes of settings that do not end well."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.gpu import command, processes
from benchmarks.gpu.random_model import MODEL, MODEL_8B, Rows
from benchmarks.gpu.setting import Place, Setting, among

ROOT = Path(__file__).parents[3]


def behave(how: str) -> dict[str, Any]:
    """In a process of its own."""
    if how == "sleeps":
        print("going to sleep", flush=True)
        time.sleep(60)
    if how == "fills the memory":
        raise torch.OutOfMemoryError("tried to allocate much")
    if how == "is refused":
        raise UserError("no such thing")
    if how == "fails":
        raise RuntimeError("a defect")
    return {"figure": 1 / 3}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(processes, "PRELOADED", ())
    case = type(sys)("benchmarks.gpu.made_up")
    hows = ("sleeps", "fills the memory", "is refused", "fails", "ends well", "needs more")
    here = f"{behave.__module__}:behave"
    made = [
        Setting(how, here, {"how": how}, ("no_such_package",) if how == "needs more" else (), seconds=1.0)
        for how in hows
    ]
    case.settings = lambda place: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.made_up", case)
    file = tmp_path / "lines.jsonl"
    written = command.Lines(file)
    command.measure("made_up", Place(True, tmp_path, tmp_path), processes.in_fork, time.monotonic() + 60, written)
    command.measure("made_up", Place(True, tmp_path, tmp_path), processes.in_fork, time.monotonic() + 1, written)
    assert written.failed
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_setting_has_a_line_whatever_becomes_of_it(lines: list[dict[str, Any]]) -> None:
    slow, full, refused, failed, good, absent, *late = lines
    assert slow["killed"] == "after 1 s"
    assert "going to sleep" in slow["log"]
    assert full["out_of_memory"] == "tried to allocate much"
    assert refused["refused"] == "no such thing"
    assert "RuntimeError: a defect" in failed["error"]
    assert good["figure"] == pytest.approx(1 / 3)
    assert absent["skipped"] == "no_such_package is not installed"
    assert [line["skipped"] for line in late[:5]] == ["no time was left"] * 5


def test_words_choose_settings_and_keep_what_they_need() -> None:
    made = [Setting("prepare", "", fails_alone=False), Setting("drawbar", ""), Setting("drawbar, compiled", "")]
    assert [one.name for one in among(made, ["compiled"])] == ["prepare", "drawbar, compiled"]
    assert among(made, []) == made


def test_the_models_have_the_sizes_that_the_page_says() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for sizes, billions in ((MODEL, 1.46), (MODEL_8B, 8.03)):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_lengths_differ_and_stay_within_their_limits() -> None:
    found = Rows(64, 4096, 64).lengths()
    assert (min(found), max(found)) == (64, 4096)
    assert sum(found) / len(found) < 4096 / 2
    assert Rows(3, 10).lengths() == [10, 10, 10]


@pytest.mark.exhaustive
def test_words_that_no_setting_has_cost_no_preparation(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    # in a process of its own, as --quick changes the environment
    arguments = ["gpu", "head:nonsense", "--quick", "--out", str(file)]
    assert subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, timeout=300).returncode == 1
    *_, line = (json.loads(line) for line in file.read_text().splitlines())
    assert line["error"].startswith("no setting has nonsense in its name; there are: ")


@pytest.mark.parametrize("wrong", [("--out", "."), ("--minutes", "-3"), ("--minutes", "nan"), ("nonsense",)])
def test_mistakes_end_it_before_it_begins(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["probe", *wrong])
    assert "error: " in capsys.readouterr().err
