"""What optim.state_dtype=bf16 costs in accuracy: the same run with AdamW's moments in fp32 and in bf16.

    python -m benchmarks.moments_accuracy

A small Llama learns the source of Python's standard library from scratch, with AdamW's default betas. Runs of one seed
have the same first weights and batches. Besides the two formats that drawbar has, moments are rounded to the nearest
bf16 number, which is what it does not do. Prints the loss on held-out files, writes JSON.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from unittest import mock

from torch import Tensor

import drawbar
from benchmarks.common.report import write_answer
from drawbar.optim import bf16_moments
from drawbar.tracking.table import print_table

FP32, STOCHASTIC, NEAREST = "fp32", "bf16", "bf16, rounded to nearest"
FORMATS = (FP32, STOCHASTIC, NEAREST)
Losses = dict[str, list[float]]
"""By format: the held-out loss with each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/moments_accuracy.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = compare(options.seeds, options.steps, Path(folder))
    write_answer(options.json, steps=options.steps, losses=losses)
    rows = []
    for name, found in losses.items():
        differences = [loss - reference for loss, reference in zip(found, losses[FP32], strict=True)]
        spread = f"{min(differences):+.4f} to {max(differences):+.4f}"
        rows.append([name, f"{statistics.mean(found):.4f}", f"{statistics.mean(differences):+.4f}", spread])
    print_table(f"Held-out loss after {options.steps:,} steps", ["moments", "mean", "against fp32", "by seed"], rows)


def compare(seeds: int, steps: int, folder: Path, settings: tuple[str, ...] = ()) -> Losses:
    """Train with every seed and format, in turn."""
    losses: Losses = {name: [] for name in FORMATS}
    for seed in range(seeds):
        for name in FORMATS:
            losses[name].append(train(name, seed, steps, folder, settings))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    return losses


def train(name: str, seed: int, steps: int, folder: Path, settings: tuple[str, ...]) -> float:
    """The held-out loss of a run."""
    config = drawbar.load_config(
        None,
        [
            "task.type=causal_lm",
            "task.model=llama",
            "task.from_scratch={hidden_size: 64, intermediate_size: 176, num_hidden_layers: 2, "
            "num_attention_heads: 2, max_position_embeddings: 64}",
            "task.tokenizer={train: byte_bpe, vocab_size: 512}",
            *(f"data.{split}=python_stdlib" for split in ("train", "validation")),
            "data.limit={train: 200, validation: 20}",
            "data.sequence_length=64",
            "data.batching=packed",
            f"data.cache={folder}/cache",
            "train.global_batch=16",
            f"train.steps={steps}",
            "optim={lr: 2.0e-3, schedule: cosine, warmup: 0.02, min_lr_ratio: 0.1}",
            f"optim.state_dtype={'fp32' if name == FP32 else 'bf16'}",
            "precision=fp32",
            "checkpoint.every=null",
            "tracking={log_every: 500, tensorboard: false}",
            f"run.dir={folder}/runs",
            f"run.name={name.replace(', ', '-').replace(' ', '-')}-{seed}",
            f"run.seed={seed}",
            *settings,
        ],
    ).config
    round_by = _to_nearest if name == NEAREST else bf16_moments.store_rounded
    with mock.patch.object(bf16_moments, "store_rounded", round_by):
        drawbar.Trainer(config).fit()
    scores = json.loads((config.run_dir / "eval" / "validation" / "scores.json").read_text())
    return float(scores["loss"])


def _to_nearest(target: Tensor, exact: Tensor, bits: Tensor) -> None:
    """In place of ``store_rounded``."""
    target.copy_(exact)


if __name__ == "__main__":
    main()
