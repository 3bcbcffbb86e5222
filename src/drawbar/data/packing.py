"""Packing: several samples per row, without dropping any and without attention between them."""

import bisect
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drawbar.data.cache import load_or_create
from drawbar.data.columns import BLOCK_VALUES, FolderStorage, Values, count_up_to
from drawbar.data.dataset import RESERVED_FIELDS, EncodedDataset, Sample
from drawbar.data.encode import OnProgress
from drawbar.data.sampler import order
from drawbar.errors import UserError
from drawbar.runtime.log import logger

NAME = "packs"
"""The name of plans in the cache."""
CACHED_FROM = 2**16
"""Plans of at least this many samples are cached; a smaller one takes a tenth of a second to compute."""


@dataclass(frozen=True)
class Plan:
    """The samples of each row, in ascending order; the rows of a source are sorted by their first sample."""

    samples: Values
    """Sample numbers, row by row."""
    ends: Values
    """Shape (rows,): the end of each row's samples."""
    lengths: Values | None = None
    """Only for a plan from the cache: what ``row_lengths`` returned before it was cached."""
    digest_of: Mapping[str, str] = field(default_factory=dict)
    """Only for a plan from the cache: what ``digest`` returns, by its argument."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> NDArray[Any]:
        """The samples of a row."""
        ends = self.ends[max(0, row - 1) : row + 1]
        return self.samples[ends[0] if row else 0 : ends[-1]]

    def blocks(self) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Some rows at a time: their samples, row by row, and the number of samples in each row."""
        first = 0
        while first < len(self):
            begin = int(self.ends[first - 1 : first][0]) if first else 0
            last = max(first + 1, count_up_to(self.ends, begin + BLOCK_VALUES))
            ends = self.ends[first:last]
            yield self.samples[begin : ends[-1]], np.diff(ends, prepend=begin)
            first = last

    def row_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shape (rows,): the total length of each row's samples."""
        sums = [
            np.add.reduceat(lengths[samples], np.cumsum(counts) - counts, dtype=np.int64)
            for samples, counts in self.blocks()
        ]
        return np.concatenate([np.empty(0, np.int64), *sums])

    def digest(self, of_samples: str) -> str:
        """Hex digest of the plan and of ``of_samples``, the fingerprint of its samples."""
        if of_samples in self.digest_of:
            return self.digest_of[of_samples]
        digest = hashlib.blake2b(of_samples.encode(), digest_size=16)
        for samples, counts in self.blocks():
            digest.update(np.insert(samples.astype(np.int64), np.cumsum(counts) - counts, counts).tobytes())
        return digest.hexdigest()


def plan_sources(lengths: NDArray[np.int64], sizes: Sequence[int], capacity: int, seed: int) -> tuple[Plan, list[int]]:
    """A plan in which no row holds samples of two sources, and the number of rows of each source. See ``plan_rows``.

    Args:
        sizes: number of samples of each source; the samples of a source are consecutive.
    """
    samples = np.empty(len(lengths), _number_type(len(lengths)))
    ends, rows, first = [], list[int](), 0
    for size in sizes:
        plan = plan_rows(lengths[first : first + size], capacity, seed)
        samples[first : first + size] = plan.samples[:]
        samples[first : first + size] += first
        ends.append(plan.ends[:] + first)
        rows.append(len(plan))
        first += size
    return Plan(samples, np.concatenate(ends)), rows


def cached_plan_of_sources(
    lengths: Callable[[], NDArray[np.int64]],
    sizes: Sequence[int],
    capacity: int,
    seed: int,
    *,
    of_samples: str,
    placement: str,
    cache: Path,
    timeout: float,
) -> tuple[Plan, list[int]]:
    """As ``plan_sources``, computed by one process and cached for the others and for later runs. A plan from the cache
    is not held in memory.

    Args:
        lengths: not called if the plan is cached.
        of_samples, placement: what determines the lengths: the samples' fingerprint, and the placement of labels.
        cache, timeout: see ``load_or_create``.
    """

    def write(draft: FolderStorage, _: OnProgress) -> dict[str, Any]:
        of_each = lengths()
        plan, rows = plan_sources(of_each, sizes, capacity, seed)
        for block in range(0, len(of_each), BLOCK_VALUES):
            draft.append("samples.bin", plan.samples[block : block + BLOCK_VALUES].tobytes())
        draft.append("ends.bin", plan.ends[:].tobytes())
        draft.append("lengths.bin", plan.row_lengths(of_each).tobytes())
        return {"rows": rows, "dtype": _number_type(len(of_each)).str, "digest": plan.digest(of_samples)}

    def read(folder: FolderStorage, about: dict[str, Any]) -> tuple[Plan, list[int]]:
        samples = folder.values("samples.bin", np.dtype(about["dtype"]))
        ends, of_rows = (folder.values(name, np.dtype(np.int64)) for name in ("ends.bin", "lengths.bin"))
        return Plan(samples, ends, of_rows, {of_samples: about["digest"]}), about["rows"]

    inputs = {
        "the samples": of_samples,
        "the placement of labels": placement,
        "the sources": repr(list(sizes)),
        "data.sequence_length": str(capacity),
        "run.seed": str(seed),
    }
    try:
        return load_or_create(cache, NAME, inputs, write=write, read=read, progress=None, timeout=timeout, eager=True)
    except UserError as error:  # such as a read-only folder
        logger.warning("the plan of the rows is not kept, and every process makes it: %s", error.what)
        return plan_sources(lengths(), sizes, capacity, seed)


