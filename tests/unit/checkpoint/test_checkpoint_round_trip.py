"""A snapshot written and read again, in this thread and in the background."""

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from drawbar.checkpoint import AsyncWriter, CheckpointDirectory, Snapshot, read, read_state, snapshot_to_host
from drawbar.checkpoint.save import sync


def snapshot_of(model, step=1, **fields):
    return Snapshot(step=step, model=model, **({"optimizer": {}, "rng": {}, "state": {}} | fields))


def written(path, snapshot):
    directory = CheckpointDirectory(path)
    directory.write(snapshot_to_host(snapshot))
    return directory.resolve(str(snapshot.step))


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
    found = read(path)
    assert path.name == "step-00001000"
    assert found.step == 1000
    assert_same(found.model, snapshot.model)
    assert_same(found.optimizer, snapshot.optimizer)
    assert_same(found.rng, snapshot.rng)
    assert found.state == read_state(path) == snapshot.state
    assert found.model["empty"] is not found.model["empty too"]


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
    assert_same(read(written(tmp_path, snapshot_of(model))).model, model)


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.nn.Parameter(torch.randn(100, 8))
    model = {"embed.weight": weight, "norm": torch.ones(8), "head.weight": weight, "head.copy": weight.detach()}
    path = written(tmp_path, snapshot_of(model))
    found = read(path).model
    assert set(load_file(path / "model.safetensors")) == {"embed.weight", "norm"}
    assert_same(found, model)
    assert found["head.weight"] is found["embed.weight"]
    assert found["head.copy"] is found["embed.weight"]
    assert found["norm"] is not found["embed.weight"]


def test_a_host_copy_keeps_ties_and_shares_nothing_with_the_run():
    weight = torch.zeros(4)
    live = snapshot_of({"a": weight, "b": weight}, state={"nested": {"losses": [1.0]}})
    host = snapshot_to_host(live)
    weight.add_(1)
    live.state["nested"]["losses"].append(2.0)
    assert host.model["a"].sum() == 0
    assert host.model["a"] is host.model["b"]
    assert host.state == {"nested": {"losses": [1.0]}}


def test_overlapping_views_keep_their_values(tmp_path):
    base = torch.arange(12.0)
    model = {"base": base, "grid": base.view(3, 4), "turned": base.view(3, 4).T, "part": base[2:5]}
    assert_same(read(written(tmp_path, snapshot_of(model))).model, model)


def test_what_is_read_does_not_hang_on_the_file(tmp_path):
    path = written(tmp_path, snapshot_of({"w": torch.ones(1000)}))
    found = read(path).model["w"]
    with (path / "model.safetensors").open("r+b") as file:
        file.write(bytes((path / "model.safetensors").stat().st_size))
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
    assert sorted(synced[:4]) == [f"{tmp}/{name}" for name in sorted(os.listdir(path)) if name != "manifest.json"]
    assert synced[4:] == [f"{tmp}/manifest.json", tmp, "."]


def test_in_place_changes_after_submit_do_not_reach_the_file(tmp_path):
    directory, writer, go = CheckpointDirectory(tmp_path), AsyncWriter(), threading.Event()
    weight = torch.zeros(1000)
    host = snapshot_to_host(snapshot_of({"w": weight}, rng={"r": weight}, optimizer={"m": weight}))

    def write():
        go.wait()
        directory.write(host)

    writer.submit(write)
    weight.fill_(1)
    go.set()
    writer.close()
    found = read(directory.resolve("1"))
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


def test_the_error_of_a_write_is_raised_once_where_it_is_waited_for():
    def fail():
        raise OSError("disk gone")

    writer = AsyncWriter()
    writer.submit(fail)
    with pytest.raises(OSError, match="disk gone"):
        writer.wait()
    writer.wait()
    writer.submit(fail)
    with pytest.raises(OSError, match="disk gone"):
        writer.submit(lambda: None)
    writer.submit(fail)
    with pytest.raises(OSError, match="disk gone"):
        writer.close()
    writer.close()
