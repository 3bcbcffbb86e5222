"""A folder that appears whole or not at all."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from drawbar.util.atomic_files import new_folder


def draft_of(folder: Path, pid: int, host: str | None = None) -> Path:
    draft = folder.with_name(f"{folder.name}.tmp-{host or socket.gethostname()}-{pid}")
    draft.mkdir(parents=True)
    (draft / "half").write_text("written")
    return draft


def test_it_appears_at_the_end_with_the_permissions_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with new_folder(folder) as draft:
        (draft / "below").mkdir()
        (draft / "below" / "file").write_text("x")
        (draft / "below" / "file").chmod(0o600)
        assert not folder.exists()
    assert (folder / "below" / "file").stat().st_mode & 0o777 == folder.stat().st_mode & 0o666
    assert os.listdir(folder.parent) == ["folder"]


def test_a_link_to_an_empty_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "real")
    with new_folder(link) as draft:
        (draft / "file").write_text("x")
    assert link.is_symlink()
    assert (link / "file").read_text() == "x"


def test_nothing_is_left_of_it_after_an_error(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "new" / "folder") as draft:
            (draft / "file").write_text("x")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_killed_processes_of_this_machine_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = tmp_path / "folder"
    stale = draft_of(folder, ended.pid)
    kept = [draft_of(folder, os.getppid()), draft_of(folder, ended.pid, "elsewhere")]
    other = draft_of(tmp_path / "folder-2", ended.pid)
    with new_folder(folder):
        pass
    assert not stale.exists()
    assert all(path.exists() for path in (*kept, other))