def plan_rows(lengths: NDArray[np.int64], capacity: int, seed: int) -> Plan:
    """Which samples share a row: best-fit decreasing bin packing (Johnson 1973).

    The longest samples are placed first, each into the fullest row that still has room for it; that needs at most 11/9
    of the minimum number of rows, plus a constant. The seed determines the order of equally long samples, and so which
    samples share a row. The plan depends only on the arguments. Planning needs memory for about four numbers per
    sample.

    Args:
        lengths: shape (samples,): number of tokens in each sample.
        capacity: maximum number of tokens in a row.
        seed: 0 <= seed < 2**64.

    Raises:
        UserError: a sample is longer than a row.
    """
    if len(lengths) and lengths.max() > capacity:
        sample = int(lengths.argmax())
        raise UserError(
            f"sample {sample} is {lengths[sample]} tokens long; a packed row holds {capacity}",
            where="data.sequence_length",
            remedy="raise data.sequence_length, or truncate long samples in the task's encode",
        )
    counts = np.bincount(lengths, minlength=1)
    packs, pack_of = _best_fit(counts, capacity)
    pack_of_sample = np.empty_like(pack_of)
    pack_of_sample[_longest_first(lengths, counts, seed)] = pack_of
    return _rows(pack_of_sample, packs)


def _number_type(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= np.iinfo(np.int32).max else np.int64)


