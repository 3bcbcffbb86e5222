"""Disks that cannot be read, checkpoints of another format, and damaged ones: none is taken for absent."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
from test_checkpoint_directory import SMALL_FILES, flip, names, snapshot

from drawbar.checkpoint.all_ranks import read_on_all_ranks
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Damaged, Manifest, file_entry
from drawbar.checkpoint.read import read_snapshot, read_state
from drawbar.errors import ExitCode, UserError
from drawbar.util import atomic_files
from ranks import SecondRank


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        directory.write(snapshot(step))
    return directory


@pytest.fixture
def fail(monkeypatch):
    """Let the disk fail, with an error number, whenever the path is opened or listed, or so many times."""
    monkeypatch.setattr(atomic_files, "_RETRY_DELAYS", (0.0, 0.0))
    bad = {}

    def failing(real):
        def look(path, *arguments, **options):
            number, times = bad.get(str(path), (0, 0))
            if times > 0:
                bad[str(path)] = (number, times - 1)
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **options)

        return look

    monkeypatch.setattr(io, "open", failing(io.open))
    monkeypatch.setattr(os, "scandir", failing(os.scandir))

    def fail(path: Path, number: int, times: int = 1000):
        bad[str(path)] = (number, times)

    return fail


def make_newer(folder):
    """As a drawbar of the future would have written it."""
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    newer = manifest.model_copy(update={"format": 3, "drawbar": "9.0"})
    (folder / "manifest.json").write_bytes(newer.to_json())


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["", "step-00000003/manifest.json", "step-00000003/tensors.json"])
def test_what_cannot_be_read_is_an_error_and_no_checkpoint_is_skipped(directory, fail, name, number):
    fail(directory.path / name, number)
    for look in (directory.latest, directory.find_newest_usable, lambda: directory.resolve("latest")):
        with pytest.raises(UserError, match=os.strerror(number)) as caught:
            look()
        assert caught.value.exit_code == ExitCode.FAILED
        assert str(directory.path / name) in caught.value.what
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("name", SMALL_FILES)
def test_reading_says_so_too(directory, fail, name):
    newest = directory.latest()
    fail(newest / name, errno.EIO)
    with pytest.raises(UserError, match=r"cannot read .* Input/output error"):
        read_snapshot(newest)
    if name in ("manifest.json", "state.json"):
        with pytest.raises(UserError, match=r"cannot read .* Input/output error"):
            read_state(newest)


@pytest.mark.parametrize("name", ["", "step-00000003/manifest.json", "step-00000003/tensors.json"])
def test_an_error_that_passes_is_none(directory, fail, name):
    fail(directory.path / name, errno.ESTALE, times=2)
    assert directory.latest().name == "step-00000003"


def test_a_disk_that_cannot_be_listed_stops_no_save_and_loses_nothing(directory, fail, caplog):
    fail(directory.path, errno.EIO)
    directory.rotate(1, set())
    assert "old checkpoints stay" in caplog.text
    fail(directory.path, errno.EIO, times=0)
    assert directory.steps() == [1, 2, 3]


def test_what_cannot_be_read_is_not_rotated(directory, fail):
    fail(directory.path / "step-00000001" / "manifest.json", errno.EIO)
    directory.rotate(1, set())
    assert names(directory) == ["step-00000001", "step-00000003"]


def test_a_newer_format_is_not_passed_over(directory):
    make_newer(directory.path / "step-00000003")
    with pytest.raises(UserError, match=r"step-00000003 cannot be used: .*format 3, from drawbar 9\.0") as caught:
        directory.latest()
    assert "step-00000001, step-00000002" in caught.value.remedy
    directory.write(snapshot(4))
    assert directory.latest().name == "step-00000004"
    directory.rotate(1, set())
    assert names(directory) == ["step-00000003", "step-00000004"]


def test_damaged_ones_are_set_aside_and_not_counted(directory, caplog):
    flip(directory.path / "step-00000003" / "tensors.json")
    (directory.path / "step-00000002" / "manifest.json").unlink()
    found = directory.find_newest_usable()
    assert found.newest.name == "step-00000001"
    directory.set_aside(found.unusable)
    assert names(directory) == ["step-00000001", "step-00000002.unusable", "step-00000003.unusable"]
    assert "step-00000003.unusable: tensors.json has the checksum" in caplog.text
    directory.remove_leftovers()
    directory.write(snapshot(3))
    directory.rotate(1, set())
    assert names(directory) == ["step-00000002.unusable", "step-00000003", "step-00000003.unusable"]
    flip(directory.path / "step-00000003" / "state.json")
    directory.set_aside(directory.find_newest_usable().unusable)
    assert names(directory) == ["step-00000002.unusable", "step-00000003.unusable", "step-00000003.unusable.unusable"]
    assert [path.name for path in directory.find_newest_usable().set_aside] == names(directory)


def test_a_replaced_checkpoint_takes_the_place_of_a_damaged_one(directory):
    """The new one of the same step was damaged before the old one was deleted."""
    (directory.path / "step-00000003").rename(directory.path / "step-00000003.replaced")
    directory.write(snapshot(3, value=30))
    flip(directory.path / "step-00000003" / "tensors.json")
    found = directory.find_newest_usable()
    assert found.newest.name == "step-00000003.replaced"
    directory.set_aside(found.unusable)
    directory.remove_leftovers()
    assert read_snapshot(directory.latest()).state == {"value": 3.0}
    assert names(directory)[-2:] == ["step-00000003", "step-00000003.unusable"]


def test_rotation_never_deletes_what_is_protected(directory):
    flip(directory.path / "step-00000003" / "tensors.json")
    directory.rotate(1, {2})
    assert directory.latest().name == "step-00000002"


def test_standing(directory, fail):
    assert "step-00000003, is intact" in directory.describe_newest()
    fail(directory.path, errno.EIO)
    assert "untouched, but cannot read" in directory.describe_newest()
    assert "no complete checkpoint yet" in CheckpointDirectory(directory.path / "none").describe_newest()


def test_an_unreadable_best_file_is_an_error(directory, fail):
    directory.set_best(2, "loss", 0.5)
    fail(directory.path / "best.json", errno.EIO)
    with pytest.raises(UserError, match=r"cannot read .*best\.json: Input/output error"):
        directory.best()


def test_best_is_on_the_disk_before_it_has_its_name(directory, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    directory.set_best(2, "loss", 0.5)
    assert synced == ["best.json.tmp", "checkpoints"]
    assert json.loads((directory.path / "best.json").read_text())["step"] == 2


def test_what_is_wrong_for_one_rank_is_wrong_for_all(directory):
    """Here the other rank has found damage, or cannot read the disk."""
    newest = directory.path / "step-00000003"
    first = file_entry(newest / "manifest.json").sha256, True
    with read_on_all_ranks(newest, SecondRank(first, None)) as snapshot:
        assert snapshot.step == 3
    for failure in (
        Damaged("optimizer-00000.safetensors is missing"),
        UserError("cannot read", remedy="mend the disk"),
    ):
        with (
            pytest.raises(type(failure), match=str(failure).splitlines()[0]),
            read_on_all_ranks(newest, SecondRank(first, failure)),
        ):
            pass
