"""The built-in task ``masked_lm``: find the tokens that were masked (Devlin et al. 2019)."""

from typing import Any

import numpy as np

from drawbar.config.schema.task_sections import MaskedLMConfig
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError
from drawbar.tasks.pretrained import TokenTask, mean_and_perplexity
from drawbar.tasks.task import require


class MaskedLM(TokenTask):
    """Masked language modelling; every epoch masks other tokens, an evaluation always the same."""

    Config = MaskedLMConfig
    config: MaskedLMConfig
    head = "masked_lm"
    label_placement = "token"
    loss_metrics = ("loss", "perplexity")
    special_tokens = {"mask_token": "<|mask|>"}

    def build_tokenizer(self) -> Any:
        tokenizer = super().build_tokenizer()
        if tokenizer.mask_token_id is None:
            raise UserError(
                "the tokenizer has no mask token",
                where="task.tokenizer",
                remedy="use that of a masked language model, or train one: task.tokenizer={train: byte_bpe}",
            )
        return tokenizer

    def tokenizer_options(self) -> dict[str, Any]:
        return super().tokenizer_options() | {"split_special_tokens": False}  # users write the mask into a text

    def texts(self, record: dict[str, Any]) -> list[str]:
        return [require(record, self.config.text_column, "task.text_column")]

    def encode(self, record: dict[str, Any], train: bool) -> list[Sample] | None:
        """A document in windows, each with the special tokens that the tokenizer puts around a text."""
        (text,) = self.texts(record)
        before, after = self.special_around
        inside = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        size = max(1, self.data.sequence_length - len(before) - len(after))
        windows = [np.array([*before, *inside[i : i + size], *after], np.int32) for i in range(0, len(inside), size)]
        return [{"input_ids": window, "labels": window} for window in windows] or None

    def augment(self, sample: Sample, train: bool, rng: np.random.Generator) -> Sample:
        """Choose targets; of these, mask 80%, replace 10% by random tokens, and leave 10%."""
        tokens = sample["input_ids"]
        chosen = (rng.random(len(tokens)) < self.config.mask_share) & ~np.isin(tokens, self.tokenizer.all_special_ids)
        fate = rng.random(len(tokens))
        changed = np.where(chosen & (fate < 0.8), self.tokenizer.mask_token_id, tokens)
        random_tokens = rng.integers(len(self.tokenizer), size=len(tokens))
        changed = np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_tokens, changed)
        return {**sample, "input_ids": changed, "labels": np.where(chosen, tokens, IGNORED_LABEL)}

    def loss_scores(self, loss: float, num_targets: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Mean loss (nats a masked token), and its exponential."""
        return mean_and_perplexity(loss, num_targets)
