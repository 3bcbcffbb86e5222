"""From a configuration to the parts of a run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drawbar
from drawbar.data.dataset import Sample
from drawbar.errors import UserError
from drawbar.runtime.dist import World
from drawbar.runtime.env import Place
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tracking.console import make_console
from drawbar.train.setup import build_task, describe_split, eval_micro_batch, load_split
from harness import run_ranks


class Odd(CausalLM):
    """causal_lm whose rank 1 reads something else."""

    def encode(self, record: dict[str, Any], train: bool) -> list[Sample] | None:
        if os.environ.get("RANK") == "1" and record["text"].startswith("the driver"):
            return None
        return super().encode(record, train)


def world() -> World:
    return World(Place.from_environment(), torch.device("cpu"), timeout=60)


def load_odd_split(folder: str) -> str:
    os.chdir(folder)
    Path("train.txt").write_text("the load\nthe driver\n")
    config = drawbar.load_config("config.yaml").config
    with world() as joined:
        task = build_task(Odd, config, joined, config.run_dir)
        try:
            load_split(task, "train", config, joined, make_console(False))
        except UserError as error:
            return str(error)
    return "accepted"


def test_ranks_that_read_other_data_are_named(project: Path) -> None:
    assert run_ranks(load_odd_split, 1, str(project)) == ["accepted"]
    first, _ = run_ranks(load_odd_split, 2, str(project))
    assert first.startswith("rank 1 reads other train data than rank 0")


def test_a_description_counts_what_training_will_see(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    Path("train.txt").write_text("the load\n\nthe engine\n" + "the hill " * 200)
    described = {}
    for packing in ("false", "true"):
        config = drawbar.load_config("config.yaml", [f"data.packing={packing}"]).config
        task = build_task(CausalLM, config, world(), config.run_dir)
        split = load_split(task, "train", config, world(), make_console(False))
        described[packing] = describe_split(split.records, split.samples, split.rows)
        tokens = sum(len(sample["input_ids"]) for sample in split.samples.samples)
        assert described[packing].startswith(f"3 records, {len(split.samples)} samples")
        assert described[packing].endswith(f"{tokens:,} tokens")
        assert np.array_equal(np.unique(split.samples.record_of), [0, 1, 2])
    assert "rows" not in described["false"]
    assert "rows" in described["true"]


@pytest.mark.parametrize(
    ("settings", "rows"), [((), 4), (("train.micro_batch=2",), 2), (("train.micro_batch=2", "eval.micro_batch=7"), 7)]
)
def test_rows_of_an_evaluation_forward(settings: tuple[str, ...], rows: int, project: Path) -> None:
    config = drawbar.load_config(project / "config.yaml", settings).config
    assert eval_micro_batch(config, world()) == rows
