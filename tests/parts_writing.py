"""A checkpoint in parts, made from whole tensors that were cut at random."""

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.read import read_snapshot
from drawbar.checkpoint.tensor_index import PartRecord
from drawbar.checkpoint.write import write_common_files, write_part
from drawbar.runtime.safetensors_reader import TensorBox

Box = tuple[tuple[int, int], ...]
"""Start and end in each dim."""


def cut_at_random(shape: tuple[int, ...], pieces: int, rng: random.Random) -> list[Box]:
    """Cut a tensor into up to so many boxes, each time one of them along one of its dims."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(pieces - 1):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [dim for dim, (start, end) in enumerate(box) if end - start > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        start, end = box[dim]
        at = rng.randrange(start + 1, end)
        boxes += [(*box[:dim], (start, at), *box[dim + 1 :]), (*box[:dim], (at, end), *box[dim + 1 :])]
    return boxes


def shard(name: str, tensor: torch.Tensor, box: Box) -> TensorBox:
    data = tensor[tuple(slice(*bounds) for bounds in box)]
    return TensorBox(name, tuple(tensor.shape), tuple(start for start, _ in box), data)


def assign_writers(tensors: Mapping[str, torch.Tensor], ranks: int, rng: random.Random) -> Iterator[list[TensorBox]]:
    """For each rank some boxes of the tensors; each element is dealt out once."""
    hands: list[list[TensorBox]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        for box in cut_at_random(tuple(tensor.shape), rng.randrange(1, 2 * ranks), rng):
            rng.choice(hands).append(shard(name, tensor, box))
    yield from hands


def state_of(rng: random.Random) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model and its optimizer, with tensors of every sort, and some larger than a block of checksums."""
    torch.manual_seed(rng.randrange(2**30))
    model = {
        "embed.weight": torch.randn(700, 1100),
        "layer.weight": torch.randn(64, 96),
        "layer.bias": torch.randn(96, dtype=torch.bfloat16),
        "odd": torch.randn(13).half(),
        "conv.weight": torch.randn(6, 5, 4, 3),
        "steps": torch.tensor(7),
        "mask": torch.rand(31) > 0.5,
        "empty": torch.empty(0, 4),
        "table": torch.randint(0, 2**40, (17, 3)),
    }
    optimizer = {f"{name}/{key}": torch.randn(*model[name].shape) for name in ("embed.weight", "conv.weight")
                 for key in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    return model, optimizer | {"layer.weight/step": torch.tensor(12.0)}


def begin_parts(directory: CheckpointDirectory, step: int) -> Path:
    return directory.begin_write(step_name(step))


def commit_parts(
    directory: CheckpointDirectory,
    step: int,
    records: Iterable[PartRecord],
    state: dict[str, Any],
    rng: Mapping[str, torch.Tensor],
) -> None:
    directory.finish_write(step_name(step), lambda folder: write_common_files(folder, step, records, state, rng))


def write_parts(
    directory: CheckpointDirectory,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    ranks: int = 3,
    seed: int = 0,
    aliases: Mapping[str, str] | None = None,
    state: dict[str, Any] | None = None,
    generators: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    rng = random.Random(seed)
    folder = begin_parts(directory, step)
    hands = zip(assign_writers(model, ranks, rng), assign_writers(optimizer, ranks, rng), strict=True)
    records = [write_part(folder, rank, *hand, aliases or {}) for rank, hand in enumerate(hands)]
    sent = [PartRecord.from_json(record.to_json()) for record in records]
    generators = {"seed-0000/torch": torch.arange(16, dtype=torch.uint8)} if generators is None else generators
    commit_parts(directory, step, sent, {"value": step} if state is None else state, generators)
    return directory.path / step_name(step)


def rewrite_in_parts(directory: CheckpointDirectory, step: int) -> None:
    """Write a checkpoint of whole tensors anew, in parts, as if several ranks had saved it."""
    found = read_snapshot(directory.resolve(str(step)))
    first: dict[bytes, str] = {}
    aliases = {
        name: stored for name, tensor in found.model.items() if (stored := _first_of(first, name, tensor)) != name
    }
    model = {name: tensor for name, tensor in found.model.items() if name not in aliases}
    write_parts(directory, step, model, found.optimizer, 3, 0, aliases, found.state, found.rng)


def _first_of(first: dict[bytes, str], name: str, tensor: torch.Tensor) -> str:
    """Equal tensors of some size are taken for tied ones."""
    if tensor.numel() < 1000:
        return name
    return first.setdefault(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()), name)
