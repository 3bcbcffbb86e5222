"""Workflow 5: GPT-2 from scratch and from a folder, on own text, a dataset and a stream."""

import json
import math
from pathlib import Path

import pytest
from walkthrough import copy_example, walk

from conftest import write_text
from runs import losses, scores

pytestmark = pytest.mark.exhaustive

SMALLER = {
    "task.from_scratch.n_embd": 32,
    "task.from_scratch.n_layer": 1,
    "task.from_scratch.n_positions": 64,
    "task.tokenizer.vocab_size": 300,
    "data.sequence_length": 64,
    "train.global_batch": 8,
    "eval.every": 10,
}


def test_the_walkthrough(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    write_text(text / "test.txt", 200, seed=1)
    write_text(text / "valid.txt", 30, seed=2)
    copy_example("gpt2_lm", tmp_path, config=SMALLER)
    printed = walk("gpt2_lm", tmp_path, env={"WIKITEXT2": str(text), "HF_DATASETS_CACHE": str(tmp_path / "datasets")})

    runs = tmp_path / "runs"
    found = list(scores(runs / "gpt2").values())
    assert found[-1]["eval/validation/perplexity"] < found[0]["eval/validation/perplexity"] / 3
    assert math.isclose(
        found[-1]["eval/validation/perplexity"], math.exp(found[-1]["eval/validation/loss"]), rel_tol=1e-6
    )
    assert any(command.startswith("drawbar generate") and done.out.strip() for command, done in printed.items())

    # the same text, whoever reads it, and the same numbers
    assert losses(runs / "gpt2-dataset") == losses(runs / "gpt2")
    assert max(losses(runs / "gpt2-stream")) == 100
    config = json.loads((tmp_path / "gpt2-model" / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    tuned, scratch = losses(runs / "gpt2-tuned"), losses(runs / "gpt2")
    assert tuned[1] < scratch[1] - 1, "fine-tuning begins where training ended"
