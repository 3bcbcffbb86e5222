"""``task.embedding_noise``: NEFTune, of which nothing but seed, epoch and sample decides the noise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drawbar.models.embedding_noise import KEYS, SCALES, add_noise_to_embeddings, noise
from harness import run_ranks
from runs import Fit, fit_in, losses, weights

SETTINGS = ("task.embedding_noise=20", "optim.name=sgd", "optim.lr=0.3", "train.steps=16", "checkpoint.every=8",
            "eval.every=null", "optim.schedule=constant")  # fmt: skip
MIXED = 2**64


def shares_by_splitmix(key: int, hidden: int) -> list[float]:
    """The reference in Python's integers, as in Steele, Lea and Flood (2014)."""
    found = []
    for counter in range(1, hidden + 1):
        z = (key + counter * 0x9E3779B97F4A7C15) % MIXED
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MIXED
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MIXED
        z ^= z >> 31
        found.append((z >> 40) * 2.0**-23 - 1.0)
    return found


def test_the_generator_is_splitmix64() -> None:
    keys = [0, 1, 2**61 + 12345]
    found = noise(torch.tensor([keys]), torch.ones(1, 3), 16)
    wanted = torch.tensor([[shares_by_splitmix(key, 16) for key in keys]]) / 4
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_its_size_is_that_of_the_paper() -> None:
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 2**62, (1, 50)))
    found = noise(keys, torch.full((1, 50), 5 / math.sqrt(50)), 64)
    bound = 5 / math.sqrt(50 * 64)
    assert found.abs().max() <= bound
    assert found.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(found.mean().item()) < 0.02 * bound


def test_a_model_gets_it_in_training_alone() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(5)[None]
    given: dict[str, Any] = {KEYS: torch.arange(7, 12)[None], SCALES: torch.full((1, 5), 3.0)}
    plain = model(input_ids=tokens).logits
    embedded = model.get_input_embeddings()(tokens) + noise(given[KEYS], given[SCALES], 16)
    wanted = model(inputs_embeds=embedded).logits
    add_noise_to_embeddings(model)
    torch.testing.assert_close(model.train()(input_ids=tokens, **given).logits, wanted)
    torch.testing.assert_close(model.eval()(input_ids=tokens, **given).logits, plain)
    torch.testing.assert_close(model.train()(input_ids=tokens).logits, plain)


def sharded(folder: str) -> None:
    fit_in(Path(folder), *SETTINGS, "parallel.strategy=fsdp", "train.micro_batch=2", "run.name=sharded")


def test_only_seed_epoch_and_sample_decide(fit: Fit, project: Path, run: Path) -> None:
    fit(*SETTINGS, "run.name=whole")
    fit(*SETTINGS, "run.name=alone", "train.micro_batch=1", "data.padding_free=false")
    fit(*SETTINGS, "run.name=stopped", "train.steps=8")
    fit(*SETTINGS, "run.name=stopped")
    fit(*SETTINGS, "run.name=silent", "task.embedding_noise=0")
    run_ranks(sharded, 2, str(project))
    whole = losses(run.parent / "whole")
    assert losses(run.parent / "stopped") == whole
    for name in ("alone", "sharded"):
        assert losses(run.parent / name) == pytest.approx(whole, rel=1e-5)
        for key, tensor in weights(run.parent / "whole", 16).items():
            torch.testing.assert_close(weights(run.parent / name, 16)[key], tensor, rtol=1e-4, atol=1e-5)
    silent = losses(run.parent / "silent")
    assert min(abs(silent[step] - whole[step]) for step in silent) > 1e-4


def test_packed_rows(fit: Fit, run: Path) -> None:
    """The noise of a sample depends on its own length, not on that of its row."""
    packed = ["data.batching=packed", "train.global_batch=1", "train.micro_batch=1", "run.name=packed"]
    rows = ["train.global_batch=6", "train.micro_batch=3", "run.name=rows"]
    shared = ["data.limit.train=6", "train.steps=1", "optim.warmup=0", "data.sequence_length=512"]
    shared += ["task.from_scratch.max_position_embeddings=512"]
    settings = [one for one in SETTINGS if not one.startswith("train.steps")]
    fit(*settings, *shared, *packed)
    fit(*settings, *shared, *rows)
    assert losses(run.parent / "packed")[1] == pytest.approx(losses(run.parent / "rows")[1], rel=1e-5)
