"""``FileBroadcast``: copies files from rank 0's disk to the disks of other nodes."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError

_CHUNK = 2**24
"""Bytes per message."""


class FileBroadcast:
    """A gloo group of rank 0 and the ranks that receive its files. Creating it is collective over all ranks of the run.

    Args:
        targets: the ranks that receive the files, one per disk.
    """

    def __init__(self, world: Distributed, targets: Sequence[int]) -> None:
        self._world = world
        self._group = dist.new_group([0, *targets], backend="gloo", timeout=world.timeout)

    def send(self, folder: Path, sizes: dict[str, int]) -> None:
        """Copy files: rank 0 reads them from its ``folder``, the targets write them to theirs. A rank whose disk fails
        takes part until the end, so that the others receive their files.

        Args:
            sizes: file sizes in bytes, by name; the same on all ranks.

        Raises:
            OSError: a file could not be read, or written, on this rank.
            UserError: another rank is gone, or silent for ``launch.timeout``.
        """
        failures: list[OSError] = []
        for name, size in sizes.items():
            for begin in range(0, max(size, 1), _CHUNK):  # an empty file also has one chunk
                chunk = torch.zeros(min(_CHUNK, size - begin), dtype=torch.uint8)
                if self._world.is_rank0:
                    with _kept(failures):
                        _read(folder / name, begin, chunk)
                self._broadcast(chunk)
                if not self._world.is_rank0:
                    with _kept(failures), (folder / name).open("wb" if begin == 0 else "ab") as file:
                        file.write(memoryview(chunk.numpy()))
        if failures:
            raise failures[0]

    def _broadcast(self, chunk: torch.Tensor) -> None:
        try:
            dist.broadcast(chunk, src=0, group=self._group)
        except (dist.DistError, RuntimeError) as error:
            raise UserError(
                f"rank {self._world.rank} could not exchange files with other nodes: {error}",
                remedy="look at the logs of the other ranks; to wait longer, set launch.timeout=SECONDS",
                exit_code=ExitCode.FAILED,
            ) from error


def _read(path: Path, begin: int, chunk: torch.Tensor) -> None:
    with path.open("rb") as file:
        file.seek(begin)
        if file.readinto(memoryview(chunk.numpy())) != len(chunk):
            raise OSError(errno.EIO, f"{path.name} has become shorter", str(path))


@contextmanager
def _kept(failures: list[OSError]) -> Iterator[None]:
    """Append an OSError to ``failures`` instead of raising it."""
    try:
        yield
    except OSError as error:
        failures.append(error)
