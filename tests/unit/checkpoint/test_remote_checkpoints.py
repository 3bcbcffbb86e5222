"""Copies of checkpoints in an object store: complete or absent at every request, and every damage named."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drawbar.checkpoint import remote_owner
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Damaged, Manifest, Snapshot, Unusable
from drawbar.checkpoint.object_store import ObjectStore, ObjectStoreError
from drawbar.checkpoint.read import read_snapshot, read_state
from drawbar.checkpoint.remote_checkpoints import RemoteCheckpoints
from drawbar.checkpoint.remote_owner import RemoteOwner, Superseded, wait_until_owner_ended
from drawbar.errors import UserError
from exhaustive import some
from object_server import BUCKET, ObjectServer
from parts_writing import state_of, write_parts


@pytest.fixture
def root(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a new folder in the bucket, for this test."""
    server.use(monkeypatch)
    return f"runs/{request.node.name}"


@pytest.fixture
def store(root: str) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}/{root}")


def snapshot(step: int, generation: int = 0) -> Snapshot:
    values = torch.full((3000,), float(step * 100 + generation))
    state = {"generation": generation}
    return Snapshot(step, {"w": values}, {"w/m": values + 1}, {"seed-0000/torch": torch.zeros(16)}, state)


def nobody_else() -> None:
    """No other process writes to the store."""


def fetched(store: ObjectStore, folder: Path) -> dict[int, int]:
    """What another machine gets: the generation of each step that the store has, every byte verified."""
    remote, directory = RemoteCheckpoints(store), CheckpointDirectory(folder / "checkpoints")
    for step, objects in remote.complete().items():
        remote.download(step, objects, directory)
    found = {step: read_snapshot(folder / "checkpoints" / f"step-{step:08d}") for step in directory.steps()}
    for step, read_back in found.items():
        assert read_back.model["w"][0] == step * 100
    return {step: read_back.state["generation"] for step, read_back in found.items()}


def last_before_the_fault(actions: Iterator[dict[int, set[int]]]) -> dict[int, set[int]]:
    reached: dict[int, set[int]] = {}
    try:
        for after in actions:
            reached = after
    except ObjectStoreError:
        return reached
    raise AssertionError("the fault should have ended it")


@pytest.mark.exhaustive
def test_complete_or_absent_after_every_request(
    server: ObjectServer, store: ObjectStore, root: str, tmp_path: Path
) -> None:
    """A process that is killed sends no further request. So: copy step 2, change its state (it is evaluated) and copy
    it again, then copy step 3, and only one may stay. From each request on, nothing more is carried out; then the next
    process does what is left."""
    directory = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    folders = {step: directory.path / f"step-{step:08d}" for step in (2, 3)}

    def scenario(remote: RemoteCheckpoints) -> Iterator[dict[int, set[int]]]:
        """After each action: the steps that the store must have from then on, with the generations they may have."""
        remote.upload(folders[2], nobody_else)
        yield {2: {0, 1}}
        directory.update_state(2, {"generation": 1})
        remote.upload(folders[2], nobody_else)
        yield {2: {1}}
        remote.upload(folders[3], nobody_else)
        yield {3: {0}}
        remote.rotate(1, set(), nobody_else)

    def start_anew() -> None:
        store.delete(store.sizes())
        for step in folders:
            directory.write(snapshot(step))

    start_anew()
    with server.failing(lambda number, method, path: None):
        list(scenario(RemoteCheckpoints(store)))
        requests = server.count
    assert requests > 15
    for at in range(1, requests + 1):
        start_anew()
        with server.failing(lambda number, method, path, at=at: 503 if number >= at else None):
            wanted = last_before_the_fault(scenario(RemoteCheckpoints(store)))
        found = fetched(store, tmp_path / f"after-{at}")
        missing = {step for step, generations in wanted.items() if found.get(step) not in generations}
        assert not missing, f"request {at} of {requests}: {found} instead of {wanted}"

        remote = RemoteCheckpoints(store)
        directory.update_state(2, {"generation": 1})
        for folder in folders.values():
            remote.upload(folder, nobody_else)
        remote.rotate(1, set(), nobody_else)
        assert fetched(store, tmp_path / f"end-{at}") == {3: 0}
        names = set(store.sizes("checkpoints"))
        assert names == {f"{folders[3].name}/{path.name}" for path in folders[3].iterdir()}
    print(f"{requests} requests, each of them the last one of a process")


@pytest.mark.parametrize("kind", some(["whole", "parts"], 1))
def test_damage_is_named(kind: str, server: ObjectServer, store: ObjectStore, root: str, tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "run")
    if kind == "whole":
        directory.write(snapshot(1))
    else:
        write_parts(directory, 1, *state_of(random.Random(1)), ranks=2, seed=1)
    remote, folder = RemoteCheckpoints(store), directory.path / "step-00000001"
    text = remote.upload(folder, nobody_else)
    target = CheckpointDirectory(tmp_path / "fetched")
    remote.download(1, remote.complete()[1], target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (target.path / folder.name).iterdir()
    }

    for name in Manifest.from_json(text).sizes():
        key = f"{root}/checkpoints/step-00000001/{name}"
        content = server.read(key)
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 16
        for damaged in (content[:-1], bytes(flipped), None):
            if damaged is None:
                server.s3.delete_object(Bucket=BUCKET, Key=key)
            else:
                server.write(key, damaged)
            target = CheckpointDirectory(tmp_path / "damaged")
            with pytest.raises(Unusable, match=name.replace(".", r"\.").removesuffix(r"\.sums")):
                remote.download(1, remote.complete()[1], target)
            assert list(target.path.iterdir() if target.path.exists() else []) == []
        server.write(key, content)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", "manifest.json", ""])
