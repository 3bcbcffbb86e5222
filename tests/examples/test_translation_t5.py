"""Workflow 3: T5 and BART learn a made-up language: every word has one translation, and the order is reversed."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from walkthrough import copy_example, walk

from runs import metrics, scores

pytestmark = pytest.mark.exhaustive

ENGLISH = "the dog man sees likes red old small house tree".split()  # noqa: SIM905 - a sentence reads better
GERMAN = "der hund mann sieht mag rot alt klein haus baum".split()  # noqa: SIM905

SMALLER = {
    "task.from_scratch.d_model": 64,
    "task.tokenizer.vocab_size": 330,
    "task.generation.max_new_tokens": 12,
    "train.global_batch": 32,
    "train.micro_batch": 32,
    "eval.every": 100,
    "checkpoint.every": 100,
}
T5 = {
    "train.epochs": 4,
    "task.from_scratch.d_kv": 16,
    "task.from_scratch.d_ff": 128,
    "task.from_scratch.dropout_rate": 0.0,
}
BART = {"train.epochs": 4, "task.from_scratch.encoder_ffn_dim": 128, "task.from_scratch.decoder_ffn_dim": 128}


def test_the_walkthrough(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    copy_example("translation_t5", tmp_path, config={**SMALLER, **T5}, bart={**SMALLER, **BART})
    walk("translation_t5", tmp_path, env={"MULTI30K": str(tmp_path)})

    runs = tmp_path / "runs"
    for name in ("t5", "bart"):
        bleu = [found["eval/validation/bleu"] for found in scores(runs / name).values()]
        assert bleu[0] < 5 < 40 < bleu[-1], f"{name}: {bleu}"
    assert json.loads((runs / "t5" / "eval" / "test" / "scores.json").read_text())["bleu"] > 40

    fork = [line for line in metrics(runs / "t5-gentler") if "train/loss" in line]
    assert fork[0]["step"] > 100, "a fork goes on from the step of the run that it leaves"
    assert max(line["train/lr"] for line in fork) < 3e-3
    steps = [line for line in metrics(runs / "t5") if "train/loss" in line]
    finer = {line["step"]: line["train/loss"] for line in metrics(runs / "t5-bf16") if "train/loss" in line}
    assert abs(finer[1] - steps[0]["train/loss"]) < 0.1 * finer[1]

    written = [json.loads(line) for line in (tmp_path / "german.jsonl").read_text().splitlines()]
    assert len(written) == len((tmp_path / "english.txt").read_text().splitlines())
    assert all(isinstance(record["prediction"], str) for record in written)


def write_pairs(folder: Path) -> None:
    """Files laid out as those of Multi30k: line n of ``train.en.gz`` belongs to line n of ``train.de.gz``."""
    for seed, (name, count) in enumerate({"train": 1600, "val": 24, "test_2016_flickr": 24}.items()):
        chance = np.random.default_rng(seed)
        rows = [chance.integers(len(ENGLISH), size=chance.integers(4, 7)) for _ in range(count)]
        for language, words, step in (("en", ENGLISH, 1), ("de", GERMAN, -1)):
            lines = (" ".join(words[number] for number in row[::step]) + "\n" for row in rows)
            with gzip.open(folder / f"{name}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(lines)
