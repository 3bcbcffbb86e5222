"""Checkpoints in parts: what was written comes back, whole or in any other boxes, and little else is read."""

import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drawbar.checkpoint import read, write
from drawbar.checkpoint.block_checksums import BLOCK_BYTES
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import FileEntry
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.read import PartFiles, read_snapshot, read_state
from drawbar.checkpoint.tensor_index import PartFile, PartRecord, TensorIndex, TensorInfo, intersections
from drawbar.checkpoint.write import write_part
from drawbar.errors import UserError
from drawbar.runtime.safetensors_reader import TensorBox
from parts_writing import begin_parts, commit_parts, cut_at_random, shard, state_of, write_parts


def same_bits(found, expected):
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.contiguous().reshape(-1).view(torch.uint8).equal(expected.contiguous().reshape(-1).view(torch.uint8))
    )


def read_whole(files, name):
    return files.read(name, [0] * len(files.shape(name)), files.shape(name))


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(tmp_path / "checkpoints")


@pytest.mark.parametrize("seed", range(6))
def test_every_tensor_comes_back_whole_and_in_any_other_boxes(directory, seed):
    rng = random.Random(seed)
    model, optimizer = state_of(rng)
    folder = write_parts(directory, 3, model, optimizer, ranks=1 + seed, seed=seed, aliases={"head": "embed.weight"})
    assert problems(folder) == []
    files = PartFiles(folder)
    everything = model | optimizer
    assert set(files.names()) == {*everything, "head"}
    for name, tensor in everything.items():
        assert files.shape(name) == tensor.shape
        assert files.dtype(name) == tensor.dtype
        assert same_bits(read_whole(files, name), tensor), name
        for box in cut_at_random(tuple(tensor.shape), 7, rng):
            wanted = shard(name, tensor, box)
            assert same_bits(files.read(name, wanted.offset, wanted.data.shape), wanted.data), name
    found = read_snapshot(folder)
    assert found.step == 3
    assert found.model.keys() == {*model, "head"}
    assert found.optimizer.keys() == optimizer.keys()
    assert same_bits(found.model["head"], model["embed.weight"])
    assert read_state(folder)["value"] == 3
    assert found.rng["seed-0000/torch"].tolist() == list(range(16))


def test_boxes_of_many_tensors_are_filled_in_place_and_converted(directory):
    model, optimizer = state_of(random.Random(1))
    files = PartFiles(write_parts(directory, 1, model, optimizer))
    rows = torch.full((100, 1100), -1.0, dtype=torch.bfloat16)
    column = torch.full((700, 1), -1.0)
    files.fill(
        [
            TensorBox("embed.weight", (700, 1100), (600, 0), rows),
            TensorBox("embed.weight/exp_avg", (700, 1100), (0, 1099), column),
        ]
    )
    assert rows.equal(model["embed.weight"][600:].bfloat16())
    assert column.equal(optimizer["embed.weight/exp_avg"][:, 1099:])
    with pytest.raises(ValueError, match=r"embed.weight is \[700, 1100\] in the checkpoint, not \[7, 1100\]"):
        files.read_into(TensorBox("embed.weight", (7, 1100), (0, 0), torch.empty(7, 1100)))


def test_part_files_are_safetensors_files(directory):
    tensor = torch.arange(12.0).view(4, 3)
    folder = write_parts(directory, 1, {"w": tensor}, {"w/exp_avg": tensor}, ranks=2, seed=3)
    boxes = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        boxes |= load_file(path)
    assert sum(box.numel() for box in boxes.values()) == 12
    for key, box in boxes.items():
        row, column = map(int, key.partition("@")[2].split(",")) if "@" in key else (0, 0)
        assert box.equal(tensor[row : row + box.shape[0], column : column + box.shape[1]])


def test_a_rank_reads_little_more_than_it_needs(directory):
    """Rows that another layout needs: its own bytes, and a block at each end of what lies in one file."""
    tensor = torch.randn(4096, 1024)
    folder = write_rows(directory, {"w": tensor}, 4)
    for ranks in (1, 2, 3, 8):
        rows = 4096 // ranks
        files = PartFiles(folder)
        files.read("w", (rows * (ranks - 1), 0), (rows, 1024))
        needed = rows * 1024 * 4
        crossed = 1 + 4 // ranks
        assert files.bytes_read <= needed + 2 * crossed * BLOCK_BYTES


def test_neighbours_in_a_file_are_read_once(directory):
    """Tensors smaller than a block, each cut over all files: every block is read once in the order of the files."""
    model = {f"w{number:03d}": torch.randn(8, 1000) for number in range(200)}
    folder = write_rows(directory, model, 4)
    files = PartFiles(folder)
    targets = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    files.fill(TensorBox(name, tuple(target.shape), (0, 0), target) for name, target in targets.items())
    assert all(target.equal(model[name]) for name, target in targets.items())
    assert files.bytes_read == sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.stem != "rng")


def write_rows(directory, model, ranks):
    folder = begin_parts(directory, 1)
    records = []
    for rank in range(ranks):
        own = []
        for name, tensor in model.items():
            rows = len(tensor) // ranks
            own.append(shard(name, tensor, ((rank * rows, (rank + 1) * rows), (0, tensor.shape[1]))))
        records.append(write_part(folder, rank, own, [], {}))
    commit_parts(directory, 1, records, {}, {})
    return directory.path / "step-00000001"


def test_amended_checkpoints_share_their_parts(directory):
    model, optimizer = state_of(random.Random(2))
    folder = write_parts(directory, 1, model, optimizer)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    directory.update_state(1, {"value": 9})
    after = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"state.json", "manifest.json"}
    assert problems(folder) == []
    assert read_state(folder) == {"value": 9}


