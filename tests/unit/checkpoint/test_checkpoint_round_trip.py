"""A snapshot written and read again, in this thread and in the background."""

import os
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.read import read_snapshot, read_state
from drawbar.runtime.safetensors_reader import host_copies, tied_names
from drawbar.train.saver import AsyncWriter
from drawbar.util.atomic_files import sync
from harness import wait_until


def snapshot_of(model, step=1, **fields):
    return Snapshot(step=step, model=model, **({"optimizer": {}, "rng": {}, "state": {}} | fields))


def on_host(live):
    copies = [host_copies(tensors) for tensors in (live.model, live.optimizer, live.rng)]
    return Snapshot(live.step, *copies, live.state)


def written(path, snapshot):
    directory = CheckpointDirectory(path)
    directory.write(on_host(snapshot))
    return directory.resolve(str(snapshot.step))


def test_equal_states_make_equal_files(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    state = {'ä \x07 "b"': tied, "a": tied, "c": torch.ones(2, dtype=torch.bfloat16)}
    files = [written(tmp_path / str(attempt), snapshot_of(state)) / "model-00000.safetensors" for attempt in range(10)]
    assert len({path.read_bytes() for path in files}) == 1
    assert_same(dict(read_snapshot(files[0].parent).model), state)


def test_empty_tensors_are_not_tied():
    assert tied_names({"a": torch.empty(0), "b": torch.empty(0)}) == {}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        # compared as bytes: NaN equals NaN, and -0.0 is not 0.0
        assert (
            found[name]
            .contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().flatten().view(torch.uint8))
        ), name