def _longest_first(lengths: NDArray[np.int64], counts: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """The samples by decreasing length; the seed determines the order of equally long ones."""
    size = len(lengths)
    found = np.empty(size, _number_type(size))
    next_places = np.cumsum(counts[::-1])[::-1] - counts
    for first in range(0, size, BLOCK_VALUES):
        samples = order(seed, 0, np.arange(first, min(first + BLOCK_VALUES, size)), size)
        _scatter(samples, lengths[samples], found, next_places)
    return found


def _best_fit(counts: NDArray[np.int64], capacity: int) -> tuple[int, NDArray[Any]]:
    """The number of packs, and the pack of each sample, longest first. A pack is a row before the rows are sorted;
    packs are numbered in order of creation. All samples of a length are placed together: a pack that gets one of them
    is then the fullest with room, and gets more until it is full.

    Args:
        counts: number of samples of each length.
    """
    pack_of = np.empty(int(counts.sum()), _number_type(int(counts.sum())))
    packs_by_free: dict[int, list[NDArray[Any]]] = {}  # free tokens → packs with exactly that many, the newest last
    free_sizes: list[int] = []  # the keys of packs_by_free, ascending
    packs = placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = placed + int(counts[length])
        while placed < end:
            fit = bisect.bisect_left(free_sizes, length)
            free = free_sizes[fit] if fit < len(free_sizes) else capacity
            each = free // length if length else end - placed  # empty samples all go into one pack
            wanted = -(-(end - placed) // each)
            if fit < len(free_sizes):
                chosen = _pop(packs_by_free[free], wanted)
                if not packs_by_free[free]:
                    del packs_by_free[free], free_sizes[fit]
            else:
                chosen = np.arange(packs, packs + wanted, dtype=pack_of.dtype)
                packs += wanted
            got = min(end - placed, each * len(chosen))
            pack_of[placed : placed + got] = np.repeat(chosen, each)[:got]
            placed += got
            for part, samples in ((chosen[: got // each], each), (chosen[got // each :], got % each)):
                left = free - samples * length
                if len(part) and left not in packs_by_free:
                    packs_by_free[left] = []
                    bisect.insort(free_sizes, left)
                if len(part):
                    packs_by_free[left].append(part)
    return packs, pack_of


def _pop(stack: list[NDArray[Any]], count: int) -> NDArray[Any]:
    """Pop up to this many items off a stack, newest first."""
    taken = []
    while stack and count:
        part = stack.pop()
        keep = max(0, len(part) - count)
        if keep:
            stack.append(part[:keep])
        taken.append(part[keep:][::-1])
        count -= len(taken[-1])
    return np.concatenate(taken)


def _rows(pack_of: NDArray[Any], packs: int) -> Plan:
    """The plan from the pack of each sample: its rows are the packs, sorted by their first samples."""
    size = len(pack_of)
    first_of = np.empty(packs, pack_of.dtype)
    for end in range(size, 0, -BLOCK_VALUES):
        begin = max(0, end - BLOCK_VALUES)
        first_of[pack_of[begin:end][::-1]] = np.arange(begin, end)[::-1]  # a repeated index keeps its last value
    row_of = np.empty(packs, pack_of.dtype)
    row_of[np.argsort(first_of)] = np.arange(packs)
    counts = np.empty(packs, np.int64)
    counts[row_of] = np.bincount(pack_of, minlength=packs)
    ends = np.cumsum(counts)
    samples, next_places = np.empty(size, pack_of.dtype), ends - counts
    for begin in range(0, size, BLOCK_VALUES):
        numbers = np.arange(begin, min(begin + BLOCK_VALUES, size))
        _scatter(numbers, row_of[pack_of[numbers]], samples, next_places)
    return Plan(samples, ends)


def _scatter(numbers: NDArray[Any], groups: NDArray[Any], into: NDArray[Any], next_places: NDArray[np.int64]) -> None:
    """Append each number to its group's section of ``into`` (one pass of a counting sort).

    Args:
        groups: the group of each number.
        next_places: the index in ``into`` of each group's next number; advanced in place.
    """
    by_group = np.argsort(groups, kind="stable")
    ordered = groups[by_group]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(begins, append=len(ordered))
    within = np.arange(len(ordered)) - np.repeat(begins, counts)
    into[next_places[ordered] + within] = numbers[by_group]
    next_places[ordered[begins]] += counts


IGNORED_LABEL = -100  # ignored in the loss by Hugging Face models and torch's cross_entropy

CHECKED_TOGETHER = 1 << 16
"""Number of samples whose lengths are in memory at a time during checks."""

LabelPlacement = Literal["next_token", "token", "sample", "decoder"]
"""The placement of a sample's ``labels``. ``next_token``: one per token, which the loss shifts by one, as in causal
language models; ``token``: one per token, not shifted; ``sample``: one, of any shape, for the whole sample;
``decoder``: a separate sequence, aligned with ``decoder_input_ids``."""


class PackedRows:
    """Rows of several samples each, by a plan: row i is the joined samples of ``plan[i]``.

    Args:
        samples: the samples.
        plan: the samples of each row.
        placement: see :data:`LabelPlacement`.

    Raises:
        UserError: the samples cannot be concatenated.
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
    """Shape (samples,): number of tokens of each sample in a row; for ``decoder``, the longer of input and labels."""
    if placement == "decoder" and "labels" in samples.fields:
        return samples.stored_lengths("input_ids", "labels")[:]
    return samples.lengths


@dataclass(frozen=True)
class RowLayout:
    """How the fields of several samples are combined into one row."""

    placement: LabelPlacement
    per_token: tuple[str, ...]
    """Fields with one value per item of ``input_ids``."""
    per_target: tuple[str, ...]
    """Fields with one value per item of a decoder's ``labels``."""
    per_sample: tuple[str, ...]
    """Fields with one value, of any shape, per sample."""

    @classmethod
    def of(cls, samples: EncodedDataset, placement: LabelPlacement) -> "RowLayout":
        """The layout of these samples.

        Raises:
            UserError: they have no tokens, or a field that is neither per token nor per sample.
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
        """Concatenate several samples into one row.

        ``position_ids`` restart at 0 in each sample, and ``segment_ids`` (0, 1, 2, …) give the sample of each token,
        since attention must not cross samples; ``decoder_segment_ids`` do the same for targets. ``ids`` and all
        per-sample fields become lists, with one item per sample.

        Raises:
            UserError: the samples have a field that the layout does not know.
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
            # the loss shifts labels by one: a sample's first label would be predicted from the previous sample
            row["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORED_LABEL
        if "position_ids" not in row:  # a task may provide its own position_ids
            row["position_ids"] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        row["segment_ids"] = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
        if self.placement == "decoder":
            lengths = [len(sample["labels"]) for sample in samples]
            row["decoder_segment_ids"] = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
        return row


def _check_lengths(samples: EncodedDataset, name: str, base: str, units: str) -> None:
    """Refuse to pack if a field has a different number of values than another in any sample."""
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

    The last token of a window is also the first of the next, only as context, so every token except the document's
    first is predicted exactly once. A document of fewer than two tokens has nothing to predict, and gives no window.

    Args:
        tokens: shape (tokens,).
        length: number of tokens in a window, at least 2.

    Returns:
        Views of ``tokens``, each of shape (2..length,).
    """
    return [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