def test_what_the_ranks_disagree_about_is_refused(directory):
    tensor = torch.ones(4, 2)
    half, other = shard("w", tensor, ((0, 2), (0, 2))), shard("w", tensor, ((2, 4), (0, 2)))
    for second, aliases, reason in (
        ([half], {}, "the boxes of w overlap, or some of it is missing"),
        ([], {}, "the boxes of w overlap, or some of it is missing"),
        ([shard("w", torch.ones(5, 2), ((2, 5), (0, 2)))], {}, "do not agree about the type or shape of w"),
        ([shard("w", tensor.half(), ((2, 4), (0, 2)))], {}, "do not agree about the type or shape of w"),
        ([other], {"tied": "v"}, "tied to v, which no rank has written"),
        ([other], {"w": "w"}, "two tensors of one name"),
    ):
        folder = begin_parts(directory, 1)
        records = [write_part(folder, 0, [half], [], {}), write_part(folder, 1, second, [], aliases)]
        with pytest.raises(ValueError, match=reason):
            commit_parts(directory, 1, records, {}, {})
        assert directory.steps() == []
    directory.discard("step-00000001")
    assert list(directory.path.iterdir()) == []


def test_parts_that_are_missing_at_the_end_are_named(directory, monkeypatch):
    monkeypatch.setattr(write, "_VISIBLE_WITHIN_SECONDS", 0.2)
    folder = begin_parts(directory, 1)
    record = write_part(folder, 3, [shard("w", torch.ones(2), ((0, 2),))], [], {})
    (folder / "model-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00003\.safetensors has 0 bytes, and its rank has written \d+"):
        commit_parts(directory, 1, [record], {}, {})
    assert list(directory.path.iterdir()) == []


def test_more_files_than_may_be_open(directory, monkeypatch):
    monkeypatch.setattr(read, "_MAX_OPEN_FILES", 3)
    model = {f"w{number}": torch.randn(64, 8) for number in range(5)}
    files = PartFiles(write_rows(directory, model, 8))
    assert all(read_whole(files, name).equal(tensor) for name, tensor in model.items())
    assert len(open_files(directory.path)) == 3
    del files
    assert open_files(directory.path) == []


def open_files(folder):
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in names if name.startswith(str(folder))]


def test_a_checkpoint_may_be_deleted_while_it_is_read(directory):
    model, optimizer = state_of(random.Random(2))
    folder = write_parts(directory, 1, model, optimizer)
    found = read_snapshot(folder)
    shutil.rmtree(folder)
    assert all(same_bits(found.model[name], tensor) for name, tensor in model.items())


def test_an_index_of_many_ranks_is_read_as_it_was_merged():
    """70 tensors, each cut into rows over 64 ranks; every rank of another layout finds all of its bytes."""
    ranks, shapes = 64, {f"layer.{number}.weight": (640 + number, 16) for number in range(70)}
    records = []
    for rank in range(ranks):
        rows = {name: (rank * -(-shape[0] // ranks), -(-shape[0] // ranks)) for name, shape in shapes.items()}
        held = [(name, first, min(count, shapes[name][0] - first)) for name, (first, count) in sorted(rows.items())]
        held = [(name, first, count) for name, first, count in held if count > 0]
        size = 8 + sum(count * 16 * 4 for _, _, count in held)
        file = PartFile(
            name=f"model-{rank:05d}.safetensors",
            size=size,
            begin=8,
            sums=FileEntry(size=16, sha256=""),
            tensors=tuple(TensorInfo(name, "F32", shapes[name]) for name, _, _ in held),
            offsets=np.array([number for _, first, _ in held for number in (first, 0)]),
            sizes=np.array([number for _, _, count in held for number in (count, 16)]),
        )
        records.append(PartRecord.from_json(PartRecord(rank, (file,), {}).to_json()))
    index = TensorIndex.merge(records)
    again = TensorIndex.from_json(index.to_json(), {record.files[0].name: record.files[0].size for record in records})
    assert again.to_json() == index.to_json()
    for name in shapes:
        for column in range(2):
            wanted = list(intersections(again.model[name], (100, 8 * column), (300, 8)))
            covered = torch.zeros(300, 8, dtype=torch.int64)
            for piece in wanted:
                covered[piece.target] += 1
                assert again.files[piece.file][1] <= piece.begin
            assert covered.eq(1).all()
    assert [tensor.begins.tolist() for tensor in again.model.values()] == [
        tensor.begins.tolist() for tensor in index.model.values()
    ]


def test_small_and_large_tensors_are_written_in_their_order(directory, monkeypatch):
    """As pieces of several sizes, some of which hold many tensors, and synced after each of them."""
    monkeypatch.setattr(write, "_WRITE_BYTES", 4000)
    monkeypatch.setattr(write, "_SYNC_BYTES", 1000)
    model = {f"w{number:02d}": torch.randn(1 + 37 * (number * number % 53)) for number in range(60)}
    folder = write_parts(directory, 1, model, {}, ranks=2)
    assert problems(folder) == []
    found = PartFiles(folder)
    assert all(read_whole(found, name).equal(tensor) for name, tensor in model.items())


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "write"])
def test_an_error_of_the_disk_is_raised(directory, monkeypatch, call):
    """Also one that is told to the thread which syncs, and to nobody after it."""
    monkeypatch.setattr(write, "_WRITE_BYTES", 4000)
    monkeypatch.setattr(write, "_SYNC_BYTES", 1000)
    real, calls = getattr(os, call), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    folder = begin_parts(directory, 1)
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_part(folder, 0, [shard("w", torch.randn(9000), ((0, 9000),))], [], {})
