"""What the tests of whole runs share: reading a run's losses and weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of every logged step."""
    return {int(line["step"]): line["train/loss"] for line in metrics(run) if "train/loss" in line}


def scores(run: Path) -> dict[int, dict[str, float]]:
    """The scores of every evaluation."""
    return {
        int(line["step"]): {name: value for name, value in line.items() if name.startswith("eval/")}
        for line in metrics(run)
        if any(name.startswith("eval/") for name in line)
    }


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint."""
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference between two loss traces of the same steps."""
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)
