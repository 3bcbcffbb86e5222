"""Ranks that hold the same part of a parameter hold the same bits of it: they draw the same dropout, from a start and
after a resume from any other layout."""

import shutil
from pathlib import Path

import pytest
import torch

from conftest import make_project
from drawbar.engines.engine import Engine
from drawbar.parity.recorder import unequal_weights
from harness import run_ranks
from runs import fit_in, losses

pytestmark = pytest.mark.exhaustive

GPT2 = "{n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, resid_pdrop: 0.2, embd_pdrop: 0.2, attn_pdrop: 0.2}"
SETTINGS = ("train.steps=4", "checkpoint.every=2", "eval.every=null", "train.micro_batch=2")
LAYOUTS = {
    "one": ["parallel.strategy=single"],
    "ddp": ["parallel.strategy=ddp"],
    "tensor": ["parallel.strategy=ddp", "parallel.tensor=2"],
    "sequence": ["parallel.strategy=ddp", "parallel.tensor=2", "parallel.sequence=true"],
    "pipeline": ["parallel.strategy=ddp", "parallel.pipeline=2"],
}
RESUMES = [(saved, "tensor") for saved in ("one", "ddp", "pipeline", "tensor")] + [("tensor", "ddp"), ("ddp", "ddp")]
Fitted = dict[str, tuple[list[str], list[int]]]
"""By run: what ranks hold differently at its end, as rank 0 tells it; and what this rank would draw next."""


def fit(project: Path, layout: str, name: str) -> Fitted:
    told: list[str] = []
    close = Engine.close

    def look(engine: Engine) -> None:
        told.extend(note.text for note in unequal_weights(engine, engine.world, [], "at the end"))
        close(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "close", look)
        fit_in(project, *SETTINGS, *LAYOUTS[layout], f"run.name={name}")
    return {name: (told, torch.randint(1_000_000, (4,)).tolist())}


def fit_all(folder: str, runs: list[tuple[str, str]]) -> Fitted:
    """``runs``: (layout, name)."""
    found: Fitted = {}
    for layout, name in runs:
        found |= fit(Path(folder), layout, name)
    return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Fitted]]:
    """Runs from the start, and from their checkpoints in the middle; with what each of two ranks saw."""
    project = make_project(tmp_path_factory.mktemp("replicas"))
    config = project / "config.yaml"
    begin, end = (config.read_text().index(part) for part in ("task:", "data:"))
    task = f"task: {{model: gpt2, from_scratch: {GPT2}, tokenizer: {{train: byte_bpe, vocab_size: 300}}}}\n"
    config.write_text(config.read_text()[:begin] + task + config.read_text()[end:])
    fit(project, "one", "one")
    starts = run_ranks(fit_all, 2, str(project), [(name, name) for name in LAYOUTS if name != "one"])
    for saved, layout in RESUMES:
        copy = project / "runs" / f"{saved}-{layout}"
        shutil.copytree(project / "runs" / saved, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000004")
    resumes = run_ranks(fit_all, 2, str(project), [(layout, f"{saved}-{layout}") for saved, layout in RESUMES])
    return project, [start | resume for start, resume in zip(starts, resumes, strict=True)]


RUNS = [name for name in LAYOUTS if name != "one"] + [f"{saved}-{layout}" for saved, layout in RESUMES]


@pytest.mark.parametrize("run", RUNS)
def test_replicas_are_equal_in_every_bit(fitted: tuple[Path, list[Fitted]], run: str) -> None:
    _, (first, _) = fitted
    assert first[run][0] == []


@pytest.mark.parametrize("run", RUNS)
def test_only_ranks_of_one_tensor_group_draw_the_same(fitted: tuple[Path, list[Fitted]], run: str) -> None:
    _, (first, second) = fitted
    alike = run.endswith(("tensor", "sequence"))
    assert (first[run][1] == second[run][1]) == alike


@pytest.mark.parametrize("layout", ["tensor", "ddp"])
def test_a_resume_is_the_run_that_went_on(fitted: tuple[Path, list[Fitted]], layout: str) -> None:
    project, _ = fitted
    assert losses(project / "runs" / f"{layout}-{layout}") == losses(project / "runs" / layout)
