"""Damage, rotation, the best checkpoint and leftovers, on real folders."""

import errno
import json
import logging
import os
import shutil
from itertools import product

import pytest
import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Damaged, Snapshot
from drawbar.checkpoint.read import read_snapshot, read_state
from drawbar.errors import ExitCode, UserError

PARTS = ["model-00000.safetensors", "optimizer-00000.safetensors"]
"""What is verified when it is read, and not before."""
SMALL_FILES = [*(f"{name}.sums" for name in PARTS), "tensors.json", "rng.safetensors", "state.json", "manifest.json"]
FILES = [*PARTS, *SMALL_FILES]


def snapshot(step, value=None):
    value = float(step if value is None else value)
    return Snapshot(
        step=step,
        model={"w": torch.full((50,), value)},
        optimizer={"m": torch.full((50,), value)},
        rng={"rank-0000/cpu": torch.arange(16, dtype=torch.uint8)},
        state={"value": value},
    )


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        directory.write(snapshot(step))
    return directory


def names(directory):
    return sorted(entry.name for entry in directory.path.iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_nothing_is_changed_in_a_directory_that_is_lost(directory):
    def lose(after):
        calls = iter([None] * after)

        def check():
            if next(calls, "lost") == "lost":
                raise UserError("it is lost", remedy="")

        directory.check_owner = check

    changes = [
        (lambda: directory.write(snapshot(4)), 2),  # before it is written, and before it has its name
        (lambda: directory.update_state(3, {"value": 0.0}), 2),
        (lambda: directory.begin_write("step-00000004"), 1),
        (lambda: directory.set_best(2, "loss", 0.5), 1),
        (lambda: directory.rotate(1, set()), 1),
    ]
    for change, checks in changes:
        for passed in range(checks):
            lose(passed)
            with pytest.raises(UserError, match="it is lost"):
                change()
            assert (directory.steps(), directory.best_record()) == ([1, 2, 3], None)
            assert read_state(directory.path / "step-00000003")["value"] == 3.0


def test_an_empty_or_missing_folder_has_no_checkpoints(tmp_path):
    missing = CheckpointDirectory(tmp_path / "none")
    assert (missing.steps(), missing.latest(), missing.best()) == ([], None, None)
    missing.remove_leftovers()
    missing.rotate(1, set())
    with pytest.raises(UserError, match="there is no checkpoint 'latest': this folder has no complete one yet") as none:
        missing.resolve("latest")
    assert str(none.value.remedy).startswith("train until the run has written one")


def test_a_run_beside_is_not_a_checkpoint(directory):
    run = directory.path.parent
    with pytest.raises(UserError, match=f"{run.name} is a run, and not one of its checkpoints") as named:
        CheckpointDirectory(run.with_name("new") / "checkpoints").resolve(run.name)
    assert "step-00000003" in str(named.value.remedy)


def test_steps_and_latest(directory):
    assert directory.steps() == [1, 2, 3]
    assert directory.latest() == directory.path / "step-00000003"
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]
    assert sorted(os.listdir(directory.latest())) == sorted(FILES)


def test_steps_sort_as_numbers(directory):
    directory.write(snapshot(123456789))
    assert directory.steps()[-1] == 123456789
    assert directory.latest().name == "step-123456789"


@pytest.mark.parametrize(
    ("name", "harm"),
    [*product(FILES, ("truncate", "delete", "empty")), *((name, "flip") for name in SMALL_FILES)],
)
def test_a_damaged_checkpoint_is_named_and_skipped(directory, caplog, name, harm):
    path = directory.path / "step-00000003" / name
    match harm:
        case "flip":
            flip(path)
        case "truncate":
            path.write_bytes(path.read_bytes()[:-1])
        case "delete":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="drawbar"):
        assert directory.latest() == directory.path / "step-00000002"
    assert "step-00000003" in caplog.text
    assert name in caplog.text
    with pytest.raises(UserError) as caught:
        read_snapshot(path.parent)
    message = str(caught.value)
    assert name in message
    assert "step-00000001, step-00000002" in message
    assert "step-00000003," not in caught.value.remedy


