"""Is a sentence about a film good or bad? A whole task in one file: options, tokenizer, model, data, loss, score.

``python task.py train config.yaml`` trains it, under torchrun too; ``python task.py eval runs/sentiment`` tests it.
"""

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

import drawbar

PAD, UNKNOWN = 0, 1


class NgramDetectors(nn.Module):
    """Convolutions over words, each of which looks for one phrase (Kim 2014, https://aclanthology.org/D14-1181)."""

    def __init__(self, words: int, width: int, filters: int, sizes: list[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.detectors = nn.ModuleList(nn.Conv1d(width, filters, size, padding=size // 2) for size in sizes)
        self.decide = nn.Linear(filters * len(sizes), 2)

    def forward(self, words_BL: torch.Tensor) -> torch.Tensor:
        """Scores (B, 2) of bad and good."""
        x_BDL = self.embedding(words_BL).transpose(1, 2)
        padding_B1L = (words_BL == PAD).unsqueeze(1)
        found = [F.relu(detect(x_BDL)).masked_fill(padding_B1L, 0).amax(-1) for detect in self.detectors]
        return self.decide(torch.cat(found, dim=-1))


class Sentiment(drawbar.Task):
    """Sentences labelled 0 (bad) or 1 (good)."""

    class Config(drawbar.TaskConfig):
        vocabulary: int = 8000
        """Most words to know: the most frequent ones of the training data."""
        width: int = 128
        """Size of a word's embedding."""
        filters: int = 128
        """Detectors of each size."""
        sizes: list[int] = [1, 3, 5]
        """Words that a detector sees at once; odd numbers."""
        forget: float = 0.1
        """Share of the words of a training sentence that are made unknown, other ones every epoch."""

    def build_tokenizer(self):
        backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        backend.normalizer = normalizers.Lowercase()
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[PAD]", "[UNK]"]  # PAD and UNKNOWN, in this order
        trainer = trainers.WordLevelTrainer(vocab_size=self.config.vocabulary, special_tokens=special)
        backend.train_from_iterator((record["sentence"] for record in self.records("train")), trainer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")

    def build_model(self):
        return NgramDetectors(len(self.tokenizer), self.config.width, self.config.filters, self.config.sizes)

    def encode(self, record, train):
        words = self.tokenizer(record["sentence"])["input_ids"][: self.data.sequence_length]
        if not words:
            return None  # dropped, and counted
        return {"input_ids": words, "labels": int(record["label"])} if self.has_labels else {"input_ids": words}

    def augment(self, sample, train, rng):
        if not train:
            return sample
        forgotten = rng.random(len(sample["input_ids"])) < self.config.forget
        return {**sample, "input_ids": np.where(forgotten, UNKNOWN, sample["input_ids"])}

    def collate(self, samples):
        words = [torch.as_tensor(sample["input_ids"]).long() for sample in samples]
        tensors = {"words": pad_sequence(words, batch_first=True, padding_value=PAD)}
        if self.has_labels:
            tensors["labels"] = torch.tensor([int(sample["labels"]) for sample in samples])
        return drawbar.Batch(tensors, ids=[number for sample in samples for number in sample["ids"]])

    def forward(self, model, batch):
        return model(batch["words"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model, batch):
        return model(batch["words"]).argmax(-1).tolist()

    def score(self, records):
        pairs = [(record["prediction"], int(record["label"])) for record in records]
        good = [prediction for prediction, label in pairs if label == 1]
        return {"accuracy": sum(p == y for p, y in pairs) / len(pairs), "recall_of_good": sum(good) / len(good)}


if __name__ == "__main__":
    drawbar.main(Sentiment)
