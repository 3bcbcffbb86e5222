"""The user's own code when a job is submitted: which commit it is, and a copy of it."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from drawbar.errors import UserError


def code_version(folder: Path) -> str | None:
    """``commit 0123456789ab``, followed by ``with changes`` if tracked files differ from the commit. None without git,
    a repository or a commit.
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "--short=12", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"commit {os.fsdecode(commit.strip())}" + (" with changes" if changes.strip() else "")


def snapshot_name(folder: Path) -> str:
    """The name of a copy of the code; different contents have different names.

    Raises:
        UserError: git tracks nothing there.
    """
    digest = hashlib.sha256()
    for path in _tracked(folder):
        whole = folder / path
        content = os.fsencode(os.readlink(whole)) if whole.is_symlink() else whole.read_bytes()
        digest.update(hashlib.sha256(os.fsencode(path)).digest() + hashlib.sha256(content).digest())
    return f"code-{digest.hexdigest()[:12]}"


def copy_code(folder: Path, target: Path) -> None:
    """Copy the files of a folder that git tracks, uncommitted changes included: all of them, or none.

    Raises:
        UserError: the copy cannot be written.
    """
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        for path in _tracked(folder):
            (draft / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / path, draft / path, follow_symlinks=False)
        draft.rename(target)
    except OSError as error:
        if not target.exists():  # else another process has made the same copy meanwhile
            remedy = "free some space there, or submit without --snapshot"
            raise UserError(f"cannot copy the code: {error}", where=str(target), remedy=remedy) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def is_tracked(folder: Path, path: Path) -> bool:
    """Whether git tracks a file, so that a copy of the folder has it.

    Args:
        path: relative to the folder.
    """
    return path in _tracked(folder)


def _tracked(folder: Path) -> list[Path]:
    """The existing files below the folder that git tracks, relative to it."""
    try:
        names = _git(folder, "ls-files", "-z", "--recurse-submodules").split(b"\0")
    except (OSError, subprocess.CalledProcessError):
        names = []
    listed = [Path(os.fsdecode(name)) for name in names if name]
    # a submodule that is not checked out is an empty folder
    found = [path for path in listed if (folder / path).is_file() or (folder / path).is_symlink()]
    if not found:
        raise UserError(
            f"git knows no files in {folder}, so there is nothing to copy",
            where="--snapshot",
            remedy="`git init` and `git add` your code (a commit is not needed), or submit without --snapshot",
        )
    return found


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
