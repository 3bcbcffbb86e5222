import enum
import errno
import fcntl
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data import cache
from drawbar.data.cache import content_key, encode_cached, records_digest
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.sources import read_list
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger

RECORDS = [{"n": n} for n in range(20)]
MADE_OF = {"the records": "20 numbers"}
KEY = content_key(MADE_OF)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


class Untouchable:
    """Records that may not even be counted."""

    def __len__(self) -> int:
        raise AssertionError("the records were touched")

    __getitem__ = __iter__ = __bool__ = __len__  # type: ignore[assignment]


def encode(record: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(range(1 + record["n"] % 3)), "name": str(record["n"]), "truncated": record["n"] == 3}


def cached(folder: Path, records: Any = RECORDS, encoder: Any = encode, **options: Any) -> EncodedDataset:
    defaults: dict[str, Any] = {
        "inputs": MADE_OF,
        "workers": 0,
        "name": "train",
        "on_bad_record": "error",
        "progress": None,
        "timeout": 60,
        "eager": True,
    }
    return encode_cached(lambda: read_list(records, place), encoder, cache=folder, **{**defaults, **options})


def place(number: int) -> str:
    return f"file:{number + 1}"


def items(dataset: EncodedDataset) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    return [{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]


def entry_of(folder: Path) -> Path:
    return folder / f"train-{KEY[:24]}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_hit_touches_no_records(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = cached(tmp_path / "cache", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (20, 20)
    second = cached(tmp_path / "cache", Untouchable(), eager=False)
    in_memory = encode_records(RECORDS, encode, describe=str)
    assert items(first) == items(second) == items(in_memory)
    assert first.fingerprint == second.fingerprint == in_memory.fingerprint
    assert second.lengths.tolist() == in_memory.lengths.tolist()
    assert (second.truncated, second.dropped, second.skipped, second.skipped_count) == (1, 0, [], 0)
    assert names(tmp_path / "cache") == {entry_of(tmp_path).name, f"{entry_of(tmp_path).name}.lock"}


def test_what_was_skipped_and_dropped_is_in_the_cache(tmp_path: Path) -> None:
    def some(record: dict[str, Any]) -> Any:
        return {"x": 6 // record["n"]} if record["n"] < 5 else None

    for records in (RECORDS, Untouchable()):
        dataset = cached(tmp_path, records, some, on_bad_record="skip")
        assert (dataset.dropped, dataset.skipped_count, len(dataset)) == (15, 1, 4)
        assert dataset.skipped[0].startswith("file:1: the task's encode failed")


@pytest.mark.parametrize("change", [{"inputs": {"the records": "others"}}, {"name": "validation"}])
def test_another_key_or_name_encodes_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    cached(tmp_path)
    assert len(cached(tmp_path, RECORDS[:3], **change)) == 3
    assert len(cached(tmp_path)) == 20


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(entry: Path) -> None:
        about = json.loads((entry / "meta.json").read_text())
        change(about)
        (entry / "meta.json").write_text(json.dumps(about))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "meta.json").unlink(),
        lambda entry: (entry / "meta.json").write_text('{"format": 1, "key'),
        lambda entry: (entry / "meta.json").write_text("[]"),
        lambda entry: (entry / "00.values.bin").unlink(),
        lambda entry: (entry / "record_of.bin").unlink(),
        lambda entry: os.truncate(entry / "00.values.bin", 8),
        lambda entry: os.truncate(entry / "01.ends.bin", 0),
        rewrite(lambda about: about.update(format=0)),
        rewrite(lambda about: about.update(key=KEY[:24] + "0" * 16)),
        rewrite(lambda about: about.update(samples=19)),
        rewrite(lambda about: about.pop("fingerprint")),
    ],
)
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    before = items(cached(tmp_path))
    damage(entry_of(tmp_path))
    logger.addHandler(caplog.handler)
    try:
        assert items(cached(tmp_path)) == before
    finally:
        logger.removeHandler(caplog.handler)
    assert "damaged" in caplog.text
    assert str(entry_of(tmp_path)) in caplog.text
    assert items(cached(tmp_path, Untouchable())) == before


