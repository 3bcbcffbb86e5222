"""The built-in tasks ``preference`` and ``reward``: learn from a better and a worse answer, or from good and bad ones.

A sample is a record's two token sequences end to end, each a segment of its own (``drawbar.models.packed``): the model
never looks from one into the other, and a pair is never torn apart by batching, packing or sharding.

N: samples, S: sequences of a sample (2, or 1), B: rows, L: tokens in a row, T: predicted positions of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import PairConfig, PreferenceConfig, RewardConfig
from drawbar.data.dataset import Sample
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.tables import value_at
from drawbar.errors import UserError
from drawbar.models.heads import predict_in_fp32
from drawbar.tasks.batch import Batch, pad_and_stack
from drawbar.tasks.causal_lm import DecoderTask
from drawbar.tasks.classification import as_number
from drawbar.tasks.messages import Chat, as_chat, check_message, message_text
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import records_of, require
from drawbar.tasks.task_context import TaskContext

SIDES = "side_ids"
"""The field of a sample that says of each token to which of the sample's sequences it belongs."""
PROMPT = str(PairConfig.model_fields["prompt_column"].default)
Sequences = list[tuple[list[int], list[int]]]
"""Tokens and labels of each sequence."""


def dpo_loss(ratio_N: Tensor, other_ratio_N: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); with ``smoothing``, the share of
    labels that are wrong, its conservative form (Mitchell 2023).

    Args:
        ratio_N, other_ratio_N: log-probability of the better and of the worse answer, less the reference model's.
    """
    margin_N = beta * (ratio_N - other_ratio_N)
    return -(1 - smoothing) * functional.logsigmoid(margin_N) - smoothing * functional.logsigmoid(-margin_N)


def ipo_loss(ratio_N: Tensor, other_ratio_N: Tensor, beta: float) -> Tensor:
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, eq. 17), of ratios per token: as TRL has
    it, which asked the authors."""
    return (ratio_N - other_ratio_N - 1 / (2 * beta)).square()


def simpo_loss(mean_N: Tensor, other_mean_N: Tensor, beta: float, gamma: float, smoothing: float = 0.0) -> Tensor:
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, eq. 6).

    Args:
        mean_N, other_mean_N: log-probability per token of the better and of the worse answer.
    """
    margin_N = beta * (mean_N - other_mean_N) - gamma
    return -(1 - smoothing) * functional.logsigmoid(margin_N) - smoothing * functional.logsigmoid(-margin_N)


def orpo_loss(mean_N: Tensor, other_mean_N: Tensor, beta: float) -> Tensor:
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, eq. 6), with the negative log-likelihood
    per token of the better answer. Args: as for ``simpo_loss``."""

    def log_odds(mean_N: Tensor) -> Tensor:
        return mean_N - torch.log(-torch.expm1(mean_N.clamp(max=-1e-7)))

    return -mean_N - beta * functional.logsigmoid(log_odds(mean_N) - log_odds(other_mean_N))


