"""Only files are replaced: links stay, streams are written to, and all else is refused and stays as it is."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drawbar.commands.output_files import check_output, write_lines
from drawbar.errors import UserError
from drawbar.report.page import check_target, write_page
from drawbar.util.atomic_files import write_atomically, write_durably

TEXT = '{"a": 1}\n'
WRITERS: dict[str, Callable[[Path], object]] = {
    "durably": lambda path: write_durably(path, TEXT),
    "atomically": lambda path: write_atomically(path, TEXT.encode()),
    "lines": lambda path: write_lines(path, [{"a": 1}]),
    "page": lambda path: write_page(TEXT.encode(), path, "--to"),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@writers
def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path, write: Callable[[Path], object]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "real").write_text("old")
    (disk / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("disk/real")
    (tmp_path / "chain").symlink_to("link")
    (tmp_path / "new").symlink_to(disk / "absent")
    for name, file in (("chain", "real"), ("link", "real"), ("new", "absent")):
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert not (disk / file).is_symlink()
        assert (disk / file).read_text() == TEXT
    assert stat.S_IMODE((disk / "real").stat().st_mode) == 0o600, "what was private stays so"
    assert {path.name for path in tmp_path.rglob("*")} == {"disk", "real", "absent", "link", "chain", "new"}


@writers
def test_a_device_is_written_to(tmp_path: Path, write: Callable[[Path], object]) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("needs the right to make devices")
    write(device)
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


@writers
def test_a_pipe_is_written_to(tmp_path: Path, write: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with ThreadPoolExecutor() as thread:
        for name in ("pipe", "link"):
            read = thread.submit((tmp_path / "pipe").read_text)
            write(tmp_path / name)
            assert read.result() == TEXT
    assert (tmp_path / "pipe").is_fifo()


def refused(tmp_path: Path) -> dict[Path, str]:
    """Things that are neither files nor streams, and what is said of them."""
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(tmp_path / "socket"))
    return {tmp_path / "circle": "a link in a circle", tmp_path / "folder": "a folder", tmp_path / "socket": "a socket"}


@writers
def test_all_else_is_refused_and_stays(tmp_path: Path, write: Callable[[Path], object]) -> None:
    for path, kind in refused(tmp_path).items():
        before = path.lstat()
        with pytest.raises((OSError, UserError), match=f"it is {kind}"):
            write(path)
        assert path.lstat().st_ino == before.st_ino
    assert len(list(tmp_path.iterdir())) == 3


def test_outputs_are_checked_before_any_work(tmp_path: Path) -> None:
    for path, kind in refused(tmp_path).items():
        for check in (lambda path: check_output(str(path), True, set()), lambda path: check_target(path, "--to")):
            with pytest.raises(UserError, match=re.escape(f"{path} is {kind}")):
                check(path)
    os.mkfifo(tmp_path / "pipe")
    assert check_output(str(tmp_path / "pipe"), False, set()) == tmp_path / "pipe", "nothing there can be lost"
    check_target(tmp_path / "pipe", "--to")
    (tmp_path / "mine").touch()
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(UserError, match="link already exists"):
        check_output(str(tmp_path / "link"), False, set())


def test_another_file_of_a_drafts_usual_name_stays(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.tmp").write_text("mine")
    write_lines(tmp_path / "out.jsonl", [{}])
    write_page(b"page", tmp_path / "out.jsonl", "--to")
    assert (tmp_path / "out.jsonl.tmp").read_text() == "mine"


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "itself"])
def test_standard_output_in_a_file_is_written_in_order(tmp_path: Path, name: str) -> None:
    file = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from drawbar.util.atomic_files import write_durably\n"
        "print('before', flush=True); write_durably(Path(sys.argv[1]), 'text\\n'); print('after')"
    )
    with file.open("w") as out:
        name = str(file) if name == "itself" else name
        subprocess.run([sys.executable, "-c", code, name], stdout=out, check=True, timeout=60)
    assert file.read_text() == "before\ntext\nafter\n"
