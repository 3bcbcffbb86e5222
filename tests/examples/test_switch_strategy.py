"""Workflow 3: one setting takes a T5 and a Llama from one process to DDP, DeepSpeed and tensor parallelism."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from walkthrough import EXAMPLES, copy_example, walk

import drawbar
from harness import run_ranks
from runs import largest_difference, losses, scores, weights

pytestmark = pytest.mark.exhaustive

SMALLER = {"task.tokenizer.vocab_size": 400, "train.steps": 4, "eval.every": 4, "optim.warmup": 2}
LLAMA = {"task.from_scratch.hidden_size": 32, "task.from_scratch.intermediate_size": 48}
T5 = {"task.from_scratch.d_model": 32, "task.from_scratch.d_ff": 48, "task.generation.max_new_tokens": 4}
MODELS = ("llama", "t5")
ROW = re.compile(r"^\| `([^`]+)` \|.*\| (\S+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> list[tuple[list[str], dict[str, bool]]]:
    """The settings of each row of the README's table, and for which model it is."""
    page = (EXAMPLES / "switch_strategy" / "README.md").read_text(encoding="utf-8")
    return [(shlex.split(words), {"llama": llama == "✓", "t5": t5 == "✓"}) for words, llama, t5 in ROW.findall(page)]


def train(folder: str, jobs: list[tuple[str, str, list[str]]]) -> None:
    """(model, name of the run, settings)"""
    for model, name, settings in jobs:
        config = drawbar.load_config(f"{folder}/{model}.yaml", [*settings, f"run.name={name}"]).config
        drawbar.Trainer(config).fit()


def test_every_row_is_the_run_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_example("switch_strategy", tmp_path, llama={**SMALLER, **LLAMA}, t5={**SMALLER, **T5})
    walk("switch_strategy", tmp_path, smaller=("make_pairs.py", "make_pairs.py --limit 200"))
    monkeypatch.chdir(tmp_path)
    table = rows()
    assert len(table) == 5
    jobs = [
        (model, f"{model}-{number}", settings)
        for number, (settings, models) in enumerate(table)
        for model in MODELS
        if models[model]
    ]
    run_ranks(train, 2, str(tmp_path), jobs)
    with pytest.raises(AssertionError, match="does not know a T5"):
        run_ranks(train, 2, str(tmp_path), [("t5", "refused", table[-1][0])])
    runs = tmp_path / "runs"
    for model, name, _ in [*jobs, ("llama", "llama-zero3", [])]:
        assert largest_difference(losses(runs / model), losses(runs / name)) <= 1e-5, name
        for step, wanted in scores(runs / model).items():
            assert scores(runs / name)[step]["eval/validation/loss"] == pytest.approx(
                wanted["eval/validation/loss"], rel=1e-5
            )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-model").state_dict()
    for name, tensor in weights(runs / "llama-zero3", 4).items():
        assert torch.equal(exported[name], tensor), name