def kto_loss(
    ratio_N: Tensor, is_good_N: Tensor, divergence: Tensor, beta: float, good_weight: float, bad_weight: float
) -> Tensor:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7).

    Args:
        ratio_N: as for ``dpo_loss``, of each answer.
        divergence: estimate (0-d) of the divergence from the reference model; below 0 it counts as 0.
    """
    margin_N = beta * (ratio_N - divergence.clamp(min=0))
    return torch.where(is_good_N, good_weight * margin_N.neg().sigmoid(), bad_weight * margin_N.sigmoid())


class PairTask(DecoderTask):
    """A task whose samples have several sequences of tokens."""

    config: PairConfig
    has_segments = True

    def __init__(self, context: TaskContext | RunConfig) -> None:
        super().__init__(context)
        if self.config.metrics:
            raise UserError(
                f"{self.config.type} has scores of its own: accuracy, margin and mean rewards",
                where="task.metrics",
                remedy="leave it out",
            )

    @property
    def answer_columns(self) -> list[str]:
        """The options that name the column of each answer."""
        return ["chosen_column", "rejected_column"]

    @property
    def vocabulary_parallel(self) -> bool:
        return False  # the loss is no sum over tokens

    @property
    def row_length(self) -> int:
        return len(self.answer_columns) * self.data.sequence_length

    @property
    def reads_chats(self) -> bool:
        return bool(self.dataset_metadata["chats"])

    def find_dataset_metadata(self) -> dict[str, Any]:
        columns = [getattr(self.config, self.answer_columns[0]), self.config.prompt_column]
        first: dict[str, Any] = next(iter(records_of(self, "train")), {})
        is_chat = False
        for column in filter(None, columns):
            with suppress(KeyError):  # encode says what is missing
                is_chat |= isinstance(value_at(first, column), list | dict)
        return {"chats": is_chat}

    def _answer(self, record: dict[str, Any], option: str) -> Any:
        """A text, or a list of messages, of which a record may have the last alone, or its text."""
        column, setting = getattr(self.config, option), f"task.{option}"
        if not self.reads_chats:
            return require(record, column, setting)
        answer = _as_messages(require(record, column, setting, object))
        return answer if isinstance(answer, list) else require(record, column, setting, list)

    def _sequence(self, record: dict[str, Any], answer: Any) -> tuple[list[int], list[int]]:
        """Tokens of a record's prompt with this answer, and labels of the answer."""
        if self.reads_chats:
            return self.chat_format.encode(self._chat(record, answer), "last")
        return self._completed(self._prompt(record), answer)

    def _prompt(self, record: dict[str, Any]) -> str:
        """The prompt of a text. Raises UserError if the record lacks a column that is named."""
        name = self.config.prompt_column
        return "" if name is None else require(record, name, "task.prompt_column")

    def _chat(self, record: dict[str, Any], answer: list[Any]) -> Chat:
        """The messages of an answer, behind those of the prompt unless they begin with them."""
        name, messages = self.config.prompt_column, as_chat({}, answer).messages
        try:
            prompt = [] if name is None else value_at(record, name) or []  # null, where a table has it for others
        except KeyError:
            prompt = [] if name == PROMPT else self._prompt(record)  # which says that a named column is not there
        if isinstance(prompt, list):
            before = as_chat({}, prompt).messages
            return as_chat(record, messages if messages[: len(before)] == before else [*before, *messages])
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        begin = sum(1 for _ in takewhile(lambda role: role in ("system", "developer"), roles))
        if roles[begin : begin + 1] == ["assistant"]:  # else the chat has its question
            messages.insert(begin, {"role": "user", "content": self._prompt(record)})
        return as_chat(record, messages)

    def _joined(self, sequences: Sequences, **fields: Any) -> Sample:
        tokens = [token for ids, _ in sequences for token in ids]
        labels = [label for _, labels in sequences for label in (IGNORED_LABEL, *labels[1:])]
        sides = np.repeat(np.arange(len(sequences), dtype=np.int8), [len(ids) for ids, _ in sequences])
        return {"input_ids": tokens, "labels": labels, SIDES: sides, **fields}

    def prompt_of(self, record: dict[str, Any]) -> str | dict[str, Any]:
        if not self.reads_chats:
            return self._prompt(record)
        chat = self._chat(record, self._answer(record, self.answer_columns[0]))
        return {"messages": chat.messages, **chat.options}

    def parts_of(self, sample: Sample) -> dict[str, slice]:
        """The places of each sequence's tokens in a sample, by a name for people."""
        ends = np.cumsum(np.bincount(sample[SIDES]))
        names = [option.removesuffix("_column") for option in self.answer_columns]
        return {name: slice(*ends_of) for name, ends_of in zip(names, pairwise([0, *ends.tolist()]), strict=True)}

    def texts(self, record: dict[str, Any]) -> list[str]:
        found = []
        for option in self.answer_columns:
            answer = self._answer(record, option)
            if self.reads_chats:
                found += [message_text(check_message(message)) for message in self._chat(record, answer).messages]
            else:
                found += [self._prompt(record), answer]
        return list(dict.fromkeys(found))

    def collate(self, samples: list[Sample]) -> Batch:
        batch = pad_and_stack(samples, {"input_ids": self.pad_token_id, SIDES: -1})
        sides_BL = batch.pop(SIDES)
        segments_BL = sides_BL
        if "segment_ids" in batch:  # each is a sample
            samples_BL = batch["segment_ids"]
            segments_BL = torch.where(samples_BL < 0, -1, samples_BL * len(self.answer_columns) + sides_BL)
        batch["segment_ids"] = segments_BL
        return batch

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(input_ids=batch["input_ids"], segment_ids=batch["segment_ids"], use_cache=False)


