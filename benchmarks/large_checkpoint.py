"""The index of a checkpoint of 70 B parameters, written by 1,024 ranks and read by 512: its seconds and its memory.

One process does what all ranks do one after the other: each says what it has written, one of them merges that to
``tensors.json``, and a rank of another layout reads this, and finds where its bytes are. No tensor is made.

    python -m benchmarks.large_checkpoint [--ranks 1024]
"""

import argparse
import itertools
import math
import resource
import time
from collections.abc import Iterator

import numpy as np

from drawbar.checkpoint.block_checksums import checksums_size
from drawbar.checkpoint.format import FileEntry
from drawbar.checkpoint.tensor_index import PartFile, PartRecord, TensorIndex, TensorInfo, intersections

LAYERS, HIDDEN, INNER, KEYS, WORDS = 80, 8192, 28672, 1024, 128256
"""Llama 3 70B."""
FSDP, TENSOR = 64, 8
"""The layout of those who read."""
COLUMNS = ("o_proj", "down_proj")
"""What tensor parallelism shards by column; the rest it shards by row, and norms not at all."""


def shapes() -> dict[str, tuple[int, ...]]:
    own: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            own[f"model.layers.{layer}.{name}.weight"] = shape
    return own | {"model.norm.weight": (HIDDEN,)}


class Writers:
    """What the ranks of FSDP say that they have written, for one kind of tensors."""

    def __init__(self, kind: str, tensors: list[TensorInfo], ranks: int) -> None:
        self.kind = kind
        self.tensors = tensors
        self.ranks = ranks
        self.rows = np.array([tensor.shape[0] for tensor in tensors])
        self.columns = np.array([math.prod(tensor.shape[1:]) for tensor in tensors])
        self.is_matrix = np.array([len(tensor.shape) == 2 for tensor in tensors])

    def file_of(self, rank: int) -> PartFile:
        each = -(-self.rows // self.ranks)  # as ``torch.chunk`` divides them
        first = np.minimum(self.rows, rank * each)
        count = np.minimum(each, self.rows - first)
        held = count > 0
        dims = np.stack([np.ones_like(held), self.is_matrix], axis=1)[held]
        size = 8 + 4 * int((count * self.columns).sum())
        return PartFile(
            name=f"{self.kind}-{rank:05d}.safetensors",
            size=size,
            begin=8,
            sums=FileEntry(size=checksums_size(size), sha256="0" * 64),
            tensors=tuple(itertools.compress(self.tensors, held)),
            offsets=np.stack([first, np.zeros_like(first)], axis=1)[held][dims],
            sizes=np.stack([count, self.columns], axis=1)[held][dims],
        )


def wanted(name: str, shape: tuple[int, ...], rank: int) -> tuple[list[int], list[int]]:
    """Offset and size of what a rank of FSDP × tensor needs of a tensor."""
    offset, size = [0] * len(shape), list(shape)
    shard, part = divmod(rank, TENSOR)
    if len(shape) == 2:
        dim = int(any(column in name for column in COLUMNS))
        size[dim] = shape[dim] // TENSOR
        offset[dim] = part * size[dim]
    each = -(-size[0] // FSDP)
    first = min(size[0], shard * each)
    return [offset[0] + first, *offset[1:]], [min(each, size[0] - first), *size[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024, help="How many ranks write. Default: 1024.")
    ranks = parser.parse_args().ranks
    model = [TensorInfo(name, "F32", shape) for name, shape in sorted(shapes().items())]
    moments = sorted(
        TensorInfo(f"{tensor.name}/{key}", "F32", tensor.shape) for tensor in model for key in ("exp_avg", "exp_avg_sq")
    )
    writers = [Writers("model", model, ranks), Writers("optimizer", moments, ranks)]
    sizes: dict[str, int] = {}
    sent = 0

    def received() -> Iterator[PartRecord]:
        nonlocal sent
        for rank in range(ranks):
            text = PartRecord(rank, tuple(writer.file_of(rank) for writer in writers), {}).to_json()
            sent += len(text)
            record = PartRecord.from_json(text)
            sizes.update({file.name: file.size for file in record.files})
            yield record

    start = time.perf_counter()
    index = TensorIndex.merge(received())
    merged = time.perf_counter()
    text = index.to_json()
    del index
    written = time.perf_counter()
    index = TensorIndex.from_json(text, sizes)
    read = time.perf_counter()
    count = needed = 0
    for name, tensor in (index.model | index.optimizer).items():
        offset, size = wanted(name, tensor.shape, FSDP * TENSOR // 2 + 3)
        found = list(intersections(tensor, offset, size))
        count += len(found)
        assert sum(math.prod(end - first for first, end in piece.bounds) for piece in found) == math.prod(size)
        needed += 4 * math.prod(size)
    planned = time.perf_counter()

    tensors = index.model | index.optimizer
    boxes = sum(len(tensor.files) for tensor in tensors.values())
    print(f"{len(tensors):,} tensors, {sum(sizes.values()) / 1e9:,.0f} GB by {ranks:,} ranks: {boxes:,} boxes")
    print(f"told and merged   {merged - start:6.2f} s   ({sent / 1e6:,.0f} MB of records)")
    print(f"tensors.json      {written - merged:6.2f} s   ({len(text) / 1e6:,.0f} MB)")
    print(f"read and checked  {read - written:6.2f} s")
    print(f"plan of one rank  {planned - read:6.2f} s   ({count:,} pieces of boxes, {needed / 1e9:.2f} GB)")
    print(f"together          {planned - start:6.2f} s")
    print(f"peak memory       {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:6.2f} GiB")


if __name__ == "__main__":
    main()
