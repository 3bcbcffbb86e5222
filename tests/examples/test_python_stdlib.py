"""The demo, on little data; and the n-gram models that its Llama is compared with."""

import sys
from itertools import product
from pathlib import Path

import pytest

from conftest import write_text
from harness import run_script

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "python_stdlib"))

from ngrams import bits_per_byte  # noqa: E402


def test_the_demo_runs_and_runs_again(tmp_path: Path) -> None:
    write_text(tmp_path / "train.txt", 200, seed=1)
    write_text(tmp_path / "valid.txt", 20, seed=2)
    settings = ("data.train=train.txt", "data.validation=valid.txt", "train.steps=3", "tracking.log_every=1")
    smaller = ("task.tokenizer.vocab_size=300", "task.from_scratch.num_hidden_layers=1")
    for _ in range(2):
        done = run_script(ROOT / "examples" / "python_stdlib" / "demo.py", *settings, *smaller, cwd=tmp_path)
        assert done.code == 0, done.out + done.err
        assert "this Llama, after 3 steps" in done.out
        assert "A sample:" in done.out
        assert "runs/demo/report.html" in done.out
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "best.json").exists()
    assert "3/3" in (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")


def test_a_context_that_was_seen_is_worth_something() -> None:
    train, validation = ["abcabcabcabc"] * 5, ["abcabc"]
    unigram, trigram = (bits_per_byte(train, validation, order) for order in (1, 3))
    assert trigram < 1 < unigram < 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one(order: int) -> None:
    """2 ** -bits, summed over every next byte after a fixed beginning, divided by the beginning's own probability."""
    train = ["the cat", "the hat", "a cat", ""]
    beginning = "the "
    known = 2 ** -(bits_per_byte(train, [beginning], order) * len(beginning))
    total = 0.0
    for byte in range(128):  # one UTF-8 byte each; the other 128 share what is left
        text = beginning + chr(byte)
        total += 2 ** -(bits_per_byte(train, [text], order) * len(text)) / known
    unseen = chr(1)
    others = 128 * 2 ** -(bits_per_byte(train, [beginning + unseen], order) * (len(beginning) + 1)) / known
    assert total + others == pytest.approx(1)


def test_an_empty_model_knows_nothing() -> None:
    texts = ["".join(letters) for letters in product("ab", repeat=2)]
    assert bits_per_byte([""], texts, 3) == pytest.approx(8)
