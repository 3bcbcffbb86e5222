"""Checkpoints that somebody made up, with checksums that fit: refused, without a look outside the folder, without an
allocation that only a shape asks for, and without running anything."""

import hashlib
import json
import os
import random
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drawbar.checkpoint.block_checksums import BlockHasher
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, Unusable, _checksum
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.read import read_snapshot, read_state
from drawbar.checkpoint.write import write_part
from drawbar.errors import UserError
from exhaustive import some
from harness import run_ranks
from parts_writing import begin_parts, commit_parts, shard, write_parts

HOSTILE = [-1, 0, 1, 7, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, float("nan"), True, None, "", "x", "F32", "BOOL"]
HOSTILE += ["../outside.safetensors", "/etc/passwd", "model-00000.safetensors/../../outside", "a\0b"]
HOSTILE += ["model-00000.safetensors", "optimizer-00001.safetensors", "rng.safetensors"]
HOSTILE += [[], {}, [[]], [0], [2**40, 2**40], [-5, 3], ["x"], {"name": 1}, [{}], [0] * 70]
MUTATIONS = 400
EXECUTING = {"compile", "exec", "import", "ctypes.dlopen", "pickle.find_class", "marshal.loads", "os.exec", "os.system"}
EXECUTING |= {"os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect"}
"""Events by which Python tells that something is executed, or loaded to be executed."""
MEMORY = 512 * 2**20
"""Bytes that looking at such a checkpoint of a few kB may take, at most."""


def state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = {"w": torch.arange(24.0).view(6, 4), "b": torch.arange(5).to(torch.bfloat16), "n": torch.tensor(7)}
    return model, {"w/exp_avg": torch.ones(6, 4), "w/step": torch.tensor(3.0)}


def in_parts(path: Path) -> Path:
    return write_parts(CheckpointDirectory(path), 1, *state(), ranks=2, seed=4, aliases={"tied": "w"})


def whole(path: Path) -> Path:
    directory = CheckpointDirectory(path)
    model, optimizer = state()
    directory.write(Snapshot(1, model | {"tied": model["w"]}, optimizer, {"seed-0000/torch": torch.zeros(4)}, {"a": 1}))
    return directory.resolve("1")


def forge(folder: Path, change: Any = lambda fields: None) -> None:
    """Make the manifest fit the files as they are now, then change it."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    for name in fields.get("parts", {}):
        content = (folder / name).read_bytes()
        hasher = BlockHasher()
        hasher.update(memoryview(content))
        put(folder / f"{name}.sums", hasher.digests())
        fields["parts"][name] = len(content)
    for name in fields["files"]:
        content = (folder / name).read_bytes()
        fields["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(fields)
    path.write_text(json.dumps(fields | {"sha256": _checksum(fields)}))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def mutate(fields: Any, rng: random.Random) -> str:
    """Replace, remove, double or rename something at random; returns what was done."""
    path = rng.choice(places(fields)[1:] or [()])
    if not path:  # nothing is left of it
        return "nothing"
    owner = fields
    for key in path[:-1]:
        owner = owner[key]
    way = rng.choice(("replace", "replace", "replace", "remove", "double"))
    if way == "remove":
        del owner[path[-1]]
    elif way == "double" and isinstance(owner, list):
        owner.append(owner[path[-1]])
    elif way == "double":
        owner[rng.choice(["../x", "model-00009.safetensors", "w", "shape"])] = owner[path[-1]]
    else:
        owner[path[-1]] = rng.choice(HOSTILE)
    return f"{way} {path}"


def content_of(folder: Path) -> dict[str, bytes]:
    """Everything that can be read of it: by name, the bits."""
    found = read_snapshot(folder)
    return {
        f"{kind}:{name}": bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for kind in ("model", "optimizer", "rng")
        for name, tensor in getattr(found, kind).items()
    }


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        put(folder / name, content)


def put(path: Path, content: bytes) -> None:
    """Write a file if it has another content: a disk may take its time for each that is written anew."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def attack(path: str, target: str) -> dict[str, int]:
    """Mutate one JSON of a checkpoint, hundreds of times; how often it was refused, and read all the same."""
    folder = in_parts(Path(path))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    content_of(folder)
    problems(folder)
    opened: list[str] = []
    executed: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            opened.append(str(arguments[0]))
        elif event in EXECUTING:
            executed.append(f"{event} {arguments}")

    sys.addaudithook(note)
    soft = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
    known = (str(folder.parent), sys.prefix, sys.base_prefix)
    counts = {"refused": 0, "read": 0}
    for seed in range(MUTATIONS):
        restore(folder, files)
        done = mutate_file(folder, target, random.Random(seed))
        opened.clear()
        try:
            content_of(folder)
            problems(folder)
            counts["read"] += 1  # what a forged checkpoint holds is its author's affair
        except (UserError, Unusable):
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}") from error
        outside = [name for name in opened if not os.path.abspath(name).startswith(known)]
        assert not outside, (seed, done, outside)
        assert not executed, (seed, done, executed)
    return counts


def mutate_file(folder: Path, target: str, rng: random.Random) -> list[str]:
    """Change the JSON of a file at some places, so that all checksums fit; returns what was done."""
    done: list[str] = []

    def change(fields: Any) -> None:
        done.extend(mutate(fields, rng) for _ in range(rng.randrange(1, 4)))

    if target == "manifest.json":
        forge(folder, change)
        return done
    if target.endswith(".safetensors"):
        mutate_header(folder / target, change)
    else:
        fields = json.loads((folder / target).read_text())
        change(fields)
        (folder / target).write_text(json.dumps(fields))
    forge(folder)
    return done


