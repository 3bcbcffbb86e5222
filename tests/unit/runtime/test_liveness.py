"""Waiting goes by heartbeats: for a rank at work as long as it takes, for any other one until the timeout."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from drawbar.config.schema.run_config import LimitsSection
from drawbar.distributed import liveness
from drawbar.distributed.liveness import ActivityReader, Liveness, LivenessDigest, RankActivity
from drawbar.distributed.pulse import Kind
from drawbar.distributed.watchdog import Watchdog
from drawbar.errors import ExitCode, UserError


class Operation:
    """A collective of torch's, as far as it is waited for. It ends when all have come to it, or fails."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failed = False

    def fail(self) -> None:
        self.failed = True
        self.ended.set()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("Operation timed out!")
        if self.failed:
            raise RuntimeError("Connection closed by peer")
        return True


@contextmanager
def ranks(count: int, timeout: float, limits: LimitsSection | None = None) -> Iterator[list[Liveness]]:
    """Several ranks in this process, which have all joined."""
    store = dist.HashStore()
    found = [Liveness(store, rank, count, timeout, limits) for rank in range(count)]
    for rank in found:
        rank.publish_first()
    for rank in found:
        rank.start()
    try:
        yield found
    finally:
        for rank in found:
            rank.stop()


def wait(rank: Liveness, operation: Any) -> None:
    rank.wait(operation, "the test")


