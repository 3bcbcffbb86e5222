"""The built-in task ``seq2seq``: write a text from another, with an encoder–decoder such as T5 or BART."""

from functools import cached_property
from typing import Any

from torch import nn

from drawbar.config.schema.task_sections import Seq2SeqConfig
from drawbar.data.dataset import Sample
from drawbar.data.tokenizer import Wrapping, encode_to_limit, set_languages, special_tokens_around
from drawbar.errors import UserError
from drawbar.models.heads import longest_input
from drawbar.models.huggingface import load_model_config
from drawbar.tasks.batch import Batch
from drawbar.tasks.generation import generation_options
from drawbar.tasks.pretrained import TokenTask, mean_and_perplexity
from drawbar.tasks.task import require

BEGINS_WITH_THE_LAST = {"mbart", "plbart"}
"""Families whose decoder reads a target with its last token moved to the front."""


class Seq2Seq(TokenTask):
    """The decoder reads the target shifted by one, and its labels are the target."""

    Config = Seq2SeqConfig
    config: Seq2SeqConfig
    head = "seq2seq"
    label_placement = "decoder"
    usual_metrics = ("bleu",)
    loss_metrics = ("loss", "perplexity")
    wrapping = "end"

    def build_tokenizer(self) -> Any:
        tokenizer = super().build_tokenizer()
        set_languages(tokenizer, self.config.source_language, self.config.target_language)
        return tokenizer

    def wrapping_for(self, tokenizer: Any) -> Wrapping | None:
        """As ``super()``; if that is None and texts get no end token, a wrapping that adds it: models learn to stop."""
        wanted = super().wrapping_for(tokenizer)
        before, after = special_tokens_around(tokenizer)
        if wanted is not None or tokenizer.eos_token_id in (None, *after):
            return wanted
        return "begin_end" if before else "end"

    @property
    def learns_to_stop(self) -> bool:
        return bool(self._around_target[1])

    @cached_property
    def _around_target(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a target."""
        return special_tokens_around(self.tokenizer, "text_target")

    @cached_property
    def _decoder_start(self) -> int:
        """The token that the decoder begins with: as the model's config says, or for mBART the target language's."""
        config = load_model_config(self.model_name, self.config.from_scratch, self.tokenizer)
        if self.config.target_language is not None and config.model_type in BEGINS_WITH_THE_LAST:
            return self._around_target[1][-1]
        if config.decoder_start_token_id is None:
            raise UserError(
                f"the config of {self.config.model} has no decoder_start_token_id",
                where="task.model",
                remedy="add to its config.json what the decoder begins with",
            )
        return config.decoder_start_token_id

    def model_fields(self) -> dict[str, Any]:
        return {"prefix": self.config.source_prefix or None}  # what pipelines of transformers put before a text

    def generation_fields(self, model: nn.Module) -> dict[str, Any]:
        fields = super().generation_fields(model) | {"decoder_start_token_id": self._decoder_start}
        if self.config.target_language is not None:
            before, _ = self._around_target
            fields["forced_bos_token_id"] = before[0] if before else None  # None: the decoder's start is the language
        return fields

    def required_positions(self) -> dict[str, int]:
        target = self.config.target_length
        return super().required_positions() | ({"task.target_length": target} if target is not None else {})

    def texts(self, record: dict[str, Any]) -> list[str]:
        return [self._source(record), require(record, self.config.target_column, "task.target_column")]

    def _source(self, record: dict[str, Any]) -> str:
        return self.config.source_prefix + require(record, self.config.source_column, "task.source_column")

    def encode(self, record: dict[str, Any], train: bool) -> Sample:
        limit = self.data.sequence_length
        source, cut = encode_to_limit(self.tokenizer, limit, "data.sequence_length", self._source(record))
        sample: Sample = {"input_ids": source["input_ids"]}
        if self.has_labels:
            labels, cut_target = self._labels(require(record, self.config.target_column, "task.target_column"))
            cut = cut or cut_target
            sample |= {"labels": labels, "decoder_input_ids": [self._decoder_start, *labels[:-1]]}
        return {**sample, "truncated": True} if cut else sample

    def _labels(self, target: str) -> tuple[list[int], bool]:
        """A target's token ids and whether it was truncated. Drops a begin token that equals the end token,
        as generation would stop at it at once."""
        setting = "data.sequence_length" if self.config.target_length is None else "task.target_length"
        limit = self.config.target_length or self.data.sequence_length
        ends_at_once = int(self._around_target[0] == [self.tokenizer.eos_token_id])
        encoded, cut = encode_to_limit(self.tokenizer, limit + ends_at_once, setting, text_target=target)
        return encoded["input_ids"][ends_at_once:], cut

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(**batch.inputs, use_cache=False)

    @property
    def predicts(self) -> bool:
        return self.config.generation is not None or type(self).predict is not Seq2Seq.predict

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        assert self.config.generation is not None
        written_BT = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            pad_token_id=self.pad_token_id,
            **generation_options(self.config.generation, longest_input(model)),
        )
        return [text.strip() for text in self.tokenizer.batch_decode(written_BT, skip_special_tokens=True)]

    def references(self, records: list[dict[str, Any]]) -> list[Any]:
        return [require(record, self.config.target_column, "task.target_column") for record in records]

    def loss_scores(self, loss: float, num_targets: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Mean loss (nats a target token), and perplexity."""
        return mean_and_perplexity(loss, num_targets)