def mutate_header(path: Path, change: Any) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "target", some(["manifest.json", "tensors.json", "model-00000.safetensors", "rng.safetensors", "state.json"], 2)
)
def test_made_up_checkpoints_are_refused(tmp_path: Path, target: str) -> None:
    (counts,) = run_ranks(attack, 1, str(tmp_path), target)
    assert counts["refused"] + counts["read"] == MUTATIONS
    if target != "state.json":  # any JSON object is a state
        assert counts["refused"] > MUTATIONS / 2, counts


def test_names_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"w": torch.ones(3)}, outside)
    for name in ("../../outside.safetensors", str(outside), "..", ".", "a/../../x", "", "sub/model-00000.safetensors"):
        for kind in (in_parts, whole):
            folder = kind(tmp_path / f"{kind.__name__}-{abs(hash(name))}")

            def change(fields: Any, name: str = name) -> None:
                fields["files"][name] = fields["files"].pop("rng.safetensors")
                if "parts" in fields:
                    fields["parts"][name] = fields["parts"].pop("model-00000.safetensors")

            forge(folder, change)
            with pytest.raises(UserError, match=r"cannot be (a file|a part) of a checkpoint"):
                read_snapshot(folder)
            assert "manifest.json" in problems(folder)[0]


@pytest.mark.parametrize("kind", [in_parts, whole])
def test_links_and_devices_in_place_of_files(tmp_path: Path, kind: Any) -> None:
    folder = kind(tmp_path / "checkpoints")
    for path in sorted(folder.iterdir()):
        aside = path.rename(tmp_path / path.name)
        path.symlink_to(aside)
        with pytest.raises(UserError, match=f"{path.name} is a link"):
            read_snapshot(folder)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UserError, match=f"{path.name} is a link or a device"):
            read_snapshot(folder)
        path.unlink()
        path.mkdir()
        with pytest.raises(UserError, match=f"{path.name} is a folder"):
            read_snapshot(folder)
        path.rmdir()
        aside.rename(path)
    assert problems(folder) == []


def read_in_little_memory(path: str) -> str:
    """What comes of reading a checkpoint, but for the tensors that are read when they are asked for."""
    soft = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
    try:
        return f"read: {len(read_snapshot(Path(path)).rng)} generators"
    except UserError as error:
        return error.what


def test_a_small_file_that_says_that_it_holds_much(tmp_path: Path) -> None:
    """A thousand tensors of 8 MiB, all in the same 8 MiB."""
    folder = in_parts(tmp_path / "checkpoints")
    place = {"dtype": "U8", "shape": [2**23], "data_offsets": [0, 2**23]}
    header = json.dumps({f"seed-{number:04d}/torch": place for number in range(1000)}).encode()
    (folder / "rng.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2**23))
    forge(folder)
    (said,) = run_ranks(read_in_little_memory, 1, str(folder))
    assert "rng.safetensors is not a file of a checkpoint" in said


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 100_000, b"", b"\xff" * 9, b"nul"])
def test_json_that_nobody_can_read(tmp_path: Path, text: bytes) -> None:
    for target in ("tensors.json", "state.json"):
        folder = in_parts(tmp_path / f"of-{target}")
        (folder / target).write_bytes(text)
        forge(folder)
        with pytest.raises(UserError, match=target):
            read_snapshot(folder)
    with pytest.raises(UserError, match=r"state\.json"):
        read_state(folder)
    folder = whole(tmp_path / "whole")
    for target in ("manifest.json", "model-00000.safetensors"):
        header = text if target == "manifest.json" else len(text).to_bytes(8, "little") + text
        (folder / target).write_bytes(header)
        if target != "manifest.json":
            continue
        with pytest.raises(UserError, match=target):
            read_snapshot(folder)


@pytest.mark.parametrize("target", ["manifest.json", "tensors.json", "state.json", "rng.safetensors"])
def test_a_key_that_an_object_has_twice(tmp_path: Path, target: str) -> None:
    """Which of the two counts is a question that two readers may answer differently."""
    folder = in_parts(tmp_path / "checkpoints")
    text = (folder / target).read_bytes()
    if target.endswith(".safetensors"):
        doubled = text[8:].replace(b'"dtype":"U8",', b'"dtype":"U8","dtype":"U8",', 1)
        doubled = (int.from_bytes(text[:8], "little") + 13).to_bytes(8, "little") + doubled
    else:
        (key,) = re.findall(rb'^\{\s*("\w+":)', text)
        doubled = text.replace(b"{", b"{" + key + b" 0, ", 1)
    assert len(doubled) > len(text)
    (folder / target).write_bytes(doubled)
    if target != "manifest.json":
        forge(folder)
    with pytest.raises(UserError, match=target.replace(".", r"\.")):
        read_snapshot(folder)


def test_boxes_that_overlap_or_leave_a_gap(tmp_path: Path) -> None:
    """As large together as the tensor, so that only their places are wrong."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    tensor = torch.arange(24.0).view(6, 4)
    halves = [shard("w", tensor, ((first, first + 3), (0, 4))) for first in (0, 3)]
    records = [write_part(begin_parts(directory, 1), 0, halves, [], {})]
    commit_parts(directory, 1, records, {}, {})
    folder = directory.resolve("1")
    fields = json.loads((folder / "tensors.json").read_text())
    assert fields["model"][0]["offsets"] == [0, 0, 3, 0]
    for offsets in ([0, 0, 0, 0], [0, 0, 2, 0], [3, 0, 3, 0], [0, 0, 4, 0], [0, 0, -3, 0]):
        fields["model"][0]["offsets"] = offsets
        (folder / "tensors.json").write_text(json.dumps(fields))
        forge(folder)
        with pytest.raises(
            UserError, match=r"tensors\.json cannot be used: (the boxes of w overlap|a box of w is not)"
        ):
            read_snapshot(folder)