class Preference(PairTask):
    """A language model that learns to prefer some answers to others."""

    Config = PreferenceConfig
    config: PreferenceConfig

    def __init__(self, context: TaskContext | RunConfig) -> None:
        super().__init__(context)
        if self.config.label_smoothing and self.config.method not in ("dpo", "simpo"):
            raise UserError(
                f"label_smoothing is for pairs with wrong labels, which {self.config.method} does not know",
                where="task.label_smoothing",
                remedy="remove it, or set task.method=dpo",
            )

    @property
    def is_unpaired(self) -> bool:
        """Whether a record has one answer, which is good or bad."""
        return self.config.method == "kto"

    @property
    def answer_columns(self) -> list[str]:
        # KTO's second sequence is the prompt with the answer to another one, from which it estimates the divergence
        return ["completion_column", "completion_column"] if self.is_unpaired else super().answer_columns

    def records(self, split: str) -> Any:
        records = super().records(split)
        if not self.is_unpaired or split != "train" or self.data.streaming:
            return records
        if any(stream.weight is not None for stream in getattr(records, "streams", [])):
            raise UserError(
                "kto compares an answer with that to the record before, and weights mix records of several sources",
                where="data.train",
                remedy="leave the weights out",
            )
        return _WithOtherAnswers(self.config.completion_column, records)

    def encode(self, record: dict[str, Any], train: bool) -> Sample | None:
        answers = [self._answer(record, option) for option in self.answer_columns]
        fields: dict[str, Any] = {}
        if self.is_unpaired:
            answers[1] = self._other_answer(record, answers[0])
            fields["is_good"] = self._is_good(record) if self.has_labels else True
        sequences = [self._sequence(record, answer) for answer in answers]
        limit = self.data.sequence_length
        needed = [_first_target(labels) for _, labels in sequences]
        if any(length is None or length > limit for length in needed):
            self.needed_length = min(self.needed_length, max(length or 0 for length in needed) or self.needed_length)
            return None
        if any(len(tokens) > limit for tokens, _ in sequences):
            fields["truncated"] = True
        return self._joined([(tokens[:limit], labels[:limit]) for tokens, labels in sequences], **fields)

    def parts_of(self, sample: Sample) -> dict[str, slice]:
        if not self.is_unpaired:
            return super().parts_of(sample)
        first = int((sample[SIDES] == 0).sum())
        names = "good answer" if sample["is_good"] else "bad answer", "answer to another prompt"
        return {names[0]: slice(first), names[1]: slice(first, None)}

    def _other_answer(self, record: dict[str, Any], own: Any) -> Any:
        """The answer of the record before; the record's own where that one has none (in an evaluation, always)."""
        other = record.get(OTHER_ANSWER)
        other = _as_messages(other) if self.reads_chats else other
        if not isinstance(other, type(own)) or not other:
            return own
        return other if isinstance(other, str) else [*own[:-1], other[-1]]

    def _is_good(self, record: dict[str, Any]) -> bool:
        column = self.config.label_column
        label = require(record, column, "task.label_column", object)
        is_good = IS_GOOD.get(str(label).strip().lower())
        if is_good is None:
            raise UserError(
                f"{column!r} is {label!r}, neither true nor false",
                remedy="correct the record: true for a good answer, false for a bad one",
            )
        return is_good

    @property
    def _has_own_prompt(self) -> bool:
        """Whether records have prompts; if not, two texts begin with it."""
        return self.reads_chats or self.is_unpaired or self.config.prompt_column is not None

    def _prompt(self, record: dict[str, Any]) -> str:
        if self._has_own_prompt:
            return super()._prompt(record)
        return _common_beginning(*(self._answer(record, option) for option in self.answer_columns))

    def _sequence(self, record: dict[str, Any], answer: Any) -> tuple[list[int], list[int]]:
        if self._has_own_prompt:
            return super()._sequence(record, answer)
        prompt = self._prompt(record)
        return self._completed(prompt, answer.removeprefix(prompt))

    @property
    def uses_reference(self) -> bool:
        return self.config.method in ("dpo", "ipo", "kto")

    def reference_fields(self, model: nn.Module, batch: Batch) -> list[dict[str, float]]:
        logps_NS, _ = self._log_probabilities(self.forward(model, batch), batch)
        return [{f"reference_{side}": value for side, value in enumerate(row)} for row in logps_NS.tolist()]

    @property
    def uses_step_mean(self) -> bool:
        return self.is_unpaired

    def step_values(self, model: nn.Module, batch: Batch) -> list[float]:
        """For each sample, the other answer's log-probability less the reference model's: their mean estimates the
        divergence from it."""
        return self._ratios(self.forward(model, batch), batch)[0][:, 1].tolist()

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        config = self.config
        ratios_NS, lengths_NS = self._ratios(outputs, batch)
        better_N, worse_N = ratios_NS.unbind(1)
        if config.method == "kto":
            divergence = batch.get("step_mean", better_N.new_zeros(()))
            weights = config.desirable_weight, config.undesirable_weight
            return kto_loss(better_N, batch["is_good"], divergence, config.beta, *weights).sum()
        if config.method == "dpo":
            return dpo_loss(better_N, worse_N, config.beta, config.label_smoothing).sum()
        better_N, worse_N = (ratios_NS / lengths_NS).unbind(1)
        if config.method == "ipo":
            return ipo_loss(better_N, worse_N, config.beta).sum()
        if config.method == "orpo":
            return orpo_loss(better_N, worse_N, config.beta).sum()
        return simpo_loss(better_N, worse_N, config.beta, config.gamma, config.label_smoothing).sum()

    def num_targets(self, batch: Batch) -> float:
        """Samples: each pair, or for ``kto`` each answer, counts alike."""
        return len(batch.ids)

    @property
    def predicts(self) -> bool:
        return True

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The implicit rewards of a record's answers: beta times the log-probability, less the reference model's; for
        ``orpo`` and ``simpo``, per token."""
        ratios_NS, lengths_NS = self._ratios(self.forward(model, batch), batch)
        rewards_NS = self.config.beta * (ratios_NS if self.uses_reference else ratios_NS / lengths_NS)
        if self.is_unpaired:
            return [row[0] for row in rewards_NS.tolist()]
        return [{"chosen": chosen, "rejected": rejected} for chosen, rejected in rewards_NS.tolist()]

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        if not self.is_unpaired:
            return _pair_scores(records)
        rewards = {good: [one["prediction"] for one in records if self._is_good(one) == good] for good in (True, False)}
        names = {True: "reward_of_good", False: "reward_of_bad"}
        return {names[good]: float(np.mean(values)) for good, values in rewards.items() if values}

    def _ratios(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The log-probability of each answer, less the reference model's where there is one, and its length in tokens;
        both (N, S). A batch without the reference model's is one that is only tried or measured."""
        logps_NS, lengths_NS = self._log_probabilities(outputs, batch)
        if "reference_0" in batch:
            logps_NS = logps_NS - torch.stack([batch["reference_0"], batch["reference_1"]], dim=1).to(logps_NS)
        return logps_NS, lengths_NS

    def _log_probabilities(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed log-probability of each answer's tokens in fp32, and their number; both (N, S)."""
        logits_TV, labels_T = outputs.logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
        losses_T = functional.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="none")
        sequences_T = _sequence_numbers(batch["segment_ids"])[:, 1:].flatten()
        shape = len(batch.ids), len(self.answer_columns)
        zeros = losses_T.new_zeros(shape[0] * shape[1])
        sums = zeros.index_add(0, sequences_T, -losses_T)
        counts = zeros.index_add(0, sequences_T, (labels_T != IGNORED_LABEL).to(zeros))
        return sums.view(shape), counts.clamp(min=1).view(shape)


