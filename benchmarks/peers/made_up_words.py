"""Language modelling of made-up documents, whose words are token numbers: any amount of data, encoded quickly."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import drawbar
from drawbar.data.tokenizer import train_byte_bpe

VOCABULARY = 5000
"""Words: ``w0000`` to ``w4999``."""
WAIT, WORK = "BENCHMARK_AUGMENT_WAIT", "BENCHMARK_AUGMENT_WORK"
"""Environment variables: seconds that ``augment`` sleeps, or computes, for each sample."""


class MadeUpWords(drawbar.CausalLM):
    def build_tokenizer(self) -> Any:
        return train_byte_bpe([], 257)  # for what it says of padding: the words are numbers already

    def encode(self, record: dict[str, Any], train: bool) -> list[dict[str, Any]]:
        tokens = np.array([int(word[1:]) for word in record["text"].split()], np.int32)
        return [{"input_ids": tokens, "labels": tokens}]


class Watched(MadeUpWords):
    """Notes when each step's first forward begins."""

    forwards: list[float] = []

    def forward(self, model: Any, batch: drawbar.Batch) -> Any:
        self.forwards.append(time.perf_counter())
        return super().forward(model, batch)


class SlowAugment(Watched):
    """``augment`` takes its time."""

    def augment(self, sample: dict[str, Any], train: bool, rng: np.random.Generator) -> dict[str, Any]:
        time.sleep(float(os.environ.get(WAIT, 0)))
        end = time.perf_counter() + float(os.environ.get(WORK, 0))
        while time.perf_counter() < end:
            pass
        return sample


def write_documents(path: Path, tokens: int) -> None:
    """JSONL of that many words, about; six bytes each."""
    chance = random.Random(0)
    words = [f"w{number:04d}" for number in range(VOCABULARY)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < tokens:
            count = chance.randint(20, 300)
            file.write(json.dumps({"text": " ".join(chance.choices(words, k=count))}) + "\n")
            written += count
