"""``eval.samples``: what the model writes at each evaluation, for people to look at."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drawbar.errors import UserError
from drawbar.report.recorded_run import read_recorded_run
from drawbar.report.report_page import render_report
from harness import run_ranks
from runs import Fit, fit_in

SETTINGS = ("train.steps=4", "eval.every=2", "eval.sample_tokens=5", "tracking.tensorboard=true")


def texts(run: Path) -> list[dict[str, Any]]:
    lines = (run / "eval" / "validation" / "samples.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_texts_of_every_evaluation_everywhere(fit: Fit, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(*SETTINGS, "eval.samples=2")
    found = texts(run)
    assert [one["step"] for one in found] == [2, 2, 4, 4]
    beginnings = (run.parent.parent / "valid.txt").read_text().splitlines()[:2]
    assert all(whole.startswith(one["prompt"]) for whole, one in zip(beginnings, found, strict=False))
    assert all(one["text"] for one in found)
    printed = capsys.readouterr().out
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    page = render_report([read_recorded_run(run, 50)]).decode()
    for place, one in enumerate(found):
        assert one["prompt"] in printed
        event = events.Tensors(f"samples/{place % 2 + 1}/text_summary")[place // 2]
        assert (event.step, event.tensor_proto.string_val[0].decode()) == (
            one["step"],
            f"{one['prompt']}\n\n{one['text']}",
        )
    assert "What the model wrote" in page


def test_the_first_training_samples_are_in_the_report(fit: Fit, run: Path) -> None:
    fit("train.steps=3", "eval.every=null")
    page = render_report([read_recorded_run(run, 50)]).decode()
    first = (run.parent.parent / "train.txt").read_text().splitlines()[0]
    assert f'<mark>{first}</mark><mark class="special">&lt;|endoftext|&gt;</mark>' in page
    assert "learns to end with &lt;|endoftext|&gt;" in page
    (run / "first_samples.json").write_text("[")
    damaged = read_recorded_run(run, 50)
    assert damaged.problems == [f"{run / 'first_samples.json'}: first_samples.json is damaged"]
    assert "There are none: the run has not begun" in render_report([damaged]).decode()


def test_a_resumed_run_writes_the_same_ones(fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "eval.samples=[the driver]", "run.name=through", "optim.schedule=constant")
    fit(*SETTINGS, "eval.samples=[the driver]", "train.steps=3", "optim.schedule=constant")
    fit(*SETTINGS, "eval.samples=[the driver]", "optim.schedule=constant")
    kept = [one for one in texts(run) if one["step"] != 3]  # at the end of the shorter run
    assert kept == texts(run.parent / "through")
    assert {one["prompt"] for one in kept} == {"the driver"}


def shards(folder: str) -> None:
    fit_in(Path(folder), *SETTINGS, "eval.samples=1", "parallel.strategy=fsdp", "train.micro_batch=2")


def test_under_shards(fit: Fit, project: Path, run: Path) -> None:
    run_ranks(shards, 2, str(project))
    sharded = texts(run)
    fit(*SETTINGS, "eval.samples=1", "run.name=alone")
    assert sharded == texts(run.parent / "alone")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("eval.samples=[]",), "expected whole number >= 1 | list of text"),
        (("eval.samples=1", "data.validation=null"), "no validation data"),
        ((f"eval.samples=[{'driver ' * 80}]",), "positions"),
    ],
)
def test_what_is_refused(settings: tuple[str, ...], message: str, fit: Fit, run: Path) -> None:
    with pytest.raises(UserError) as refused:
        fit("eval.every=null", *settings)
    assert message in str(refused.value)
    assert not run.exists()
