"""A run goes on as it began, whichever way a new one would compute its loss."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest

import drawbar
from drawbar.checkpoint.read import read_state
from exhaustive import some
from runs import Fit, largest_difference, losses, scores, weights

SETTINGS = ("train.steps=4", "checkpoint.every=2", "eval.every=2", "tracking.log_every=1", "task.generation=null")


def test_a_run_that_began_without_it_goes_on_bit_by_bit(fit: Fit, run: Path, project: Path) -> None:
    fit(*SETTINGS, "task.cross_entropy=plain")
    begun = run.with_name("begun")
    shutil.copytree(run, begun)
    shutil.rmtree(begun / "checkpoints" / "step-00000004")
    written = (begun / "config.yaml").read_text()
    assert "  cross_entropy: plain\n" in written
    (begun / "config.yaml").write_text(written.replace("  cross_entropy: plain\n", ""))
    fit(*SETTINGS, "run.name=begun")
    assert read_state(begun / "checkpoints" / "step-00000004")["formats"]["cross_entropy"] == "plain"
    assert losses(begun) == losses(run)
    assert scores(begun) == scores(run)
    assert all((tensor == weights(run, 4)[name]).all() for name, tensor in weights(begun, 4).items())
    with chdir(project):
        assert drawbar.load_run(begun)._engine.cross_entropy == "plain"


CONFIG = """
task: {tokenizer: {train: byte_bpe, vocab_size: 300}}
data: {train: train.txt, validation: valid.txt, sequence_length: 32}
train: {global_batch: 8, micro_batch: 4, steps: 2}
device: cpu
precision: fp32
"""
TINY_BERT = "{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}"
TINY_T5 = "{d_model: 16, d_ff: 24, num_layers: 1, num_heads: 2, d_kv: 8, dropout_rate: 0.0}"
TINY_GPT2 = "{n_embd: 16, n_layer: 1, n_head: 2}"
TASKS = {
    "causal_lm": ("task.model=gpt2", f"task.from_scratch={TINY_GPT2}"),
    "masked_lm": ("task.model=bert", f"task.from_scratch={TINY_BERT}"),
    "seq2seq": (
        "task.model=t5",
        f"task.from_scratch={TINY_T5}",
        "task.source_column=text",
        "task.target_column=text",
        "task.generation=null",
    ),
}


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("task", some(TASKS, 2))
def test_a_new_run_computes_the_same_loss_in_the_head(
    task: str, batching: str, fit: Fit, run: Path, project: Path
) -> None:
    (project / "config.yaml").write_text(CONFIG)
    settings = ("eval.every=2", "tracking.log_every=1", f"data.batching={batching}")
    for way in ("auto", "plain"):
        fit(*settings, f"task.type={task}", *TASKS[task], f"task.cross_entropy={way}", f"run.name={way}")
    chunked, plain = run.with_name("auto"), run.with_name("plain")
    assert read_state(chunked / "checkpoints" / "step-00000002")["formats"]["cross_entropy"] == "chunked"
    assert largest_difference(losses(plain), losses(chunked)) < 1e-5
    assert scores(chunked)[2] == pytest.approx(scores(plain)[2], rel=1e-5)
