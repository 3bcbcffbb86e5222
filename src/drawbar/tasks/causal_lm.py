"""The built-in task ``causal_lm``: predict the next token of documents, of completions or of a chat's answers."""

import math
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import CausalLMConfig, PairConfig
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL, LabelPlacement, split_tokens
from drawbar.data.tokenizer import MODEL_INPUTS, begin_tokens
from drawbar.errors import UserError
from drawbar.models.embedding_noise import KEYS, SCALES
from drawbar.models.heads import Head
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch, pad_and_stack
from drawbar.tasks.chat import ChatFormat, chat_prompt, parts_written, read_template
from drawbar.tasks.generation import continuations, stop_with, takes_prompts_together
from drawbar.tasks.messages import ALPACA_INPUT, Chat, alpaca_prompt, as_chat, check_message, message_text, reads_alpaca
from drawbar.tasks.pretrained import PretrainedTask, mean_and_perplexity
from drawbar.tasks.task import require
from drawbar.tasks.task_context import TaskContext

BEGINNING = 8
"""Tokens of a document that a model is asked to continue."""


class DecoderTask(PretrainedTask):
    """A task on a decoder, of texts or of chats."""

    head: ClassVar[Head] = "causal_lm"
    label_placement: LabelPlacement = "next_token"
    wrapping = "begin"
    config: CausalLMConfig | PairConfig

    @property
    def reads_chats(self) -> bool:
        """Whether records are chats."""
        raise NotImplementedError

    def build_tokenizer(self) -> Any:
        tokenizer = super().build_tokenizer()
        if self.config.chat_template is not None:
            tokenizer.chat_template = read_template(self.config.chat_template)
        if self.reads_chats:
            tokenizer.split_special_tokens = False  # the chat template writes special tokens into the text
        return tokenizer

    @property
    def learns_to_stop(self) -> bool:
        return bool(self.chat_format.stop_tokens) if self.reads_chats else self.tokenizer.eos_token_id is not None

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        model = super()._prepare_model(model)
        if self.reads_chats:
            try:
                stop_with(model, self.chat_format.stop_tokens)
            except UserError as error:
                if self.task_context.begins_training:
                    raise
                # an older model can still generate
                logger.warning("what the model writes ends with the tokenizer's end token alone: %s", error.what)
        return model

    @cached_property
    def _end(self) -> list[int]:
        """The end token, if the tokenizer does not append it itself: without it a model never learns to stop."""
        end, after = self.tokenizer.eos_token_id, self.special_around[1]
        return [] if end is None or end in after else [end]

    def describe_special_tokens(self) -> str:
        if self.reads_chats:
            return "what the chat template writes"
        added = "".join(f" {token} (which the task adds)" for token in self.tokenizer.convert_ids_to_tokens(self._end))
        return f"{super().describe_special_tokens()}{added}"

    def prompt_of(self, record: dict[str, Any]) -> str | dict[str, Any]:
        """What to ask a model to see what it makes of a record: a text, or a record with the ``messages`` of a chat."""
        raise NotImplementedError

    def question(self, text: str) -> str | list[dict[str, Any]]:
        """The prompt that asks a model something as its training data do: the messages of a chat, or a text."""
        if self.reads_chats:
            return [{"role": "user", "content": text}]
        return alpaca_prompt(text, None) if reads_alpaca(self.config) else text

    def tokenizer_options(self) -> dict[str, Any]:
        """Prompts are padded on the left, and may be longer than what was trained on."""
        return {"padding_side": "left", "model_input_names": MODEL_INPUTS}

    def _completed(self, prompt: str, completion: str | None) -> tuple[list[int], list[int]]:
        """Tokens and labels of a prompt, which begins as documents do, and its completion, which ends as they do; of
        the prompt alone, if there is no completion."""
        before, after = self.special_around
        asked = [*before, *self._tokens(prompt)]
        asked = asked or begin_tokens(self.tokenizer)  # generation needs a first token
        answer = [] if completion is None else [*self._tokens(completion), *after, *self._end]
        return asked + answer, [IGNORED_LABEL] * len(asked) + answer

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The tokenizer's chat template."""
        return ChatFormat(self.tokenizer)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class CausalLM(DecoderTask):
    """Next-token prediction. Labels are aligned with their own tokens, as in transformers; the loss shifts them by one.

    A record is a document, or, for instruction tuning, a prompt with its completion, or a chat; the loss is then that
    of completions and answers alone.
    """

    Config = CausalLMConfig
    config: CausalLMConfig
    loss_metrics = ("loss", "perplexity", "bits_per_byte")

    def __init__(self, context: TaskContext | RunConfig) -> None:
        super().__init__(context)
        config = self.config
        if (config.prompt_column is None) != (config.completion_column is None):
            raise UserError(
                "a prompt and its completion come together",
                where="task.prompt_column, task.completion_column",
                remedy="set both, or neither",
            )
        if config.prompt_column is not None and config.messages_column is not None:
            raise UserError(
                "a record is a prompt with its completion, or a chat, not both",
                where="task.prompt_column, task.messages_column",
                remedy="set one of them to null",
            )
        if config.messages_column is None and (config.chat_template is not None or config.answers != "all"):
            raise UserError(
                "only chats have a template, and answers to choose from",
                where="task.chat_template, task.answers",
                remedy="set task.messages_column to the key of the chats, or leave these out",
            )
        if config.generation is not None and not self.instructs:
            raise UserError(
                "only instruction tuning has completions to write and to score",
                where="task.generation",
                remedy="set task.prompt_column and task.completion_column, or task.messages_column; "
                "`drawbar generate` writes text from any language model",
            )

    @property
    def instructs(self) -> bool:
        """Whether records are prompts with answers."""
        return self.config.prompt_column is not None or self.reads_chats

    @property
    def reads_chats(self) -> bool:
        return self.config.messages_column is not None

    @property
    def learns_to_stop(self) -> bool:
        return super().learns_to_stop or not self.instructs

    def encode(self, record: dict[str, Any], train: bool) -> list[Sample] | None:
        """A document in windows, or one sample of a prompt and its answers."""
        if self.instructs:
            return self._conversation(record)
        tokens = [*self.tokenizer(self._text(record), verbose=False)["input_ids"], *self._end]
        if len(tokens) < 2:  # nothing to predict
            return None
        windows = split_tokens(np.asarray(tokens, dtype=np.int32), self.data.sequence_length)
        return [{"input_ids": window, "labels": window, **self._noise_of(window)} for window in windows]

    def _noise_of(self, tokens: Any) -> dict[str, Any]:
        """Room for the keys of embedding noise, which each epoch draws anew."""
        return {KEYS: np.zeros(len(tokens), np.int64)} if self.config.embedding_noise else {}

    @property
    def augments(self) -> bool:
        return self.config.embedding_noise > 0 or type(self).augment is not CausalLM.augment

    def augment(self, sample: Sample, train: bool, rng: np.random.Generator) -> Sample:
        if train and KEYS in sample:
            return {**sample, KEYS: rng.integers(0, 2**62, len(sample[KEYS]))}
        return sample

    def parts_read(self, record: dict[str, Any]) -> dict[str, bool]:
        """Also of the messages, and of what else the chat template gets: whether it writes them."""
        found = super().parts_read(record)
        if not self.reads_chats:
            return found
        chat = self._chat_of(record)
        written = parts_written(self.tokenizer, chat)
        return (
            found
            | dict.fromkeys(chat.left_out, False)
            | {
                key if key in chat.options else f"{self.config.messages_column}.{key}": is_written
                for key, is_written in written.items()
            }
        )

    def prompt_of(self, record: dict[str, Any]) -> str | dict[str, Any]:
        if self.reads_chats:
            chat = self._chat_of(record)
            return {"messages": chat.messages, **chat.options}
        if self.instructs:
            return self._prompt(record)
        return self.tokenizer.decode(self._tokens(self._text(record))[:BEGINNING]).rstrip("\ufffd")

    def _conversation(self, record: dict[str, Any]) -> list[Sample] | None:
        tokens, labels = self._chat(record) if self.reads_chats else self._completion(record)
        limit = self.data.sequence_length
        # drop it if the prompt alone fills the window, or (without labels) if the prompt would be truncated
        lost = all(label == IGNORED_LABEL for label in labels[1:limit]) if self.has_labels else len(tokens) > limit
        if lost:
            needed = _shortest_window(labels) if self.has_labels else len(tokens)
            self.needed_length = min(needed or math.inf, self.needed_length)
            return None
        truncated = {"truncated": True} if len(tokens) > limit else {}
        kept = tokens[:limit]
        return [{"input_ids": kept, "labels": labels[:limit], **self._noise_of(kept), **truncated}]

    def _chat(self, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        chat = self._chat_of(record)
        if self.has_labels:
            return self.chat_format.encode(chat, self.config.answers)
        tokens = chat_prompt(self.tokenizer, chat)
        return tokens, [IGNORED_LABEL] * len(tokens)

    def _completion(self, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        column = self.config.completion_column
        assert column is not None
        completion = require(record, column, "task.completion_column") if self.has_labels else None
        return self._completed(self._prompt(record), completion)

    def _chat_of(self, record: dict[str, Any]) -> Chat:
        assert self.config.messages_column is not None
        return as_chat(record, require(record, self.config.messages_column, "task.messages_column", list))

    def _prompt(self, record: dict[str, Any]) -> str:
        config = self.config
        assert config.prompt_column is not None
        if len(record) == 1 and config.text_column in record and config.text_column != config.prompt_column:
            raise UserError(
                f"the record has no {config.prompt_column!r}: it is a text without a prompt",
                remedy="to train on plain texts, set task.prompt_column and task.completion_column to null; to train "
                "on prompts and completions, use records that have both",
            )
        prompt = require(record, config.prompt_column, "task.prompt_column")
        if not reads_alpaca(config):
            return prompt
        given = record.get(ALPACA_INPUT)
        return alpaca_prompt(prompt, None if given is None else require(record, ALPACA_INPUT, "task.prompt_column"))

    def _text(self, record: dict[str, Any]) -> str:
        return require(record, self.config.text_column, "task.text_column")

    def texts(self, record: dict[str, Any]) -> list[str]:
        config = self.config
        if config.messages_column is not None:
            return [message_text(check_message(message)) for message in self._chat_of(record).messages]
        if config.prompt_column is None or config.completion_column is None:
            return [self._text(record)]
        return [
            self._prompt(record),
            require(record, config.completion_column, "task.completion_column"),
        ]

    def collate(self, samples: list[Sample]) -> Batch:
        # predictions need each sample's length, from an attention mask; else there is none, as padding is on the right,
        # where a causal model never looks
        batch = super().collate(samples) if self.predicts else pad_and_stack(samples, {"input_ids": self.pad_token_id})
        if KEYS in batch:
            rows = [row.get("segment_ids", np.zeros(len(row[KEYS]), np.int64)) for row in samples]
            lengths = [torch.from_numpy(np.bincount(row)[row]).float() for row in rows]
            lengths_BL = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True, padding_value=1.0)
            batch[SCALES] = self.config.embedding_noise / lengths_BL.sqrt()
        return batch

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        # a cache would hide from transformers that restarting position_ids mean several documents in a row
        return model(**batch.inputs, use_cache=False)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return self.token_loss(outputs.logits[:, :-1], batch["labels"][:, 1:])

    def position_labels(self, batch: Batch) -> torch.Tensor:
        next_BL = batch["labels"][:, 1:]
        return functional.pad(next_BL, (0, batch["input_ids"].shape[1] - next_BL.shape[1]), value=IGNORED_LABEL)

    def num_targets(self, batch: Batch) -> float:
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    @property
    def predicts(self) -> bool:
        return self.config.generation is not None or type(self).predict is not CausalLM.predict

    def predicts_alone(self, model: nn.Module) -> bool:
        section = self.config.generation
        return section is not None and not takes_prompts_together(
            model, self.data.sequence_length + section.max_new_tokens
        )

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The completion of each sample's prompt (all that comes before the last answer)."""
        assert self.config.generation is not None
        lengths_B = batch["attention_mask"].sum(1).tolist()
        rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), lengths_B, strict=True)
        prompts = [tokens[: _prompt_length(labels[:length])] for tokens, labels, length in rows]
        return continuations(model, self.tokenizer, prompts, self.pad_token_id, self.config.generation)

    def references(self, records: list[dict[str, Any]]) -> list[Any]:
        if self.config.messages_column is not None:
            return [self._answer_asked_for(self._chat_of(record)) for record in records]
        assert self.config.completion_column is not None
        return [require(record, self.config.completion_column, "task.completion_column") for record in records]

    def _answer_asked_for(self, chat: Chat) -> str:
        """The answer that ``predict`` asks for: the last one that begins within the sample's length."""
        _, labels = self.chat_format.encode(chat, self.config.answers)
        begin = _prompt_length(labels[: self.data.sequence_length])
        answer = list(takewhile(lambda label: label != IGNORED_LABEL, labels[begin:]))
        return self.tokenizer.decode(answer, skip_special_tokens=True)

    def loss_scores(self, loss: float, num_targets: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Mean loss (nats a target token), perplexity and, for documents, bits per UTF-8 byte, end tokens included."""
        scores = mean_and_perplexity(loss, num_targets)
        if not self.instructs:
            size = sum(len(self._text(record).encode()) for record in records)
            scores["bits_per_byte"] = loss / math.log(2) / max(size, 1)
        return scores


def _shortest_window(labels: list[int]) -> int | None:
    """The fewest tokens of a sample that hold a target; None if there is none."""
    return next((place + 1 for place, label in enumerate(labels) if place and label != IGNORED_LABEL), None)


def _prompt_length(labels: list[int]) -> int:
    """Tokens before the last answer; all of them where there is no answer."""
    end = len(labels)
    while end and labels[end - 1] == IGNORED_LABEL:
        end -= 1
    start = end
    while start and labels[start - 1] != IGNORED_LABEL:
        start -= 1
    return start if end else len(labels)
