"""Disks that are full, limited or not writable, for real."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_snapshot
from drawbar.checkpoint.space import (
    DiskFault,
    check_space,
    check_writable,
    ensure_free_space,
    free_bytes,
    free_text,
    required_bytes,
)
from drawbar.errors import ExitCode, UserError
from drawbar.util.byte_sizes import readable

# Writes a small checkpoint, then one that does not fit; prints the error as a command would.
WRITER = """
import os, resource, sys
from pathlib import Path
import torch
from drawbar.train.saver import AsyncWriter
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot

def snapshot(step, size):
    return Snapshot(step, {"w": torch.ones(size)}, {}, {}, {})

directory, limit = CheckpointDirectory(Path(sys.argv[1])), int(sys.argv[2])
directory.write(snapshot(1, 10))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer = AsyncWriter()
writer.submit(lambda: directory.write(snapshot(2, 1_000_000)))
writer.close()
error = writer.pop_error()
print(error)
print(directory.describe_newest())
print(sorted(os.listdir(directory.path)), directory.latest().name)
directory.write(snapshot(3, 10))
print(directory.steps())
sys.exit(error.exit_code)
"""


@pytest.mark.exhaustive
def test_a_file_size_limit(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path, "1000000"], capture_output=True, text=True, check=False
    )
    assert result.returncode == ExitCode.FAILED, result.stderr
    assert result.stderr == ""
    assert "step-00000002 could not be written: File too large" in result.stdout
    assert "step-00000001, is intact" in result.stdout
    assert "ulimit -f" in result.stdout
    assert "['step-00000001'] step-00000001\n[1, 3]\n" in result.stdout
    assert read_snapshot(CheckpointDirectory(tmp_path).latest()).step == 3


@pytest.mark.exhaustive
def test_a_full_disk(tmp_path):
    # A mount in a name space of its own: it needs no rights outside and is gone with the process.
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*inside, *mount], capture_output=True).returncode != 0:
        pytest.skip("no user name spaces here, so no small file system can be mounted")
    result = subprocess.run(
        [*inside, "sh", "-c", 'shift; "$@" && exec "$0" -c "$WRITER" "$MOUNTED" 0', sys.executable, "", *mount],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"WRITER": WRITER, "MOUNTED": str(tmp_path)},
    )
    assert result.returncode == ExitCode.FAILED, result.stderr
    assert "step-00000002 could not be written: No space left on device" in result.stdout
    assert "step-00000001, is intact" in result.stdout
    assert "free some space" in result.stdout
    assert "['step-00000001'] step-00000001\n[1, 3]\n" in result.stdout


def test_space(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    free = shutil.disk_usage(tmp_path).free
    check_space(folder, 0)
    check_space(folder, free // 2)
    with pytest.raises(UserError, match=r"needed, .* free") as caught:
        check_space(folder, free * 2)
    assert readable(free * 2) in str(caught.value)
    assert "checkpoint.keep" in caught.value.remedy
    assert not folder.exists()


def test_a_save_that_does_not_fit_is_refused_once_nothing_more_can_be_deleted(tmp_path):
    made, free = [], shutil.disk_usage(tmp_path).free
    ensure_free_space(tmp_path, "step-00000001", free // 2, lambda: made.append("room"))
    assert made == []
    with pytest.raises(DiskFault, match=r"step-00000001 was not begun.* needed, .* free") as caught:
        ensure_free_space(tmp_path, "step-00000001", free * 2, lambda: made.append("room"))
    assert made == ["room"]
    assert readable(free * 2) in str(caught.value)
    assert caught.value.exit_code == ExitCode.FAILED


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_file_system_without_such_numbers_refuses_nothing():
    assert os.statvfs("/proc").f_blocks == 0
    assert free_bytes(Path("/proc")) is None
    assert free_text(Path("/proc")) == ""
    check_space(Path("/proc"), 2**60)
    ensure_free_space(Path("/proc"), "step-00000001", 2**60, lambda: pytest.fail("nothing need be deleted"))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**30, "1.0 GiB"), (5 * 2**29, "2.5 GiB")]
)
def test_readable(size, text):
    assert readable(size) == text


def test_required_bytes_counts_what_is_kept_and_what_is_there():
    assert required_bytes(100, keep=3) == 500
    assert required_bytes(100, keep=3, existing=2) == 300
    assert required_bytes(100, keep=3, existing=9) == 100


def test_a_writable_folder_is_neither_made_nor_changed(tmp_path):
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError) as caught:
        check_writable(file / "runs" / "x")
    assert f"cannot write to the folder {file / 'runs' / 'x'}: {file} is a file" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_folder_that_refuses_even_root():
    with pytest.raises(UserError, match=r"cannot write to the folder /proc/runs/x: /proc is not writable"):
        check_writable(Path("/proc/runs/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="is not writable"):
        check_writable(tmp_path / "runs")
    tmp_path.chmod(0o700)