def meanwhile(do: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def work(rank: Liveness, operation: Operation, seconds: float) -> None:
    """Something long on one rank; then it comes to the operation, which ends with that."""
    with rank.working("writing the checkpoint"):
        time.sleep(seconds)
    operation.ended.set()
    wait(rank, operation)


def test_a_rank_at_work_has_no_deadline() -> None:
    with ranks(3, timeout=1) as (first, second, third):
        operation = Operation()
        others = [
            meanwhile(lambda: work(third, operation, seconds=2)),
            meanwhile(lambda: wait(second, operation)),  # it waits for as long, and is not silent either
        ]
        began = time.monotonic()
        wait(first, operation)
        assert time.monotonic() - began > 1.5
        for thread in others:
            thread.join()


def test_a_rank_at_work_that_makes_no_progress_has_a_limit() -> None:
    limits = LimitsSection.model_construct(callback=2)
    with ranks(2, timeout=1, limits=limits) as (first, second):
        operation = Operation()
        with second.working("the callback Endless.on_step", Kind.CALLBACK):
            began = time.monotonic()
            assert "rank 1 (the callback Endless.on_step); no heartbeat" in error_of(first, operation)
            assert time.monotonic() - began > 1.5


def test_a_rank_may_take_longer_for_its_start_and_its_steps_than_the_timeout() -> None:
    limits = LimitsSection.model_construct(start=60, step=60)
    with ranks(2, timeout=0.5, limits=limits) as (first, second):
        for step in (0, 1, 2):
            second.begin_step(step)  # and now it is silent for longer than the timeout
            operation = Operation()
            threading.Timer(1.5, operation.ended.set).start()
            wait(first, operation)


def test_a_run_that_is_built_again_has_the_limits_of_a_start() -> None:
    with ranks(1, timeout=1) as (rank,):
        kinds = []
        for step in (1, 2, 3, 0, 3, 4):
            rank.begin_step(step)
            kinds.append(rank._pulse.kind)
        assert kinds == [Kind.START, Kind.STEP, Kind.STEP, Kind.START, Kind.START, Kind.STEP]


def test_progress_is_a_sign_of_life() -> None:
    with ranks(2, timeout=1) as (first, second):
        operation = Operation()

        def get_on() -> None:
            for batch in range(8):
                second.set_activity(f"batch {batch}")
                time.sleep(0.25)
            operation.ended.set()

        thread = meanwhile(get_on)
        wait(first, operation)
        assert operation.is_completed()
        thread.join()


def error_of(rank: Liveness, operation: Operation) -> str:
    """The error of a wait that has no other end, or else would end in a minute."""
    bound = threading.Timer(60, operation.ended.set)
    bound.start()
    with pytest.raises(UserError) as caught:
        wait(rank, operation)
    bound.cancel()
    assert caught.value.exit_code == ExitCode.FAILED
    return str(caught.value)


def hang_in_step_7(rank: Liveness) -> None:
    """As in a collective of torch."""
    for step in (6, 7):
        rank.begin_step(step)
    rank.set_activity("backward")


def test_a_rank_that_hangs_is_named_with_what_it_did() -> None:
    with ranks(3, timeout=0.4) as (first, second, third):
        with third.working("encoding train"):
            pass
        hang_in_step_7(third)
        operation = Operation()
        thread = meanwhile(lambda: error_of(second, operation))
        message = error_of(first, operation)
        thread.join()
    assert "rank 0 waited 0.4s for the others at the test: rank 2 (step 7, backward); no heartbeat" in message
    assert "rank 1" not in message
    assert "launch.timeout" in message


def test_a_rank_that_is_stopped_at_work_is_named() -> None:
    with ranks(2, timeout=0.4) as (first, second), second.working("writing the checkpoint of step 3"):
        time.sleep(0.1)
        second.stop()  # as SIGSTOP stops its thread
        assert "rank 1 (writing the checkpoint of step 3); no heartbeat" in error_of(first, Operation())


def test_a_rank_0_that_is_stopped_is_named() -> None:
    with ranks(3, timeout=0.4) as (first, second, third), first.working("encoding train"), third.working("hashing"):
        time.sleep(0.1)
        first.stop()
        message = error_of(second, Operation())
    assert "rank 1 waited 0.4s for the others at the test: rank 0 (encoding train); no heartbeat" in message
    assert "rank 2" not in message


def test_a_rank_0_that_hangs_is_named() -> None:
    """While its thread reads the entries of all."""
    with ranks(3, timeout=0.4) as (first, second, third), third.working("hashing"):
        hang_in_step_7(first)
        message = error_of(second, Operation())
    assert "rank 1 waited 0.4s for the others at the test: rank 0 (step 7, backward); no heartbeat" in message
    assert "rank 2" not in message


def test_nobody_owes_signs_of_life_before_somebody_waits() -> None:
    """A rank that computes gives none. Its silence begins with the wait, not before."""
    with ranks(3, timeout=0.5) as (first, second, third):
        time.sleep(0.7)
        operation = Operation()
        others = [meanwhile(lambda: work(third, operation, 0.7)), meanwhile(lambda: wait(second, operation))]
        wait(first, operation)
        for thread in others:
            thread.join()


def test_digests_from_before_a_sign_of_life_do_not_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those from before the wait, and the first ones that a rank reads after it was suspended: they may name itself."""
    before, after = range(12), range(22, 24)  # the timeout is 20 digests

    class OneDigestAPoll(Operation):
        """Gives the rank a new digest at each poll, and ends at the thirtieth."""

        polls = 0

        def wait(self, timeout: timedelta | None = None) -> bool:
            self.polls += 1
            accused = self.polls in before or self.polls in after
            second._digest = LivenessDigest(self.polls, silent="rank 1 (the test)" if accused else "")
            if self.polls == 30:
                self.ended.set()
            return super().wait(timedelta(microseconds=1))

    with ranks(2, timeout=0.6) as (_, second):
        monkeypatch.setattr(second, "_poll", lambda: None)  # its thread reads no digest
        wait(second, OneDigestAPoll())


def test_a_connection_that_is_lost_ends_the_wait_at_once() -> None:
    with ranks(2, timeout=60) as (first, second), second.working("encoding train"):
        operation = Operation()
        thread = meanwhile(operation.fail)
        with pytest.raises(RuntimeError, match="closed by peer"):
            wait(first, operation)
        thread.join()


def test_data_that_does_not_get_through_has_a_deadline() -> None:
    with ranks(2, timeout=0.4) as (first, second):
        operation = Operation()
        thread = meanwhile(lambda: error_of(second, operation))
        assert "all have come, but their data does not get through" in error_of(first, operation)
        thread.join()


def test_a_store_that_is_gone_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("gone")

    with ranks(2, timeout=0.4) as (first, second), second.working("encoding train"):
        monkeypatch.setattr(first, "_poll", gone)
        assert "rank 1" in error_of(first, Operation())


def test_a_person_hears_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On the ranks that wait, and on the one that works, which may be the only one with a console."""
    monkeypatch.setattr(liveness, "LOG_SECONDS", 0.2)
    with caplog.at_level(logging.INFO), ranks(2, timeout=1) as (first, second):
        operation = Operation()
        thread = meanwhile(lambda: work(second, operation, seconds=1))
        wait(first, operation)
        thread.join()
    assert "waiting for rank 1 (writing the checkpoint) (" in caplog.text
    assert "the other ranks wait for this one: writing the checkpoint (" in caplog.text


def test_who_is_at_work_does_not_wait() -> None:
    """The others would wait for it for ever, if it hung there."""
    with ranks(2, timeout=1) as (first, _), first.working("encoding train"), pytest.raises(AssertionError):
        wait(first, Operation())


class Entries:
    """What so many ranks say, and rank 0's reader of it."""

    def __init__(self, count: int) -> None:
        self.store = dist.HashStore()
        for rank in range(count):
            self.say(rank, RankActivity(activity=f"step {rank}"))
        self.reader = ActivityReader(self.store, count, silent_after=3)

    def say(self, rank: int, entry: RankActivity) -> None:
        entry.publish(self.store, rank)

    def wait(self, polls: int, *ranks: int) -> LivenessDigest:
        """These ranks wait and send heartbeats, and the others give none."""
        for sign in range(polls):
            for rank in ranks:
                self.say(rank, RankActivity(1, sign, is_waiting=True))
            self.reader.read_all()
        return self.reader.publish()


def test_the_digest_does_not_grow_with_the_ranks() -> None:
    sizes = []
    for count in (10, 1000):
        entries = Entries(count)
        digest = entries.wait(4, 1)
        sizes.append(len(entries.store.get("liveness/digest")))
        assert digest == LivenessDigest.read(entries.store)
        assert (
            digest.behind == f"rank 0 (step 0), rank 2 (step 2), rank 3 (step 3), rank 4 (step 4) and {count - 5} more"
        )
        assert digest.silent == digest.behind
        assert (digest.lowest, digest.highest) == (0, 1)
    assert sizes[1] - sizes[0] <= 2 * 3  # digits: "995 more" three times, instead of "5 more"


def test_silence_counts_while_somebody_waits() -> None:
    entries = Entries(3)
    assert not entries.wait(9).silent
    assert not entries.wait(2, 0).silent
    entries.say(1, RankActivity(heartbeats=1))
    assert entries.wait(2, 0).silent == "rank 2 (step 2)"
    assert entries.wait(2, 0).silent == "rank 1 (starting), rank 2 (step 2)"
    for rank in range(3):
        entries.say(rank, RankActivity(1))
    assert not entries.wait(9).silent


def test_an_activity_may_be_any_text() -> None:
    entries = Entries(1)
    entries.say(0, RankActivity(activity="reading ein Ärgernis \udcff\n"))
    assert "reading ein Ärgernis \\udcff\n" in entries.wait(1).rank0


def test_a_ranks_number_may_be_another_users_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog()
    machine, launcher, own = watchdog.process_id
    watchdog.watch_ranks([(machine, launcher, own + 1)])
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=PermissionError))
    assert not watchdog.lost_a_rank()