class Reward(PairTask):
    """A model that scores answers, learned from pairs by the model of Bradley and Terry (1952)."""

    Config = RewardConfig
    config: RewardConfig
    head = "sequence_classification"
    label_placement = "sample"
    special_tokens = {"pad_token": "<|pad|>"}

    @property
    def answer_columns(self) -> list[str]:
        return super().answer_columns if self.has_labels else ["chosen_column"]  # a prediction is of one answer

    @property
    def learns_to_stop(self) -> bool:
        return True  # it writes nothing

    def model_fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "pad_token_id": self.pad_token_id}

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        model = PretrainedTask._prepare_model(self, model)
        predict_in_fp32(model, outputs=1)
        return model

    def tokenizer_options(self) -> dict[str, Any]:
        return PretrainedTask.tokenizer_options(self)

    def encode(self, record: dict[str, Any], train: bool) -> Sample | None:
        sequences = [self._sequence(record, self._answer(record, option)) for option in self.answer_columns]
        longest = max(len(tokens) for tokens, _ in sequences)
        if longest > self.data.sequence_length:  # its score is read at the end
            self.needed_length = min(self.needed_length, longest)
            return None
        fields = {}
        if self.has_labels and self.config.margin_column is not None:
            fields["margin"] = self._margin(record)
        sample = self._joined(sequences, **fields)
        del sample["labels"]
        return sample

    def _margin(self, record: dict[str, Any]) -> float:
        column = self.config.margin_column
        assert column is not None
        return as_number(require(record, column, "task.margin_column", object), column)

    def _prompt(self, record: dict[str, Any]) -> str:
        is_absent = self.config.prompt_column == PROMPT and PROMPT not in record  # answers may be whole texts
        return "" if is_absent else super()._prompt(record)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        chosen_N, rejected_N = self._scores(outputs).unbind(1)
        margins_N = batch["margin"].to(chosen_N) if "margin" in batch else 0.0
        return -functional.logsigmoid(chosen_N - rejected_N - margins_N).sum()

    def num_targets(self, batch: Batch) -> float:
        return len(batch.ids)

    def _scores(self, outputs: Any) -> Tensor:
        """Shape (N, S): one logit a segment, in the order of samples."""
        return outputs.logits.float().view(-1, len(self.answer_columns))

    @property
    def predicts(self) -> bool:
        return True

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The scores of both answers; for records without labels, that of the one in ``task.chosen_column``."""
        scores_NS = self._scores(self.forward(model, batch))
        if scores_NS.shape[1] == 1:
            return scores_NS.squeeze(1).tolist()
        return [{"chosen": chosen, "rejected": rejected} for chosen, rejected in scores_NS.tolist()]

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return _pair_scores(records)


IS_GOOD = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels of ``kto`` as text, as which CSV files have all of them."""
OTHER_ANSWER = "drawbar_other_answer"
"""The column in which a record of ``kto`` gets the answer of the record before it."""


