"""Packing: several samples in one row, without loss and without one seeing another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import RESERVED_FIELDS, EncodedDataset, Sample
from drawbar.data.plan import Plan
from drawbar.errors import UserError

IGNORED_LABEL = -100  # what Hugging Face models and torch's cross_entropy leave out of the loss

CHECKED_TOGETHER = 1 << 16
"""Samples whose lengths are in memory at a time while they are checked."""

LabelPlacement = Literal["next_token", "token", "sample", "decoder"]
"""Where the ``labels`` of a sample sit. ``next_token``: one under each token, and the loss shifts them by one, as in
causal language models; ``token``: one for each token, not shifted; ``sample``: one, of any shape, for the whole
sample; ``decoder``: a sequence of their own, beside ``decoder_input_ids``."""


class PackedRows:
    """Rows of several samples each, by a plan: row i is the joined samples of ``plan[i]``.

    Args:
        samples: the samples.
        plan: which of them each row holds.
        placement: see :data:`LabelPlacement`.

    Raises:
        UserError: the samples cannot be laid end to end.
    """

    def __init__(self, samples: EncodedDataset, plan: Plan, placement: LabelPlacement) -> None:
        self.samples = samples
        self.plan = plan
        self.join = RowLayout.of(samples, placement).join
        self.lengths = (
            plan.lengths if plan.lengths is not None else plan.row_lengths(packed_lengths(samples, placement))
        )
        self.fingerprint = plan.digest(samples.fingerprint)

    def __len__(self) -> int:
        return len(self.plan)

    def read(self, index: int) -> list[Sample]:
        """The samples of a row."""
        return [self.samples[sample] for sample in self.plan[index].tolist()]


def packed_lengths(samples: EncodedDataset, placement: LabelPlacement) -> NDArray[np.int64]:
    """Shape (samples,): the tokens that each sample takes in a row; for ``decoder``, the longer of input and labels."""
    if placement == "decoder" and "labels" in samples.fields:
        return samples.stored_lengths("input_ids", "labels")[:]
    return samples.lengths


@dataclass(frozen=True)
class RowLayout:
    """How the fields of several samples are laid into one row."""

    placement: LabelPlacement
    per_token: tuple[str, ...]
    """Fields with one value for each of the ``input_ids``."""
    per_target: tuple[str, ...]
    """Fields with one value for each of a decoder's ``labels``."""
    per_sample: tuple[str, ...]
    """Fields with one value, of any shape, for each sample."""

    @classmethod
    def of(cls, samples: EncodedDataset, placement: LabelPlacement) -> "RowLayout":
        """The layout of these samples.

        Raises:
            UserError: they have no tokens, or a field that fits neither tokens nor samples.
        """
        if samples.fields.get("input_ids") != "array":
            raise _cannot_pack("they have no input_ids")
        if placement == "decoder" and samples.fields.get("labels") != "array":
            raise _cannot_pack("they have no sequence of labels")
        layout = cls._of_kinds(samples.fields, placement)
        for name in samples.fields:
            if name in (*layout.per_token, "attention_mask"):
                _check_lengths(samples, name, "input_ids", "tokens")
            elif name in layout.per_target:
                _check_lengths(samples, name, "labels", "labels")
        if placement in ("next_token", "token") and "labels" in layout.per_sample:
            raise _cannot_pack("their labels are not one for each token")
        return layout

    @classmethod
    def of_sample(cls, sample: Sample, placement: LabelPlacement) -> "RowLayout":
        """The layout of samples with the fields of this one, without the checks of ``of``."""
        kinds = {name: "array" if np.ndim(value) else "scalar" for name, value in sample.items()}
        return cls._of_kinds({name: kind for name, kind in kinds.items() if name not in ("id", "ids")}, placement)

    @classmethod
    def _of_kinds(cls, kinds: Mapping[str, str], placement: LabelPlacement) -> "RowLayout":
        groups: dict[str, list[str]] = {"token": [], "target": [], "sample": []}
        for name, kind in kinds.items():
            if kind == "scalar" or (name == "labels" and placement == "sample"):
                groups["sample"].append(name)
            elif placement == "decoder" and name.startswith(("labels", "decoder_")):
                groups["target"].append(name)
            elif name != "attention_mask":  # a packed row has segment_ids instead
                groups["token"].append(name)
        return cls(placement, *(tuple(group) for group in groups.values()))

    def join(self, samples: list[Sample]) -> Sample:
        """One row of several samples, laid end to end.

        ``position_ids`` start again at 0 in each sample, and ``segment_ids`` (0, 1, 2, …) say which sample a token
        belongs to: attention must not cross from one into another; ``decoder_segment_ids`` do the same for targets.
        ``ids`` and every field per sample become lists, with one item a sample.

        Raises:
            UserError: the samples have a field that the layout does not place.
        """
        known = {*self.per_token, *self.per_target, *self.per_sample, "attention_mask", *RESERVED_FIELDS}
        if added := samples[0].keys() - known:
            raise _cannot_pack(f"the task's augment adds {', '.join(sorted(added))}, which its encode does not give")
        row: Sample = {"ids": [sample["id"] for sample in samples]}
        for name in (*self.per_token, *self.per_target):
            row[name] = np.concatenate([sample[name] for sample in samples])
        for name in self.per_sample:
            row[name] = [sample[name] for sample in samples]
        lengths = [len(sample["input_ids"]) for sample in samples]
        if self.placement == "next_token" and "labels" in row:
            # the loss shifts labels by one: the first of a sample would be predicted from the sample before
            row["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORED_LABEL
        if "position_ids" not in row:  # a task may give its own position_ids, which stay
            row["position_ids"] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        row["segment_ids"] = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
        if self.placement == "decoder":
            lengths = [len(sample["labels"]) for sample in samples]
            row["decoder_segment_ids"] = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
        return row


def _check_lengths(samples: EncodedDataset, name: str, base: str, units: str) -> None:
    """Refuse to pack where a field has not as many values as another, in any sample."""
    found, expected = samples.stored_lengths(name), samples.stored_lengths(base)
    for first in range(0, len(samples), CHECKED_TOGETHER) if name != base else ():
        part = slice(first, first + CHECKED_TOGETHER)
        lengths, wanted = found[part], expected[part]
        wrong = np.flatnonzero(lengths != wanted)
        if len(wrong):
            odd = int(wrong[0])
            values = f"{lengths[odd]} values of {name!r} for {wanted[odd]} {units}"
            raise _cannot_pack(f"sample {first + odd} has {values}")


def _cannot_pack(what: str) -> UserError:
    return UserError(
        f"these samples cannot be packed: {what}", where="data.batching", remedy="set data.batching=grouped, or padded"
    )


def split_tokens(tokens: NDArray[Any], length: int) -> list[NDArray[Any]]:
    """Windows of a long document, for language modelling.

    The last token of a window is also the first of the next, as context alone: so every token but the document's first
    is predicted exactly once. A document of fewer than two tokens has nothing to predict, and gives no window.

    Args:
        tokens: shape (tokens,).
        length: tokens in a window, at least 2.

    Returns:
        Views of ``tokens``, each of shape (2..length,).
    """
    return [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
