"""``FileExchange``: copies files between the disks of nodes, all nodes at the same time."""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError

_CHUNK = 2**24
"""Bytes of a file that are sent at once."""


class FileExchange:
    """Some ranks of a run, one for each disk, which send one another files over gloo.

    They have a process group of their own, so that background threads may use it while the main threads train. Making
    one is collective: every rank of the run takes part. One thread at a time may use it.

    Args:
        ranks: those that have a disk, in the same order on all ranks.
    """

    def __init__(self, world: Distributed, ranks: Sequence[int]) -> None:
        self._rank = world.rank
        self._timeout = world.timeout.total_seconds()
        self._ranks = tuple(ranks)
        self._group = dist.new_group(self._ranks, backend="gloo", timeout=world.timeout)

    def exchange(self, outgoing: Mapping[int, Sequence[Path]], folder: Path) -> list[Path]:
        """Send files to other ranks, and write what they send to this one into ``folder``, under the same names.
        Every rank of ``ranks`` must call it.

        A rank whose disk fails takes part until the end, so that the others get their files. What is written is not
        fsynced.

        Args:
            outgoing: by rank, the files that it gets.

        Returns:
            The files that this rank has received.

        Raises:
            OSError: a file could not be read, or written, on this rank.
            UserError: another rank is gone, or silent for ``launch.timeout``.
        """
        own, count = self._ranks.index(self._rank), len(self._ranks)
        errors: list[OSError] = []
        received: list[Path] = []
        for shift in range(1, count):  # a ring in each round, so that every rank sends and receives at the same time
            target, source = self._ranks[(own + shift) % count], self._ranks[(own - shift) % count]
            sent = _read_files(outgoing.get(target, ()), errors)
            self._transfer(sent, target, _write_files(folder, received, errors), source)
        if errors:
            raise errors[0]
        return received

    def _transfer(
        self, sent: Iterator[torch.Tensor], target: int, received: Iterator[torch.Tensor], source: int
    ) -> None:
        for content, buffer in zip_longest(sent, received):  # both are posted before either is awaited
            sending = None if content is None else dist.isend(content, target, group=self._group)
            receiving = None if buffer is None else dist.irecv(buffer, source, group=self._group)
            self._wait(receiving, source)
            self._wait(sending, target)

    def _wait(self, operation: dist.Work | None, other: int) -> None:
        if operation is None:
            return
        try:
            operation.wait()  # for at most the timeout of the group
        except (dist.DistError, RuntimeError) as error:
            raise UserError(
                f"rank {self._rank} could not exchange files with rank {other} within {self._timeout:g}s: {error}",
                remedy="look at the log of that rank; a longer wait is launch.timeout=SECONDS",
                exit_code=ExitCode.FAILED,
            ) from error


def _read_files(paths: Sequence[Path], errors: list[OSError]) -> Iterator[torch.Tensor]:
    """The tensors to send: names and sizes, then the content of each file in chunks; zeros for content
    that cannot be read. A file whose size cannot be found is left out."""
    sizes: dict[Path, int] = {}
    for path in paths:
        with _kept(errors):
            sizes[path] = path.stat().st_size
    header = json.dumps([(path.name, size) for path, size in sizes.items()]).encode()
    yield torch.tensor([len(header)])
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for path, size in sizes.items():
        for begin in range(0, size, _CHUNK):
            chunk = torch.zeros(min(_CHUNK, size - begin), dtype=torch.uint8)
            with _kept(errors), path.open("rb") as file:
                file.seek(begin)
                if file.readinto(memoryview(chunk.numpy())) != len(chunk):
                    raise OSError(errno.EIO, f"{path.name} has become shorter", str(path))
            yield chunk


def _write_files(folder: Path, received: list[Path], errors: list[OSError]) -> Iterator[torch.Tensor]:
    """The buffers to receive into, in the order of the sender's ``_read_files``. The content of each is written to its
    file when the next one is asked for."""
    length = torch.zeros(1, dtype=torch.int64)
    yield length
    header = torch.empty(int(length), dtype=torch.uint8)
    yield header
    for name, size in json.loads(header.numpy().tobytes()):
        path = folder / Path(name).name
        received.append(path)
        with _kept(errors):
            path.write_bytes(b"")
        for begin in range(0, size, _CHUNK):
            chunk = torch.empty(min(_CHUNK, size - begin), dtype=torch.uint8)
            yield chunk
            with _kept(errors), path.open("ab") as file:
                file.write(memoryview(chunk.numpy()))


@contextmanager
def _kept(errors: list[OSError]) -> Iterator[None]:
    """Append an OSError to ``errors`` instead of raising it."""
    try:
        yield
    except OSError as error:
        errors.append(error)