def test_everything_comes_back(tmp_path):
    snapshot = Snapshot(
        step=1000,
        model={
            "layer.weight": torch.nn.Parameter(torch.randn(3, 4)),
            "layer.bias": torch.randn(3, dtype=torch.bfloat16),
            "half": torch.randn(5).half(),
            "position": torch.arange(7),
            "mask": torch.tensor([True, False]),
            "scale": torch.tensor(0.1),
            "empty": torch.empty(0, 4),
            "empty too": torch.empty(0, 4),
            "transposed": torch.randn(3, 5).T,
            "strange": torch.tensor([float("nan"), -0.0, float("inf")]),
            "name with / and ünïcode": torch.ones(1),
        },
        optimizer={"layer.weight/exp_avg": torch.randn(3, 4), "layer.weight/step": torch.tensor(12.0)},
        rng={"rank-0000/cpu": torch.get_rng_state(), "rank-0001/cpu": torch.get_rng_state()},
        state={"lr": 0.1 + 0.2, "data": {"epoch": 1, "samples": 2**53 + 1}, "best": None},
    )
    path = written(tmp_path, snapshot)
    found = read_snapshot(path)
    assert path.name == "step-00001000"
    assert found.step == 1000
    assert_same(found.model, snapshot.model)
    assert_same(found.optimizer, snapshot.optimizer)
    assert_same(found.rng, snapshot.rng)
    assert found.state == read_state(path) == snapshot.state


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]),
        ),
        max_size=5,
    )
)
def test_any_shapes_and_types_come_back(tmp_path, kinds):
    model = {str(i): (torch.randn(shape) * 9).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    assert_same(read_snapshot(written(tmp_path, snapshot_of(model))).model, model)


def test_tied_tensors_are_stored_once_and_read_under_each_name(tmp_path):
    weight = torch.nn.Parameter(torch.randn(100, 8))
    model = {"embed.weight": weight, "norm": torch.ones(8), "head.weight": weight, "head.copy": weight.detach()}
    path = written(tmp_path, snapshot_of(model))
    found = read_snapshot(path).model
    assert set(load_file(path / "model-00000.safetensors")) == {"embed.weight", "norm"}
    assert_same(found, model)


def test_a_checkpoint_that_is_open_may_be_deleted(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        directory.write(snapshot_of({"w": torch.full((3,), step)}, step))
    found = read_snapshot(directory.resolve("1"))
    directory.rotate(keep=1, protect=set())
    assert directory.steps() == [2]
    assert found.model["w"].tolist() == [1, 1, 1]


def test_a_host_copy_keeps_ties_and_shares_nothing_with_the_run():
    weight = torch.zeros(4)
    host = host_copies({"a": weight, "b": weight})
    weight.add_(1)
    assert host["a"].sum() == 0
    assert host["a"] is host["b"]


def test_a_rank_that_only_takes_part_keeps_nothing():
    asked = []
    assert (
        host_copies({"a": torch.ones(1), "b": torch.ones(1)}, keeps=False, convert=lambda n, t: asked.append(n)) == {}
    )
    assert asked == ["a", "b"]


def test_overlapping_views_keep_their_values(tmp_path):
    base = torch.arange(12.0)
    model = {"base": base, "grid": base.view(3, 4), "turned": base.view(3, 4).T, "part": base[2:5]}
    assert_same(read_snapshot(written(tmp_path, snapshot_of(model))).model, model)


def test_what_is_read_does_not_hang_on_the_file(tmp_path):
    path = written(tmp_path, snapshot_of({"w": torch.ones(1000)}))
    found = read_snapshot(path).model["w"]
    with (path / "model-00000.safetensors").open("r+b") as file:
        file.write(bytes((path / "model-00000.safetensors").stat().st_size))
    assert found.sum() == 1000


def test_files_get_the_permissions_of_the_umask(tmp_path):
    path = written(tmp_path, snapshot_of({"w": torch.ones(1)}))
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert {file.stat().st_mode for file in path.iterdir()} == {ordinary.stat().st_mode}


def test_sync_accepts_a_folder_that_has_no_fsync():
    sync(Path("/proc"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc to ask which file a descriptor is")
def test_everything_is_on_the_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    path = written(tmp_path, snapshot_of({"w": torch.ones(1)}))
    tmp = path.name + ".tmp"
    assert sorted(synced[:5]) == [f"{tmp}/{name}" for name in sorted(os.listdir(path)) if name != "manifest.json"]
    assert synced[5:] == [f"{tmp}/manifest.json", tmp, "."]


def test_in_place_changes_after_submit_do_not_reach_the_file(tmp_path):
    directory, writer, go = CheckpointDirectory(tmp_path), AsyncWriter(), threading.Event()
    weight = torch.zeros(1000)
    host = on_host(snapshot_of({"w": weight}, rng={"r": weight}, optimizer={"m": weight}))

    def write():
        go.wait()
        directory.write(host)

    writer.submit(write)
    weight.fill_(1)
    go.set()
    writer.close()
    found = read_snapshot(directory.resolve("1"))
    assert [tensors.sum().item() for tensors in (found.model["w"], found.rng["r"], found.optimizer["m"])] == [0, 0, 0]


def test_one_write_at_a_time():
    writer, first, order = AsyncWriter(), threading.Event(), []

    def slow():
        first.wait()
        order.append("first")

    writer.submit(slow)
    threading.Timer(0.05, first.set).start()
    writer.submit(lambda: order.append("second"))
    assert order[0] == "first"
    writer.close()
    assert order == ["first", "second"]


def failing(text):
    def fail():
        raise OSError(text)

    return fail


def test_the_first_write_that_failed_tells_why():
    writer, written = AsyncWriter(), []
    writer.submit(failing("disk gone"))
    writer.submit(lambda: written.append("the next one"))
    writer.submit(failing("still gone"))
    writer.wait()
    assert written == ["the next one"]
    assert str(writer.pop_error()) == "disk gone"
    assert writer.pop_error() is None
    writer.submit(failing("gone again"))
    writer.close()
    assert str(writer.pop_error()) == "gone again"


def test_a_write_that_failed_leaves_its_room_to_the_next(tmp_path):
    def start():
        snapshot = snapshot_of({"w": torch.zeros(10)}, state={"seen": {1, 2}})
        writer.submit(partial(CheckpointDirectory(tmp_path).write, snapshot))
        return weakref.ref(snapshot)

    writer = AsyncWriter()
    snapshot = start()
    writer.wait()
    wait_until(lambda: snapshot() is None, "the snapshot to go", seconds=10)
    writer.close()
    assert "seen is a set" in str(writer.pop_error())


def test_a_write_that_follows_is_not_waited_for():
    writer, first, order = AsyncWriter(), threading.Event(), []
    writer.submit(lambda: order.append(first.wait(60)))
    writer.submit_after_success(lambda: order.append("second"))
    assert order == []
    first.set()
    writer.wait()
    assert order == [True, "second"]


def test_nothing_follows_a_write_that_failed():
    writer, order = AsyncWriter(), []
    writer.submit(failing("disk gone"))
    writer.submit_after_success(lambda: order.append("second"))
    writer.close()
    assert str(writer.pop_error()) == "disk gone"
    assert order == []