@pytest.mark.parametrize("name", PARTS)
def test_damage_in_a_part_is_found_when_it_is_read(directory, name):
    flip(directory.latest() / name)
    found = read_snapshot(directory.latest())
    with pytest.raises(Damaged, match=f"{name} is not as it was written: bytes 0 to"):
        _ = {**found.model, **found.optimizer}


def test_steps_leaves_out_what_is_incomplete(directory):
    (directory.path / "step-00000003" / "rng.safetensors").unlink()
    (directory.path / "step-00000002" / "state.json").write_bytes(b"{}")
    (directory.path / "step-00000009").mkdir()
    (directory.path / "notes").mkdir()
    assert directory.steps() == [1]


def test_the_message_says_what_differs(directory):
    path = directory.path / "step-00000003" / "tensors.json"
    size = path.stat().st_size
    flip(path)
    with pytest.raises(UserError, match=r"tensors\.json has the checksum [0-9a-f]{16}… instead of"):
        read_snapshot(path.parent)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=rf"tensors\.json has {size - 7} bytes instead of {size}"):
        read_snapshot(path.parent)
    with pytest.raises(UserError, match="there is no checkpoint"):
        read_snapshot(directory.path / "step-00000099")
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        read_snapshot(directory.path)


def test_read_state_checks_its_own_file_only(directory):
    path = directory.path / "step-00000003"
    flip(path / "model-00000.safetensors")
    assert read_state(path) == {"value": 3.0}
    flip(path / "state.json")
    with pytest.raises(UserError, match=r"state\.json has the checksum"):
        read_state(path)


def test_the_only_checkpoint_damaged(directory):
    directory.rotate(1, set())
    flip(directory.path / "step-00000003" / "tensors.json")
    assert directory.latest() is None
    with pytest.raises(UserError, match="no other complete checkpoint"):
        read_snapshot(directory.path / "step-00000003")


def test_a_step_saved_again_replaces_the_first(directory):
    directory.write(snapshot(3, value=30))
    assert read_snapshot(directory.latest()).state == {"value": 30.0}
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_damaged_step_saved_again_is_whole_again(directory):
    (directory.path / "step-00000003" / "manifest.json").unlink()
    directory.write(snapshot(3))
    assert read_snapshot(directory.latest()).step == 3


def test_what_a_killed_process_leaves_is_ignored_then_removed(directory, tmp_path):
    shutil.copytree(directory.path / "step-00000003", directory.path / "step-00000004.tmp")
    shutil.copytree(directory.path / "step-00000003", directory.path / "step-00000005.deleting")
    shutil.copytree(directory.path / "step-00000003", directory.path / "step-00000003.replaced")
    (directory.path / "best.json.tmp").write_text("{")
    (directory.path / "mine.tmp").write_text("a user's file")
    assert directory.steps() == [1, 2, 3]
    assert directory.latest().name == "step-00000003"
    directory.remove_leftovers()
    assert names(directory) == ["mine.tmp", "step-00000001", "step-00000002", "step-00000003"]


def test_a_replacement_cut_short_loses_nothing(directory):
    (directory.path / "step-00000003").rename(directory.path / "step-00000003.replaced")
    shutil.copytree(directory.path / "step-00000002", directory.path / "step-00000003.tmp")
    assert directory.steps() == [1, 2, 3]
    assert read_snapshot(directory.latest()).step == 3
    directory.remove_leftovers()
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]
    assert read_snapshot(directory.latest()).step == 3


def test_rotation_keeps_the_newest_and_the_protected(directory):
    directory.write(snapshot(4))
    directory.rotate(5, set())
    assert directory.steps() == [1, 2, 3, 4]
    directory.rotate(2, {1})
    assert directory.steps() == [1, 3, 4]
    assert names(directory) == ["step-00000001", "step-00000003", "step-00000004"]
    directory.rotate(1, set())
    assert directory.steps() == [4]


def test_best(directory):
    assert directory.best() is None
    directory.set_best(2, "loss", 0.1 + 0.2)
    record = directory.best_record()
    assert (record.step, record.metric, record.score) == (2, "loss", 0.1 + 0.2)
    directory.rotate(1, {record.step})
    assert directory.best() == directory.path / "step-00000002"
    directory.set_best(3, "loss", float("-inf"))
    assert directory.best_record().score == float("-inf")
    assert names(directory) == ["best.json", "step-00000002", "step-00000003"]