def test_a_hostile_manifest(name: str, server: ObjectServer, store: ObjectStore, root: str, tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "run")
    directory.write(snapshot(1))
    remote = RemoteCheckpoints(store)
    manifest = Manifest.from_json(remote.upload(directory.path / "step-00000001", nobody_else))
    server.write(f"{root}/checkpoints/outside", b"x")
    hostile = manifest.model_copy(update={"files": {**manifest.files, name: manifest.files["state.json"]}})
    server.write(f"{root}/checkpoints/step-00000001/manifest.json", hostile.to_json())
    with pytest.raises(Damaged, match="cannot be a file of a checkpoint"):
        remote.download(1, remote.complete()[1], CheckpointDirectory(tmp_path / "fetched" / "checkpoints"))
    assert not (tmp_path / "fetched").exists()


def test_absurd_sizes_are_refused_before_anything_is_fetched(
    server: ObjectServer, store: ObjectStore, root: str, tmp_path: Path
) -> None:
    directory = CheckpointDirectory(tmp_path / "run")
    directory.write(snapshot(1))
    remote = RemoteCheckpoints(store)
    manifest = Manifest.from_json(remote.upload(directory.path / "step-00000001", nobody_else))
    huge = manifest.files["tensors.json"].model_copy(update={"size": 2**62})
    hostile = manifest.model_copy(update={"files": {**manifest.files, "tensors.json": huge}})
    server.write(f"{root}/checkpoints/step-00000001/manifest.json", hostile.to_json())
    target = CheckpointDirectory(tmp_path / "fetched")
    with pytest.raises(Damaged, match=r"tensors\.json has \d+ bytes instead of 4611686018427387904"):
        remote.download(1, remote.complete()[1], target)
    with pytest.raises(UserError, match="not enough disk space"):
        remote.download(1, {**remote.complete()[1], "tensors.json": 2**62}, target)
    assert not target.path.exists()


def test_a_damaged_checkpoint_of_the_disk_is_set_aside(store: ObjectStore, tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "run")
    directory.write(snapshot(1))
    remote = RemoteCheckpoints(store)
    remote.upload(directory.path / "step-00000001", nobody_else)
    (directory.path / "step-00000001" / "model-00000.safetensors").write_bytes(b"")
    remote.download(1, remote.complete()[1], directory)
    assert read_state(directory.path / "step-00000001") == {"generation": 0}
    assert sorted(path.name for path in directory.path.iterdir()) == ["step-00000001", "step-00000001.unusable"]


def test_one_owner(store: ObjectStore) -> None:
    store.write("owner/999999999999.json", b"{}")  # not by drawbar
    assert wait_until_owner_ended(store, ended=None) == 0
    first = RemoteOwner.claim(store, before=0)
    first.check()
    with pytest.raises(Superseded, match="process"):  # two have found the folder free: one of them gets it
        RemoteOwner.claim(store, before=0)
    second = RemoteOwner.claim(store, before=wait_until_owner_ended(store, ended=first.number))
    with pytest.raises(Superseded):
        first.heartbeat()
    second.release()
    assert wait_until_owner_ended(store, ended=None) == second.number
    assert set(store.sizes("owner")) == {f"{second.number:08d}.json", "999999999999.json"}


def test_a_silent_owner_is_waited_for_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost machine's process: a start waits when it looks for its checkpoint, and not again when it becomes the
    owner, unless the process has sent a heartbeat since."""
    monkeypatch.setattr(remote_owner, "_OWNER_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(remote_owner, "_machine", lambda: None)
    lost = RemoteOwner.claim(store, before=0)
    waits = []
    with caplog.at_level("INFO", logger="drawbar"):
        for _ in range(2):
            assert wait_until_owner_ended(store, ended=None) == lost.number
            waits.append(caplog.text.count("to see whether it still does"))
        lost.heartbeat()
        assert wait_until_owner_ended(store, ended=None) == lost.number
        waits.append(caplog.text.count("to see whether it still does"))
    assert waits == [1, 1, 2]


def test_errors_that_pass_and_errors_that_stay(
    server: ObjectServer,
    store: ObjectStore,
    root: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [500, 503]
    with caplog.at_level("INFO", logger="drawbar"), server.failing(lambda *_: left.pop() if left else None):
        store.write("passing", b"x")
    assert server.read(f"{root}/passing") == b"x"
    assert f"writing s3://{BUCKET}/{root}/passing" in caplog.text
    with (
        server.failing(lambda *_: 500),
        pytest.raises(ObjectStoreError, match=f"writing s3://{BUCKET}/{root}/staying failed"),
    ):
        store.write("staying", b"x")
    with pytest.raises(ObjectStoreError, match=r"bucket does not exist|NoSuchBucket"):
        ObjectStore("s3://no-such-bucket/runs").write("x", b"x")
    with pytest.raises(UserError, match="there is no kind of store nonsense://"):
        ObjectStore("nonsense://bucket/runs")


@pytest.mark.exhaustive
def test_a_multi_part_upload(server: ObjectServer, store: ObjectStore, root: str, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(bytes(range(256)) * (2**20 // 256) * 101)  # s3fs takes two pieces at most for one request
    with server.failing(lambda *_: None):
        store.put("large", source)
        assert server.count > 3
    store.get("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
