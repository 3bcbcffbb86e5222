"""The task of ``busy_neighbour.py``: a small Llama on random tokens, which need no files and no encoding."""

import torch
from torch import nn

import drawbar
from busy_neighbour import LENGTH, VOCABULARY, make_model


class RandomTokens(drawbar.Task):
    def build_model(self):
        return make_model()

    def records(self, split):
        return [{"number": number} for number in range(800)]

    def encode(self, record, train):
        generator = torch.Generator().manual_seed(record["number"])
        return {"input_ids": torch.randint(VOCABULARY, (LENGTH,), generator=generator)}

    def loss(self, outputs, batch):
        logits, targets = outputs.logits[:, :-1], batch["input_ids"][:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def num_targets(self, batch):
        return batch["input_ids"][:, 1:].numel()


if __name__ == "__main__":
    drawbar.main(RandomTokens)