def test_best_points_at_complete_checkpoints_only(directory, caplog):
    with pytest.raises(ValueError, match="step 9"):
        directory.set_best(9, "loss", 1.0)
    directory.set_best(2, "loss", 1.0)
    flip(directory.path / "step-00000002" / "tensors.json")
    with pytest.raises(UserError, match=r"step-00000002 cannot be used: tensors\.json has the checksum") as caught:
        directory.best()
    assert "step-00000001, step-00000003" in caught.value.remedy
    directory.rotate(1, set())
    with caplog.at_level(logging.WARNING, logger="drawbar"):
        assert directory.best() is None  # as nothing protected it
    assert "names step 2, whose checkpoint is gone" in caplog.text
    with pytest.raises(UserError, match="there is no checkpoint 'best'"):
        directory.resolve("best")


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1.5, "metric": "loss", "score": 1}', "nonsense"])
def test_where_the_best_file_is_damaged_no_other_checkpoint_is_taken_for_the_best(directory, text):
    (directory.path / "best.json").write_text(text)
    with pytest.raises(UserError, match=r"best\.json is damaged") as caught:
        directory.best()
    assert "latest, or one of these steps: 1, 2, 3" in caught.value.remedy
    assert directory.kept_as_best() == {1, 2, 3}
    directory.set_best(2, "loss", 0.5)
    assert directory.best().name == "step-00000002"


def test_resolve(directory):
    directory.set_best(1, "loss", 1.0)
    path = directory.path
    assert directory.resolve("latest") == path / "step-00000003"
    assert directory.resolve("best") == path / "step-00000001"
    assert directory.resolve("2") == path / "step-00000002"
    assert directory.resolve("step-00000002") == path / "step-00000002"
    assert directory.resolve(str(path / "step-00000002")) == path / "step-00000002"


@pytest.mark.parametrize("which", ["latst", "7", "/no/such/folder", "²"])
def test_resolve_names_what_there_is(directory, which):
    with pytest.raises(UserError, match=which) as caught:
        directory.resolve(which)
    assert "1, 2, 3" in caught.value.remedy
    assert caught.value.exit_code == ExitCode.WRONG_REQUEST


def test_a_run_is_none_of_its_checkpoints(directory, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="is a run, and not one of its checkpoints") as caught:
        directory.resolve(str(run))
    assert "no complete one" in caught.value.remedy
    directory.path.rename(run / "checkpoints")
    with pytest.raises(UserError, match="is a run") as caught:
        directory.resolve(str(run))
    assert str(run / "checkpoints" / "step-00000003") in caught.value.remedy


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="step-00000001 could not be written") as caught:
        CheckpointDirectory(tmp_path / "file" / "checkpoints").write(snapshot(1))
    assert caught.value.exit_code == ExitCode.FAILED
    assert caught.value.__cause__.errno == errno.ENOTDIR


def test_the_manifest_lists_every_other_file(directory):
    path = directory.latest()
    fields = json.loads((path / "manifest.json").read_text())
    listed = fields["parts"] | {name: entry["size"] for name, entry in fields["files"].items()}
    assert sorted([*listed, "manifest.json"]) == sorted(os.listdir(path))
    assert {name: (path / name).stat().st_size for name in listed} == listed


@pytest.mark.parametrize("links", [True, False])
def test_an_amended_checkpoint_has_its_tensors_and_a_new_state(directory, links, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", fail)
    folder = directory.path / "step-00000003"
    before = {name: (folder / name).stat().st_ino for name in FILES}
    directory.update_state(3, {"score": 0.5})
    assert directory.latest() == folder  # intact, by its checksums
    assert read_state(folder) == {"value": 3.0, "score": 0.5}
    assert read_snapshot(folder).model["w"].tolist() == [3.0] * 50
    kept = {name for name in FILES if (folder / name).stat().st_ino == before[name]}
    assert kept == ({*FILES} - {"state.json", "manifest.json"} if links else set())
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]