class _WithOtherAnswers(Sequence[dict[str, Any]]):
    """Records, each also with the answer of the one before it; the first with that of the last."""

    def __init__(self, column: str, records: Iterable[dict[str, Any]]) -> None:
        self._column, self._records = column, list(records)
        self._where = getattr(records, "where", None)

    def where(self, index: int) -> str:
        """File and line of a record, where they are known."""
        return f"train record {index}" if self._where is None else str(self._where(index))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        try:
            other = value_at(self._records[index - 1], self._column)
        except KeyError:
            return self._records[index]
        return {**self._records[index], OTHER_ANSWER: other}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def _common_beginning(text: str, other: str) -> str:
    """What two texts begin with, up to a space: their prompt. TRL's ``extract_prompt`` may also cut inside a word."""
    shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
    return text[: max((place for place, (sign, _) in enumerate(shared) if sign.isspace()), default=0)]


def _as_messages(answer: Any) -> Any:
    """The messages of an answer that is one message, or its text; anything else as it is."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return [answer] if isinstance(answer, dict) else answer


def _sequence_numbers(segments_BL: Tensor) -> Tensor:
    """Shape (B, L): the number of each token's sequence among all of the batch; anything for padding."""
    counts_B = segments_BL.amax(1) + 1
    return (segments_BL + (counts_B.cumsum(0) - counts_B)[:, None]).clamp(min=0)


def _first_target(labels: list[int]) -> int | None:
    """The fewest tokens of a sequence that hold a target; None if there is none."""
    return next((place + 1 for place, label in enumerate(labels) if place and label != IGNORED_LABEL), None)


def _pair_scores(records: list[dict[str, Any]]) -> dict[str, float]:
    """The share of pairs whose better answer has the larger reward, the mean difference, and the mean of each."""
    if not records:
        return {}
    rewards_N2 = np.array([[one["prediction"]["chosen"], one["prediction"]["rejected"]] for one in records])
    chosen_N, rejected_N = rewards_N2.T
    return {
        "accuracy": float((chosen_N > rejected_N).mean()),
        "margin": float((chosen_N - rejected_N).mean()),
        "reward_of_chosen": float(chosen_N.mean()),
        "reward_of_rejected": float(rejected_N.mean()),
    }
