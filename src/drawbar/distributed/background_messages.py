"""Messages between background threads of the ranks, through the rendezvous store. They use no collectives, as the main
threads are running those of training."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil

import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger

_CHUNK_BYTES = 2**20
"""Maximum size of a value, in bytes; the store refuses values above 8 MiB."""
_POLL_SECONDS = 0.05
_LOG_SECONDS = 60.0
"""Seconds between log lines about the rank that this one waits for."""
_SHORT_TIMEOUT_SECONDS = 10.0
"""Timeout for a silent rank, once another rank is known to be gone."""


class BackgroundMessages:
    """One exchange of messages, in which each rank sends at most one message per name.

    A receiver waits for as long as the sender sends heartbeats (:meth:`at_work`). It polls the store: a blocking call
    would block the store's connection for the other threads of this rank.

    Args:
        topic: identifies the exchange; the same on all ranks, and unique within the run.
    """

    def __init__(self, world: Distributed, topic: str) -> None:
        self._world = world
        self._topic = topic
        self._timeout = world.timeout.total_seconds()
        self._period = min(self._timeout / 20, 5.0)
        self._lost_a_rank = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context manager that sends heartbeats."""
        over = threading.Event()

        def send_heartbeats() -> None:
            count = 0
            while True:
                count += 1
                with suppress(dist.DistError, RuntimeError):  # without the store, the receiver hears nothing
                    self._world.store.set(_heartbeat_key(self._world.rank), str(count))
                if over.wait(self._period):
                    return

        thread = threading.Thread(target=send_heartbeats, name="heartbeats of a save", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def send(self, name: str, content: bytes) -> None:
        """Put a message of this rank into the store."""
        store, rank = self._world.store, self._world.rank
        count = ceil(len(content) / _CHUNK_BYTES)
        for number in range(count):
            piece = content[number * _CHUNK_BYTES : (number + 1) * _CHUNK_BYTES]
            store.set(self._key(name, rank, number), piece)
        store.set(self._key(name, rank), str(count))  # last: marks the message as complete

    def receive(self, name: str, sender: int, activity: str) -> bytes:
        """Receive the message ``name`` of rank ``sender``, and delete it from the store.

        Args:
            activity: what the sender is doing, for log and error: ``writing its part of step 100``.

        Raises:
            UserError: the sender sent no heartbeat for ``launch.timeout`` seconds (about 10 seconds, once a rank of
                this node is gone or this exchange has lost one), or the store is gone.
        """
        try:
            self._wait(name, sender, activity)
            store = self._world.store
            count = int(store.get(self._key(name, sender)))
            keys = [self._key(name, sender, number) for number in range(count)]
            content = b"".join(store.get(key) for key in keys)
            for key in (*keys, self._key(name, sender)):
                store.delete_key(key)
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(sender, activity, f"the store of the run is gone ({error})") from error
        return content

    def _wait(self, name: str, sender: int, activity: str) -> None:
        # counts polls instead of seconds, so that no rank seems silent after the whole job was suspended
        polls = unchanged = 0
        last = b""
        key = self._key(name, sender)
        while not self._is_there(key):
            time.sleep(_POLL_SECONDS)
            polls += 1
            heartbeat = self._read_heartbeat(sender) if polls % ceil(self._period / _POLL_SECONDS) == 0 else last
            unchanged = 0 if heartbeat != last else unchanged + 1
            last = heartbeat
            timeout = self._timeout
            if self._lost_a_rank or self._world.lost_a_rank():
                timeout = min(timeout, max(_SHORT_TIMEOUT_SECONDS, 3 * self._period))
            if unchanged * _POLL_SECONDS > timeout and not self._is_there(key):
                raise self._lost(sender, activity, f"no heartbeat for {timeout:g}s")
            if polls % ceil(_LOG_SECONDS / _POLL_SECONDS) == 0:
                logger.info("waiting for rank %d: %s (%.0f s)", sender, activity, polls * _POLL_SECONDS)

    def _is_there(self, key: str) -> bool:
        return self._world.store.check([key])

    def _read_heartbeat(self, rank: int) -> bytes:
        key = _heartbeat_key(rank)
        return self._world.store.get(key) if self._is_there(key) else b""

    def _lost(self, rank: int, activity: str, reason: str) -> UserError:
        self._lost_a_rank = True  # others, as those of the same node, may be gone too
        return UserError(
            f"rank {self._world.rank} waited in vain for rank {rank}, which was {activity}: {reason}",
            remedy="look at the log of that rank; to wait longer, set launch.timeout=SECONDS",
            exit_code=ExitCode.FAILED,
        )

    def _key(self, name: str, rank: int, piece: int | None = None) -> str:
        return f"{self._topic}/{name}/{rank}" + ("" if piece is None else f"/{piece}")


def _heartbeat_key(rank: int) -> str:
    """The store key of a rank's heartbeat: the same in all exchanges, so that the store does not fill up."""
    return f"background-heartbeats/{rank}"
