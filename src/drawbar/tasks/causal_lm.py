"""The built-in task ``causal_lm``: predict the next token, from scratch or from a pretrained model."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from drawbar.config.schema import CausalLMConfig, TokenizerTraining
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL, split_tokens
from drawbar.data.tokenizer import begin_token, load_tokenizer, train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.huggingface import build_from_scratch, fit_embeddings, load_pretrained
from drawbar.tasks.batch import Batch, pad_and_stack
from drawbar.tasks.task import Task


class CausalLM(Task):
    """Next-token prediction. Labels stand under their own tokens, as in transformers; the loss shifts them by one."""

    Config = CausalLMConfig
    config: CausalLMConfig

    def build_tokenizer(self) -> Any:
        wanted = self.config.tokenizer
        if isinstance(wanted, TokenizerTraining):
            texts = (self._text(record) for record in self.records("train"))
            return train_byte_bpe(texts, wanted.vocab_size)
        if wanted is None and self.config.from_scratch is not None:
            raise UserError(
                "a model from scratch needs a tokenizer",
                where="task.tokenizer",
                remedy="name one (task.tokenizer=gpt2), or train one (task.tokenizer={train: byte_bpe})",
            )
        return load_tokenizer(wanted or self.config.model)

    def build_model(self) -> nn.Module:
        if self.config.from_scratch is not None:
            model = build_from_scratch(self.config.model, self.config.from_scratch, self.tokenizer)
        else:
            model = load_pretrained(self.config.model)
        fit_embeddings(model, self.tokenizer, resize=self.config.resize_embeddings)
        self._check_length(model)
        return model

    def _check_length(self, model: nn.Module) -> None:
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.data.sequence_length > limit:
            raise UserError(
                f"data.sequence_length is {self.data.sequence_length}, but the model has {limit} positions",
                where="data.sequence_length",
                remedy=f"set data.sequence_length={limit}, or a larger max_position_embeddings in task.from_scratch",
            )

    def encode(self, record: dict[str, Any], train: bool) -> list[Sample] | None:
        """A document: a begin token, its text, an end token; split into windows where it is too long."""
        tokens = self.tokenizer(self._text(record), add_special_tokens=False)["input_ids"]
        framed = (begin_token(self.tokenizer), *tokens, self.tokenizer.eos_token_id)
        tokens = [token for token in framed if token is not None]
        if len(tokens) < 2:  # nothing to predict
            return None
        windows = split_tokens(np.asarray(tokens, dtype=np.int32), self.data.sequence_length)
        return [{"input_ids": window, "labels": window} for window in windows]

    def _text(self, record: dict[str, Any]) -> str:
        text = record.get(self.config.text_column)
        if not isinstance(text, str):
            raise UserError(
                f"the record has no text under {self.config.text_column!r}; it has {', '.join(map(repr, record))}",
                where="task.text_column",
                remedy="set task.text_column to the key that holds the text",
            )
        return text

    def collate(self, samples: list[Sample]) -> Batch:
        batch = pad_and_stack(samples, pad_token=self.tokenizer.eos_token_id or 0)
        # int32 keeps the encoded data small in memory; embeddings and losses want int64
        return Batch({name: tensor.long() for name, tensor in batch.items()}, batch.ids)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        # No attention mask: padding is on the right, where a causal model never looks. A cache would hide from
        # transformers that restarting position_ids mean several documents in a row.
        return model(**batch.inputs, use_cache=False)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        logits_BLV, labels_BL = outputs.logits[:, :-1], batch["labels"][:, 1:]
        return functional.cross_entropy(
            logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )

    def weight(self, batch: Batch) -> float:
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    def loss_scores(self, loss: float, weight: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Mean loss (nats a token), perplexity, and bits per UTF-8 byte of text (end tokens are paid for, too)."""
        size = sum(len(self._text(record).encode()) for record in records)
        mean = loss / weight
        perplexity = math.exp(mean) if mean < 700 else math.inf
        return {"loss": mean, "perplexity": perplexity, "bits_per_byte": loss / math.log(2) / max(size, 1)}
