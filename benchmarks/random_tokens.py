"""The task of ``busy_neighbour.py``: a small Llama on random tokens, which need no files and no encoding."""

from typing import Any

import torch
from torch import nn

import drawbar
from busy_neighbour import LENGTH, VOCABULARY, make_model  # type: ignore[import-not-found] # this file is run, not imported


class RandomTokens(drawbar.Task):
    def build_model(self) -> nn.Module:
        return make_model()

    def records(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(800)]

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(record["number"])
        return {"input_ids": torch.randint(VOCABULARY, (LENGTH,), generator=generator)}

    def loss(self, outputs: Any, batch: drawbar.Batch) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1], batch["input_ids"][:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def num_targets(self, batch: drawbar.Batch) -> int:
        return batch["input_ids"][:, 1:].numel()


if __name__ == "__main__":
    drawbar.main(RandomTokens)
