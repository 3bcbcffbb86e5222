"""``SavePhases``: how the ranks that save together agree, phase by phase, that all have succeeded."""

import json
import zlib
from collections.abc import Callable, Collection

from drawbar.checkpoint.space import DiskFault
from drawbar.distributed.background_messages import BackgroundMessages
from drawbar.errors import ExitCode, UserError


class SavePhases:
    """The phases of one save, on the background threads of all ranks.

    In each phase some ranks, the workers, do something. Rank 0 receives the result of each of them, even if one has
    failed, and then tells the followers, who wait for it, whether all have succeeded. So no follower begins the next
    phase too early, or after a failure.

    Args:
        undo: removes what this rank's disk has of the save. Called on rank 0 and on followers when a phase has failed,
            once rank 0 has heard from every worker or has given up on those that are lost. Not called where rank 0 is
            lost, as then nobody knows how far the others have come.
    """

    def __init__(self, messages: BackgroundMessages, rank: int, undo: Callable[[], None]) -> None:
        self._messages = messages
        self._rank = rank
        self._undo = undo

    def run(
        self, name: str, work: Callable[[], bytes], workers: Collection[int], followers: Collection[int], activity: str
    ) -> list[bytes]:
        """A phase. Every rank of ``workers`` and ``followers`` must call it, and rank 0.

        Args:
            workers: the ranks that call ``work``.
            followers: the ranks that go on only when all workers have succeeded; rank 0 always is one.
            activity: what the workers do, for the log and errors of those who wait for them.

        Returns:
            What the workers have returned, on rank 0; elsewhere nothing.

        Raises:
            Exception: what ``work`` has raised here; on rank 0 and on followers a UserError where it has failed on
                another rank; or a rank is lost.
        """
        if self._rank == 0:
            return self._lead(name, work, workers, followers, activity)
        failure: Exception | None = None
        if self._rank in workers:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - it is raised below
                failure = error
            self._messages.send(name, encode_result(failure or result))
        if self._rank in followers:
            verdict = self._messages.receive(f"{name}-{self._rank}", 0, activity)
            try:
                decode_result(verdict, 0)
            except UserError as error:
                self._undo()
                raise failure or error from None
        if failure is not None:
            raise failure
        return []

    def _lead(
        self, name: str, work: Callable[[], bytes], workers: Collection[int], followers: Collection[int], activity: str
    ) -> list[bytes]:
        results: list[bytes] = []
        errors: list[Exception] = []
        for rank in workers:
            try:
                message = None if rank == 0 else self._messages.receive(name, rank, activity)
                results.append(work() if message is None else decode_result(message, rank))
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
        # a fault of a disk may be tolerated: another error counts first
        failure = min(errors, key=lambda error: isinstance(error, DiskFault), default=None)
        for rank in followers:
            if rank != 0:
                self._messages.send(f"{name}-{rank}", encode_result(failure or b""))
        if failure is not None:
            self._undo()
            raise failure
        return results


def encode_result(result: bytes | Exception) -> bytes:
    """The message in which a rank sends what it has done, or its error."""
    if isinstance(result, bytes):
        return zlib.compress(b"+" + result, level=1)
    known = result if isinstance(result, UserError) else UserError(repr(result), remedy="see the log of that rank")
    is_of_disk = isinstance(result, DiskFault)
    text = {"what": known.what, "where": known.where, "remedy": known.remedy, "is_of_disk": is_of_disk}
    return zlib.compress(b"-" + json.dumps(text).encode())


def decode_result(message: bytes, rank: int) -> bytes:
    """Inverse of ``encode_result``. Raises UserError where the rank has sent an error."""
    text = zlib.decompress(message)
    if text[:1] == b"+":
        return text[1:]
    fields = json.loads(text[1:])
    where = fields["where"] or f"rank {rank}"
    kind = DiskFault if fields["is_of_disk"] else UserError
    raise kind(fields["what"], where=where, remedy=fields["remedy"], exit_code=ExitCode.FAILED)
