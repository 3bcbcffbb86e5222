"""Workflow 4: Llama on JSONL text, from a folder, pipeline × tensor × data on 4 and 8 local ranks, LoRA."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from walkthrough import copy_example, walk

from runs import largest_difference, losses, scores

pytestmark = pytest.mark.exhaustive

SMALLER = {
    "task.from_scratch.hidden_size": 32,
    "task.from_scratch.intermediate_size": 48,
    "task.from_scratch.max_position_embeddings": 64,
    "task.tokenizer.vocab_size": 400,
    "data.sequence_length": 32,
    "train.global_batch": 8,
    "train.steps": 8,
    "eval.every": 4,
}
FEWER = ("train.steps=40", "train.steps=4")


def test_the_walkthrough(tmp_path: Path) -> None:
    copy_example("llama_at_scale", tmp_path, config=SMALLER)
    printed = walk("llama_at_scale", tmp_path, smaller=FEWER)

    runs = tmp_path / "runs"
    one = losses(runs / "one")
    assert one[1] < losses(runs / "llama")[1] - 0.2, "it begins where training ended"
    for name in ("four", "eight"):
        assert largest_difference(one, losses(runs / name)) < 1e-4
        for step, wanted in scores(runs / "one").items():
            assert scores(runs / name)[step]["eval/validation/loss"] == pytest.approx(
                wanted["eval/validation/loss"], rel=1e-4
            )
    assert min(losses(runs / "lora").values()) < 1.05 * one[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-eight")
    assert model.config.num_hidden_layers == 4
    merged = json.loads((tmp_path / "llama-tuned" / "config.json").read_text())
    assert merged["model_type"] == "llama"
    assert any(command.startswith("drawbar generate") and done.out.strip() for command, done in printed.items())