def test_an_error_leaves_no_draft_and_the_next_attempt_works(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        cached(tmp_path, encoder=lambda record: {"x": 1 // (10 - record["n"])})
    assert caught.value.where == "file:11"
    assert not list(tmp_path.glob("*.tmp-*"))
    assert len(cached(tmp_path)) == 20
    assert names(tmp_path) == {entry_of(tmp_path).name, f"{entry_of(tmp_path).name}.lock"}


def test_drafts_of_dead_processes_of_this_host_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    drafts = [f"old-0.tmp-{host}-7", f"busy-0.tmp-{host}-7", "old-0.tmp-elsewhere-7",
              f"{entry_of(tmp_path).name}.tmp-{host}-7"]  # fmt: skip
    for name in drafts:
        (tmp_path / name).mkdir()
        (tmp_path / name / "00.values.bin").write_text("half")
    with (tmp_path / "busy-0.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached(tmp_path)
    assert [(tmp_path / name).exists() for name in drafts] == [False, True, True, False]


def test_an_entry_that_another_host_made_meanwhile_is_used(tmp_path: Path) -> None:
    def encode_late(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] == 19:  # as if locks did not work across hosts
            cached(tmp_path / "other", RECORDS[:3])
            entry_of(tmp_path / "other").rename(entry_of(tmp_path))
        return encode(record)

    assert len(cached(tmp_path, encoder=encode_late)) == 3
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    maybe_alive = tmp_path / f"{entry_of(tmp_path).name}.tmp-{socket.gethostname()}-7"
    maybe_alive.mkdir()
    assert len(cached(tmp_path)) == 20
    assert len(cached(tmp_path, Untouchable())) == 20
    assert maybe_alive.exists()


def test_one_that_is_not_eager_encodes_when_nobody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "HEAD_START_SECONDS", 0.1)
    assert len(cached(tmp_path, eager=False)) == 20


def test_those_who_wait_see_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BEAT_SECONDS", 0.01)
    watch = cache.Watch(tmp_path / "progress")
    seen: list[tuple[int, int]] = []
    watch.look(lambda done, total: seen.append((done, total)))
    assert not watch.seen
    with cache.Heartbeat(tmp_path / "progress") as beating:
        beating.report(3, 10)
        end = time.monotonic() + 30
        while not seen and time.monotonic() < end:
            watch.look(lambda done, total: seen.append((done, total)))
    assert seen == [(3, 10)]
    assert watch.seen
    watch.raise_if_silent(timeout=60)
    with pytest.raises(UserError, match=rf"process {os.getpid()} .* 3 of 10 records"):
        watch.raise_if_silent(timeout=-1)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UserError, match="cannot write the encoded data") as caught:
            cached(folder)
        assert caught.value.where == str(folder)
        assert "data.cache" in str(caught.value.remedy)


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            cached(tmp_path, [{"x": np.zeros(500)}] * 1024, lambda record: record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write the encoded data: File too large" in caught.value.what
    assert "MiB free" in caught.value.what
    assert "ulimit" in str(caught.value.remedy)
    assert caught.value.exit_code == ExitCode.FAILED
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_error_about_another_file_is_not_taken_for_one_of_the_cache(tmp_path: Path) -> None:
    class Unreadable(list[Any]):
        def __iter__(self) -> Any:
            raise PermissionError(13, "Permission denied", "/data/train.txt")

    with pytest.raises(PermissionError):
        cached(tmp_path, Unreadable(RECORDS))


@given(first=PLAIN, second=PLAIN)
def test_keys_are_equal_where_contents_are(first: Any, second: Any) -> None:
    assert (content_key(first) == content_key(second)) == (repr(first) == repr(second))
    assert content_key(first, second) == content_key(first, second)
    assert content_key(first, second) != content_key([first, second])


@given(contents=st.dictionaries(st.text() | st.integers(), st.integers()))
def test_the_order_of_keys_does_not_count(contents: dict[Any, int]) -> None:
    assert content_key(contents) == content_key(dict(reversed(contents.items())))


def test_keys_tell_types_and_borders_apart() -> None:
    parts = [
        [], [[]], [[], []], {}, None, 0, False, 0.0, "0", b"0", "", "None", ["a", "b"], ["ab"], ["a", ["b"]],
        {"a": 1}, {"b": 1}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}], {1: 2}, {"1": 2},
        np.array([1, 2]), np.array([1, 2], dtype=np.int32), np.array([[1, 2]]), np.array([1, 3]), np.float32(1),
    ]  # fmt: skip
    assert len({content_key(part) for part in parts}) == len(parts)
    assert content_key((1, 2)) == content_key([1, 2])
    assert content_key(enum.IntEnum("Number", {"one": 1}).one) == content_key(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", [object(), {"a": [object()]}, {1, 2}, np.array([object()]), len, Path("a")])
def test_objects_have_no_key(part: Any) -> None:
    with pytest.raises(TypeError, match="no digest"):
        content_key(part)


def test_digests_of_records() -> None:
    assert records_digest(RECORDS) == records_digest(iter(RECORDS)) is not None
    assert records_digest(RECORDS) != records_digest(RECORDS[1:])
    assert records_digest(RECORDS) != records_digest(RECORDS[::-1])
    assert records_digest([{"image": object()}]) is None
