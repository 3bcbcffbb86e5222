"""Bits flipped and files cut short at random places of every file, written by one or several: named, never loaded."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, Unusable
from drawbar.checkpoint.inspection import problems, unlisted_files
from drawbar.checkpoint.read import read_snapshot
from drawbar.errors import UserError
from parts_writing import write_parts

PLACES = 25
"""In each file, for flips and cuts each."""


def state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = {"embed.weight": torch.randn(300, 1000), "layer.bias": torch.randn(64), "half": torch.randn(33).half()}
    return model, {"layer.bias/exp_avg": torch.randn(64), "layer.bias/step": torch.tensor(3.0)}


@pytest.fixture(params=["whole", "parts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    model, optimizer = state()
    if request.param == "parts":
        return write_parts(directory, 1, model, optimizer, ranks=2, seed=5)
    rng = {"seed-0000/torch": torch.arange(16, dtype=torch.uint8)}
    directory.write(Snapshot(1, model, optimizer, rng, {"value": 1}))
    return directory.resolve("1")


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def load_all(folder: Path) -> None:
    found = read_snapshot(folder)
    for tensors in (found.model, found.optimizer):
        for name in tensors:
            tensors[name]


def expect_named(folder: Path, path: Path) -> None:
    wrong = problems(folder)
    assert wrong, path
    assert path.name in wrong[0]
    with pytest.raises((UserError, Unusable)) as caught:
        load_all(folder)
    assert path.name in str(caught.value)


def test_an_intact_one_has_no_problems(folder: Path) -> None:
    assert problems(folder) == []
    assert unlisted_files(folder) == []
    load_all(folder)


def test_flipped_bits(folder: Path) -> None:
    rng = random.Random(1)
    files = sorted(folder.iterdir())
    for path in files:
        content = path.read_bytes()
        for _ in range(PLACES):
            flipped = bytearray(content)
            flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            with changed(path, bytes(flipped)):
                expect_named(folder, path)
    assert problems(folder) == []


def test_truncated_and_extended_files(folder: Path) -> None:
    rng = random.Random(2)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(PLACES):
            with changed(path, content[: rng.randrange(len(content))]):
                expect_named(folder, path)
        with changed(path, content + b"\0"):
            expect_named(folder, path)


def test_missing_and_foreign_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        aside = path.rename(folder.parent / "aside")
        expect_named(folder, path)
        aside.rename(path)
    (folder / "model-00007.safetensors").write_bytes(b"of another checkpoint")
    assert problems(folder) == []
    assert unlisted_files(folder) == ["model-00007.safetensors"]


def test_a_file_of_another_checkpoint(folder: Path, tmp_path: Path) -> None:
    """As large as the one whose place it takes."""
    directory = CheckpointDirectory(tmp_path / "other")
    model, optimizer = ({name: tensor + 1 for name, tensor in tensors.items()} for tensors in state())
    if (folder / "model-00001.safetensors").exists():
        other = write_parts(directory, 1, model, optimizer, ranks=2, seed=5)
    else:
        directory.write(Snapshot(1, model, optimizer, {}, {}))
        other = directory.resolve("1")
    for path in sorted(folder.glob("model*.safetensors")):
        content = (other / path.name).read_bytes()
        assert len(content) == path.stat().st_size
        with changed(path, content):
            expect_named(folder, path)


def test_every_damaged_file_is_named(folder: Path) -> None:
    damaged = sorted(path for path in folder.iterdir() if path.name != "manifest.json")
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    wrong = problems(folder)
    for path in damaged:
        assert any(line.startswith(path.name) for line in wrong), path


def test_flipped_bits_and_cuts_in_the_file_of_the_best_score(tmp_path: Path) -> None:
    """Every bit, and every length. What is read all the same, as another spelling of a number, is what was written."""
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3):
        directory.write(Snapshot(step, {}, {}, {}, {}))
    directory.set_best(2, "loss", 1.25e-7)
    path = tmp_path / "best.json"
    content, written = path.read_bytes(), directory.best_record()
    changed_contents = [content[:length] for length in range(len(content))]
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        changed_contents.append(bytes(flipped))
    refused = 0
    for text in changed_contents:
        path.write_bytes(text)
        try:
            found = directory.best_record()
        except UserError as error:
            refused += "best.json is damaged" in error.what
        else:
            assert found == written, text
    assert len(changed_contents) - 2 <= refused < len(changed_contents)
