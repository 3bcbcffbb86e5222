"""A checkpoint whose parts are on several disks: what each of them says of its folder."""

import random
from pathlib import Path

import pytest

from drawbar.checkpoint.checked_files import check_local_files, check_sizes
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Damaged, Manifest, PartsElsewhere
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.part_placement import PartPlacement
from parts_writing import state_of, write_parts

NAMES = [f"{kind}-{rank:05d}.safetensors" for kind in ("model", "optimizer") for rank in range(3)]


def test_a_ring_of_disks() -> None:
    placement = PartPlacement(((0, 1), (2,), (3, 4)), 2)
    assert [placement.disk_of(rank) for rank in range(5)] == [0, 0, 1, 2, 2]
    assert [placement.next_disks(disk) for disk in range(3)] == [[1], [2], [0]]
    assert [placement.ranks_on(disk) for disk in range(3)] == [[0, 1, 3, 4], [2, 0, 1], [3, 4, 2]]
    alone = PartPlacement(((0, 1, 2),), 1)
    assert (alone.next_disks(0), alone.ranks_on(0)) == ([], [0, 1, 2])


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Steps 1 and 2, of which this disk has the parts of ranks 0 and 1, and another one those of 1 and 2."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (1, 2):
        folder = write_parts(directory, step, *state_of(random.Random(step)), ranks=3, seed=step)
        manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
        assert manifest.parts is not None
        assert manifest.parts.keys() == set(NAMES)
        disks = [[name for name in NAMES if int(name[-13]) in ranks] for ranks in ((0, 1), (1, 2))]
        text = manifest.model_copy(update={"disks": disks}).to_json()
        (folder / "manifest.json").write_bytes(text)
        for name in set(NAMES) - set(disks[0]):
            (folder / name).unlink()
            (folder / f"{name}.sums").unlink()
    return directory


def test_it_is_intact_and_not_complete(directory: CheckpointDirectory) -> None:
    folder = directory.path / "step-00000002"
    with pytest.raises(PartsElsewhere, match=r"other nodes' disks: model-00002\.safetensors, optimizer-00002"):
        check_sizes(folder)
    manifest, elsewhere = check_local_files(folder)
    assert manifest.step == 2
    assert {name.removesuffix(".sums") for name in elsewhere} == {NAMES[2], NAMES[5]}
    assert problems(folder) == []
    assert directory.steps() == [1, 2]
    assert directory.latest() is None
    assert "step-00000002 is there: the same command resumes" in directory.describe_newest()


def test_a_missing_file_that_belongs_here_is_damage(directory: CheckpointDirectory) -> None:
    folder = directory.path / "step-00000002"
    (folder / NAMES[0]).unlink()
    with pytest.raises(Damaged, match=r"model-00000\.safetensors is missing"):
        check_local_files(folder)
    assert directory.steps() == [1]


def test_it_is_amended_replaced_and_rotated_as_others_are(directory: CheckpointDirectory) -> None:
    directory.update_state(2, {"value": 3})
    manifest, elsewhere = check_local_files(directory.path / "step-00000002")
    assert len(elsewhere) == 4
    assert manifest.disks is not None
    (directory.path / "step-00000002.replaced").mkdir()
    directory.remove_leftovers()
    directory.rotate(1, set())
    assert [path.name for path in directory.path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("disks", [[], [NAMES[:5]], [[*NAMES, "../evil"]], [NAMES, ["model-00009.safetensors"]]])
def test_a_manifest_that_cannot_be(disks: list[list[str]], directory: CheckpointDirectory) -> None:
    text = (directory.path / "step-00000001" / "manifest.json").read_bytes()
    with pytest.raises(Damaged, match="on which disk"):
        Manifest.from_json(Manifest.from_json(text).model_copy(update={"disks": disks}).to_json())
