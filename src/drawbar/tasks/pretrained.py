"""What the built-in tasks share: a transformers model with its tokenizer, and metrics by name."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import PretrainedTaskConfig, TokenizerTraining
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.tokenizer import (
    MODEL_INPUTS,
    Wrapping,
    begin_token_id,
    check_wrapping_is_saved,
    load_tokenizer,
    set_option,
    special_tokens_around,
    train_byte_bpe,
    wrap_texts,
)
from drawbar.errors import UserError
from drawbar.metrics.metric_registry import compute, load_metrics
from drawbar.models.folder import check_model_folder
from drawbar.models.heads import Head, longest_input, sees_neighbours
from drawbar.models.huggingface import (
    build_from_scratch,
    explain_attention_errors,
    fit_embeddings,
    load_model_config,
    load_pretrained,
)
from drawbar.models.stored import build_meta_model, stored_tensors
from drawbar.parallel.chunked_loss import LossTerms
from drawbar.parallel.styles import cross_entropy_sum
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch, pad_and_stack
from drawbar.tasks.generation import generation_defaults
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.task import Task, map_each, records_of
from drawbar.tasks.task_context import TaskContext


class PretrainedTask(Task):
    """A task on a model of transformers, from the hub, a folder or random weights."""

    head: ClassVar[Head]
    """Which of transformers' ``AutoModelFor…`` classes builds the model."""
    special_tokens: ClassVar[dict[str, str]] = {}
    """By role (``mask_token``): the further special tokens of a tokenizer that is trained for this task."""
    wrapping: ClassVar[Wrapping] = "begin_end"
    """What a tokenizer trained for this task puts around a text."""
    usual_metrics: ClassVar[tuple[str, ...]] = ()
    loss_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """What ``loss_scores`` may return: given without being asked for, and so allowed in ``task.metrics``."""
    config: PretrainedTaskConfig

    def __init__(self, context: TaskContext | RunConfig) -> None:
        super().__init__(context)
        names = self.usual_metrics if self.config.metrics is None else self.config.metrics
        self.metrics = load_metrics([name for name in names if name not in self.loss_metrics])
        if self.config.metrics is not None and self.task_context.begins_training:
            self._check_metrics_are_computed()

    @property
    def model_name(self) -> str:
        """A folder or a hub name: ``task.model``, or, where that names another run, the copy of that run's model."""
        copied = self.task_context.initial_model
        return self.config.model if copied is None else str(copied)

    def _check_metrics_are_computed(self) -> None:
        """Raises UserError for metrics of predictions, where this task makes none."""
        if not self.metrics or self.predicts:
            return
        remedy = f"leave out {', '.join(self.metrics)}; the scores of the loss are computed in any case"
        if "generation" in type(self.config).model_fields:
            remedy = f"let an evaluation write predictions: task.generation={{max_new_tokens: 128}}; or {remedy}"
        raise UserError(
            f"{', '.join(self.metrics)} would never be computed: an evaluation of this task makes no predictions",
            where="task.metrics",
            remedy=remedy,
        )

    def build_tokenizer(self) -> Any:
        tokenizer = self._train_or_load_tokenizer()
        wrapping = self.wrapping_for(tokenizer)
        if wrapping is not None:
            wrap_texts(tokenizer, wrapping)
            if not isinstance(self.config.tokenizer, TokenizerTraining):  # one trained here is saved with its wrapping
                check_wrapping_is_saved(tokenizer)
        return tokenizer

    def wrapping_for(self, tokenizer: Any) -> Wrapping | None:
        """What the tokenizer should put around a text; None for what it does by itself."""
        if self.config.add_special_tokens != "auto":
            return self.config.add_special_tokens
        return self.wrapping if isinstance(self.config.tokenizer, TokenizerTraining) else None

    def _train_or_load_tokenizer(self) -> Any:
        wanted = self.config.tokenizer
        if isinstance(wanted, TokenizerTraining):
            texts = map_each(records_of(self, "train"), self.texts, self.skips_bad_records)
            return train_byte_bpe(chain.from_iterable(texts), wanted.vocab_size, self.special_tokens)
        if wanted is None and self.config.from_scratch is not None:
            raise UserError(
                "a model from scratch needs a tokenizer",
                where="task.tokenizer",
                remedy="name one (task.tokenizer=gpt2), or train one (task.tokenizer={train: byte_bpe})",
            )
        try:
            return load_tokenizer(wanted) if wanted else load_tokenizer(self.model_name, "model")
        except UserError:
            if wanted is None:  # perhaps the model folder itself is missing or broken: report that instead
                check_model_folder(self.model_name)
            raise

    def texts(self, record: dict[str, Any]) -> list[str]:
        """The texts of a record, for the training of a tokenizer."""
        raise NotImplementedError(f"{type(self).__name__} does not define texts()")

    def model_fields(self) -> dict[str, Any]:
        """Fields of the model's own config that follow from the task, such as the number of labels."""
        return {}

    def pretrained_config(self) -> Any:
        """The config of the pretrained model, of transformers; None for a model from scratch."""
        if self.config.from_scratch is not None:
            return None
        try:
            return load_model_config(self.model_name, None, self.tokenizer)
        except UserError:
            return None  # build_model says why, unless it is a user's own and needs none

    def build_model(self) -> nn.Module:
        name, scratch = self.model_name, self.config.from_scratch
        with self._explain_attention_errors():
            if scratch is not None:
                return self._prepare_model(
                    build_from_scratch(name, scratch, self.tokenizer, self.head, **self._all_fields())
                )
            log_new = not self.has_checkpoint
            return self._prepare_model(load_pretrained(name, self.head, log_new=log_new, **self._all_fields()))

    def build_meta_model(self) -> nn.Module:
        if self.config.from_scratch is not None or self.config.resize_embeddings:
            return super().build_meta_model()
        with self._explain_attention_errors():
            find_weights = not self.task_context.weightless
            return self._prepare_model(build_meta_model(self.model_name, self.head, find_weights, **self._all_fields()))

    def stored_weights(self, meta_model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        if self.config.from_scratch is not None or self.config.resize_embeddings:
            return None
        return stored_tensors(self.model_name, meta_model)

    def _all_fields(self) -> dict[str, Any]:
        wanted = self.config.attention
        # the field that transformers sets by its argument attn_implementation, in nested configs, too
        attention = {} if wanted == "auto" else {"_attn_implementation": wanted}
        return {**self.model_fields(), **attention, **self.task_context.model_fields}

    def _explain_attention_errors(self) -> AbstractContextManager[None]:
        wanted, scratch = self.config.attention, self.config.from_scratch
        return explain_attention_errors(wanted, self.model_name, scratch, self.tokenizer, self.head)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Check the vocabulary size and the number of positions, and set the generation config."""
        fit_embeddings(model, self.tokenizer, resize=self.config.resize_embeddings)
        limit = longest_input(model)
        for setting, length in self.required_positions().items():
            if limit is not None and length > limit:
                field = "max_position_embeddings"
                own_name = getattr(model.config, "attribute_map", {}).get(field, field)  # GPT-2: n_positions
                raise UserError(
                    f"{setting} is {length}, but the model has {limit} positions",
                    where=setting,
                    remedy=f"set {setting}={limit}, or a larger {own_name} in task.from_scratch",
                )
        self._check_router(model)
        if getattr(model, "generation_config", None) is not None:
            for name, value in self.generation_fields(model).items():
                setattr(model.generation_config, name, value)
        return model

    def _check_router(self, model: nn.Module) -> None:
        """A mixture of experts may return an auxiliary loss of its router, which none of drawbar's own losses adds."""
        if is_user_defined(self, "loss") or not getattr(model.config, "output_router_logits", False):
            return
        what = "the auxiliary loss of the model's router (output_router_logits) is not part of the loss here"
        remedy = (
            "add it in a task of your own: super().loss(outputs, batch) + c * outputs.aux_loss * num_targets(batch)"
        )
        if "output_router_logits" in (self.config.from_scratch or {}):
            remedy = f"remove output_router_logits from it; or {remedy}"
            raise UserError(what, where="task.from_scratch", remedy=remedy)
        logger.warning("%s; %s", what, remedy)

    def generation_fields(self, model: nn.Module) -> dict[str, Any]:
        """Fields of the model's generation config: the defaults of its ``generate``, here and after an export."""
        begin, end, present = begin_token_id(self.tokenizer), self.tokenizer.eos_token_id, model.generation_config
        fields: dict[str, Any] = {"pad_token_id": self.pad_token_id}
        if present.bos_token_id is None:
            fields["bos_token_id"] = begin
        ends = present.eos_token_id if isinstance(present.eos_token_id, list) else [present.eos_token_id]
        if end is not None and end not in ends:
            # another tokenizer gives the model's end ids other meanings; with the model's own, several may end a text
            kept = ends if self.config.tokenizer is None else []
            fields["eos_token_id"] = [end, *(token for token in kept if token is not None)]  # any of them ends a text
        section = getattr(self.config, "generation", None)
        return fields if section is None else fields | generation_defaults(section, longest_input(model))

    def required_positions(self) -> dict[str, int]:
        """How many positions the model must have, by the setting that asks for them."""
        return {"data.sequence_length": self.data.sequence_length}

    def computes_alone(self, model: nn.Module) -> bool:
        """Whether each sample must be computed by itself: others in its batch would change its loss."""
        return sees_neighbours(model, self.data.sequence_length)

    def predicts_alone(self, model: nn.Module) -> bool:
        """Whether others would change its prediction, though not its loss."""
        return False

    @cached_property
    def loss_terms(self) -> LossTerms:
        """What is added to the cross-entropy in training."""
        return LossTerms(getattr(self.config, "label_smoothing", 0.0), getattr(self.config, "z_loss", 0.0))

    @property
    def vocabulary_parallel(self) -> bool:
        # a user's own forward or loss gets whole logits
        return not is_user_defined(self, "forward", "loss")

    def token_loss(self, logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
        """The summed cross-entropy of tokens, with ``loss_terms``; the vocabulary of the logits may be sharded."""
        return cross_entropy_sum(logits_BLV.flatten(0, 1), labels_BL.flatten(), IGNORED_LABEL, self.loss_terms)

    def position_labels(self, batch: Batch) -> torch.Tensor:
        """The label of what the model predicts at each position, (B, L), if the loss is the labels' cross-entropy."""
        raise NotImplementedError(f"the loss of {type(self).__name__} is no cross-entropy by position")

    @property
    def pad_token_id(self) -> int:
        """The id that ``input_ids`` are padded with; no token of a text attends to it."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id or 0

    def describe_special_tokens(self) -> str:
        """The special tokens around a text, for the log: ``<s> … </s>``."""
        before, after = (self.tokenizer.convert_ids_to_tokens(tokens) for tokens in self.special_around)
        return " ".join([*before, "…", *after])

    @property
    def learns_to_stop(self) -> bool:
        """False if the model learns to write answers that have no end token: it would not stop."""
        return True

    @cached_property
    def special_around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a text."""
        return special_tokens_around(self.tokenizer)

    def tokenizer_to_export(self) -> Any:
        """The tokenizer, set up so that whoever loads it gets the inputs that the model was trained with."""
        tokenizer = self.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        for name, value in self.tokenizer_options().items():
            set_option(tokenizer, name, value)
        return tokenizer

    def tokenizer_options(self) -> dict[str, Any]:
        """Options of the exported tokenizer: what it does by default."""
        return {
            "model_max_length": self.data.sequence_length,
            "padding_side": "right",
            "model_input_names": MODEL_INPUTS,
        }

    def collate(self, samples: list[Sample]) -> Batch:
        batch = pad_and_stack(samples, {"input_ids": self.pad_token_id, "decoder_input_ids": self.pad_token_id})
        if not batch.packed:
            lengths_B = torch.tensor([len(sample["input_ids"]) for sample in samples])
            batch["attention_mask"] = (torch.arange(int(lengths_B.max())) < lengths_B[:, None]).long()
        return batch

    def references(self, records: list[dict[str, Any]]) -> list[Any]:
        """What the predictions of these records are compared with."""
        raise NotImplementedError(f"{type(self).__name__} does not define references()")

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        if not self.predicts or not self.metrics:
            return {}
        predictions = [record["prediction"] for record in records]
        return compute(self.metrics, predictions, self.references(records), taken=self.loss_metrics)


class TokenTask(PretrainedTask):
    """A task whose model gives logits for each token's own label, without the shift of next-token prediction."""

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return self.token_loss(outputs.logits, batch["labels"])

    def position_labels(self, batch: Batch) -> torch.Tensor:
        return batch["labels"]

    def num_targets(self, batch: Batch) -> float:
        return int((batch["labels"] != IGNORED_LABEL).sum())


def mean_and_perplexity(loss: float, num_targets: float) -> dict[str, float]:
    """``loss`` in nats a target token, and its exponential."""
    mean = loss / num_targets
    return {"loss": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf}
