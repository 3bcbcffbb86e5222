"""Packing: several samples in one row, without loss and without one seeing another."""

import bisect
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import EncodedDataset, Sample
from drawbar.data.order import order
from drawbar.errors import UserError

IGNORED_LABEL = -100  # what Hugging Face models and torch's cross_entropy leave out of the loss


def plan_packs(lengths: NDArray[np.int64], capacity: int, seed: int) -> list[list[int]]:
    """Which samples share a row: best-fit decreasing bin packing (Johnson 1973).

    The longest samples are placed first, each into the fullest row that still has room for it; that needs at most
    11/9 of the fewest possible rows, plus a constant. The seed decides which of several equally long samples comes
    first, and so which samples meet. Takes O(n log n) time. The plan depends on the arguments alone.

    Args:
        lengths: shape (samples,), tokens in each sample.
        capacity: tokens that a row can hold.
        seed: 0 <= seed < 2**64.

    Returns:
        Sample numbers of each row; ascending in a row, and rows ascending by their first sample.

    Raises:
        UserError: a sample is longer than a row.
    """
    if len(lengths) and lengths.max() > capacity:
        sample = int(lengths.argmax())
        raise UserError(
            f"sample {sample} is {lengths[sample]} tokens long; a packed row holds {capacity}",
            where="data.sequence_length",
            remedy="raise data.sequence_length, or cut long samples in the task's encode",
        )
    shuffled = order(seed, 0, np.arange(len(lengths)), len(lengths))
    decreasing = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    packs: list[list[int]] = []
    packs_with_room: dict[int, list[int]] = {}  # free tokens → rows with exactly that many free
    rooms: list[int] = []  # the keys of packs_with_room, ascending
    for sample, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        fit = bisect.bisect_left(rooms, length)
        if fit < len(rooms):
            room = rooms[fit]
            pack = packs_with_room[room].pop()
            if not packs_with_room[room]:
                del packs_with_room[room], rooms[fit]
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(sample)
        left = room - length
        if left not in packs_with_room:
            packs_with_room[left] = []
            bisect.insort(rooms, left)
        packs_with_room[left].append(pack)
    return sorted(sorted(pack) for pack in packs)


def join_samples(samples: list[Sample]) -> Sample:
    """One row of several samples, laid end to end.

    Every array of one value per token is concatenated. ``position_ids`` start again at 0 in each sample, and
    ``segment_ids`` (0, 1, 2, …) say which sample a token belongs to: attention must not cross from one into another.
    ``labels`` are aligned with ``input_ids``, as in Hugging Face models: ``labels[t]`` is the token at t, and the loss
    shifts them by one. The first label of every sample is therefore -100, or it would be predicted from the sample
    before.
    ``ids`` and every scalar field become lists, with one item a sample.

    Args:
        samples: items of an ``EncodedDataset``, all with the same fields; ``input_ids`` of shape (tokens,), and
            every other array with as many values along its first dim.
    """
    row: Sample = {"ids": [sample["id"] for sample in samples]}
    for name in samples[0].keys() - {"id", "ids"}:
        values = [sample[name] for sample in samples]
        row[name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else values
    lengths = [len(sample["input_ids"]) for sample in samples]
    if "labels" in row:
        row["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORED_LABEL
    if "position_ids" not in row:  # else the task counts positions in its own way
        row["position_ids"] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    row["segment_ids"] = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    return row


class PackedDataset:
    """Rows of a dataset by a plan: item i is the joined samples of ``plan[i]``.

    Raises:
        UserError: the samples cannot be laid end to end.
    """

    def __init__(self, base: EncodedDataset, plan: list[list[int]]) -> None:
        _check_packable(base)
        self.base = base
        self.plan = plan
        digest = hashlib.blake2b(base.fingerprint.encode(), digest_size=16)
        for pack in plan:
            digest.update(np.array([len(pack), *pack], dtype=np.int64).tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Sample:
        return join_samples([self.base[sample] for sample in self.plan[index]])


def _check_packable(dataset: EncodedDataset) -> None:
    def fault(what: str) -> UserError:
        return UserError(
            f"these samples cannot be packed: {what}", where="data.packing", remedy="set data.packing=false"
        )

    fields = _kinds(dataset.samples[0])
    if "input_ids" not in fields:
        raise fault("they have no input_ids")
    for index, (sample, length) in enumerate(zip(dataset.samples, dataset.lengths, strict=True)):
        if _kinds(sample) != fields:
            raise fault(f"sample {index} has other fields than sample 0")
        for name, value in sample.items():
            if isinstance(value, np.ndarray) and len(value) != length:
                raise fault(f"sample {index} has {len(value)} values of {name!r} for {length} tokens")
    if not fields.get("labels", True):
        raise fault("their labels are not one for each token")


def _kinds(sample: Sample) -> dict[str, Any]:
    """Field name → whether it is an array."""
    return {name: isinstance(value, np.ndarray) for name, value in sample.items()}


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
