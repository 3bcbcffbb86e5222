"""Data files are hashed by one rank for all, and again only where they may have changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from drawbar.config.schema.run_config import DataSection
from drawbar.data import cache
from drawbar.data.cache import DigestCache, digest_for_all, file_digest
from drawbar.data.sources import Records, open_records
from drawbar.distributed.process_group import Distributed
from ranks import SecondRank

HashedFiles = list[str]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> HashedFiles:
    """The names of the files whose bytes were read, in a world where files settle at once."""
    names: HashedFiles = []

    def note(file: Path) -> str:
        names.append(file.name)
        return file_digest(file)

    monkeypatch.setattr(cache, "file_digest", note)
    monkeypatch.setattr(cache, "MIN_AGE_NS", -1)
    return names


def digest(file: Path) -> str:
    kept = DigestCache(file.parent)
    found = kept.of(file)
    kept.save()
    return found


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, hashed: HashedFiles) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    found = [digest(tmp_path / name) for name in ("a", "b", "a", "b")]
    assert found == [file_digest(tmp_path / name) for name in ("a", "b")] * 2
    assert hashed == ["a", "b"]


def overwrite(file: Path) -> None:
    file.write_text("two")


def overwrite_secretly(file: Path) -> None:
    times = file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def put_another_in_its_place(file: Path) -> None:
    other = file.with_name("other")
    other.write_text("two")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)


@pytest.mark.parametrize("change", [overwrite, overwrite_secretly, put_another_in_its_place])
def test_every_change_is_seen(tmp_path: Path, hashed: HashedFiles, change: Callable[[Path], None]) -> None:
    """Of a file of the same length, too, and of one that says it is as old as before."""
    (tmp_path / "a").write_text("one")
    before = digest(tmp_path / "a")
    os.utime(tmp_path / "a", (1, 1))  # so that no change falls into the same tick of the clock
    assert digest(tmp_path / "a") == before
    change(tmp_path / "a")
    assert digest(tmp_path / "a") == file_digest(tmp_path / "a") != before


def test_a_file_that_changed_just_now_is_not_trusted(
    tmp_path: Path, hashed: HashedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # files settle as ever
    (tmp_path / "a").write_text("one")
    digest(tmp_path / "a")
    assert not (tmp_path / cache.DIGESTS_FILE).exists()


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "[[1, 2]]"])
def test_what_is_kept_may_be_damaged_or_lost(tmp_path: Path, hashed: HashedFiles, damaged: str) -> None:
    (tmp_path / "a").write_text("one")
    expected = digest(tmp_path / "a")
    (tmp_path / cache.DIGESTS_FILE).write_text(damaged)
    assert digest(tmp_path / "a") == expected
    assert digest(tmp_path / "a") == expected
    assert hashed == ["a", "a"]


def test_one_of_the_ranks_that_see_the_same_files_reads_them(tmp_path: Path, hashed: HashedFiles) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    records: Records = open_records(DataSection(train=str(path)), "train")
    kept = DigestCache(tmp_path / "cache")
    same = SecondRank(records.identity(), "what the first has found")
    assert digest_for_all(records, kept, cast(Distributed, same)) == "what the first has found"
    assert hashed == []
    kept.save()
    assert not (tmp_path / "cache").exists()
    other = SecondRank([[[1, 2, 3, 4]]], "of other files")
    assert digest_for_all(records, kept, cast(Distributed, other)) == records.digest(file_digest)
    assert hashed == ["a.txt"]
