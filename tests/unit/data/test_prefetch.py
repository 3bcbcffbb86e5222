"""Batches prepared ahead of training. What makes batches is at the top of the module: worker processes import it."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from drawbar.data import prefetch
from drawbar.data.dataset import Sample, encode_records
from drawbar.data.loader import MicroBatchSize, SampleRows, TrainLoader
from drawbar.data.prefetch import (
    BatchMaker,
    MicroBatch,
    PlannedMicroBatch,
    Prefetcher,
    RawBatch,
    StepPlan,
    unchanged,
)
from drawbar.data.sampler import InOrder, Shuffled
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from exhaustive import params, some

ROWS = 50
STEPS = 20
WORKERS = pytest.mark.parametrize("processes", params([0, 1, 2], [0, 2]))

Batch = dict[str, torch.Tensor]


def stacked(samples: list[Sample]) -> Batch:
    """Tensors of several dtypes, and one of another layout in memory than its shape says."""
    tokens = torch.tensor([int(sample["input_ids"][0]) for sample in samples])
    turned = torch.arange(6.0).reshape(2, 3).T
    return {"tokens": tokens, "half": tokens.bfloat16(), "none": tokens[:0], "one": tokens.sum(), "turned": turned}


def noisy(sample: Sample, epoch: int) -> Sample:
    drawn = np.random.default_rng([epoch, sample["id"]]).integers(2**30)
    return {**sample, "input_ids": sample["input_ids"] + drawn}


def where_made(samples: list[Sample]) -> tuple[int, str]:
    return os.getpid(), threading.current_thread().name


class Odd(Exception):
    """Cannot be unpickled: its arguments are others than its constructor's."""

    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(f"sample {sample} is {reason}")


@dataclass(frozen=True)
class At:
    """Does something at one sample."""

    number: int
    do: Callable[[], Any]

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        if sample["id"] == self.number:
            self.do()
        return sample


def raise_odd() -> None:
    raise Odd(7, "odd")


def in_a_worker() -> bool:
    return multiprocessing.parent_process() is not None


def raise_in_a_worker() -> None:
    if in_a_worker():
        raise RuntimeError("no model here")


def raise_odd_in_a_worker() -> None:
    if in_a_worker():
        raise_odd()


def draw_python() -> None:
    random.random()


def draw_numpy() -> None:
    np.random.random()


def draw_torch() -> None:
    torch.rand(1)


class OwnGenerator:
    """An augment that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        return {**sample, "input_ids": sample["input_ids"] + self.generator.integers(2**30)}

    def __reduce__(self) -> Any:
        return type(self), ()


class ForkedGenerator(OwnGenerator):
    """Depends on torch's generator, and leaves it as it was."""

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + 1)
            return {**sample, "input_ids": sample["input_ids"] + int(torch.randint(2**30, ()))}


class LateAttribute(OwnGenerator):
    """Has an attribute that processes do not get."""

    def __init__(self) -> None:
        self.noise = 0 if in_a_worker() else 1

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        return {**sample, "input_ids": sample["input_ids"] + self.noise}


class OnlyHere:
    """A collate that worker processes cannot load."""

    def __call__(self, samples: list[Sample]) -> int:
        return len(samples)

    def __reduce__(self) -> Any:
        return build_only_here, ()


def build_only_here() -> OnlyHere:
    raise_in_a_worker()
    return OnlyHere()


def kill_worker() -> None:
    if in_a_worker():
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Counting:
    """Appends to a file for each batch that is made."""

    path: Path

    def __call__(self, samples: list[Sample]) -> list[int]:
        with self.path.open("a") as file:
            file.write(f"{len(samples)}\n")
        return [sample["id"] for sample in samples]


@contextmanager
def loader_of(
    collate: Any, augment: Any = unchanged, *, in_order: bool = False, **options: Any
) -> Iterator[TrainLoader[Any]]:
    records = [{"input_ids": [number] * (1 + number % 3)} for number in range(ROWS)]
    samples = SampleRows(encode_records(records, lambda record: record, describe=str))
    loader = TrainLoader(
        samples,
        InOrder(ROWS) if in_order else Shuffled(ROWS, seed=3),
        global_batch=6,
        micro_batch=MicroBatchSize(rows=2),
        ranks=Distributed(RankInfo(), torch.device("cpu"), timeout=60).dp_ranks,
        prefetcher=Prefetcher(BatchMaker(collate, augment), **{"timeout": 60, **options}),
    )
    try:
        yield loader
    finally:
        loader.close()
        assert multiprocessing.active_children() == []
        assert "drawbar-batches" not in [thread.name for thread in threading.enumerate()]


def wait_for_workers(loader: TrainLoader[Any]) -> None:
    """Until all processes have started, so that they and not the thread make what comes."""
    preparer = loader.prefetcher._preparer
    assert preparer is not None
    prefetch.wait_for(preparer._started)


def plain(step: tuple[int, list[MicroBatch[Batch]]]) -> Any:
    number, micro_batches = step
    return number, [
        {name: (str(part.dtype), tuple(part.shape), part.stride(), part.tolist()) for name, part in micro.batch.items()}
        for micro in micro_batches
    ]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with loader_of(stacked, noisy, prefetch=False) as loader:
        return list(map(plain, loader.steps(0, STEPS)))


@WORKERS
def test_batches_do_not_depend_on_who_makes_them(expected: list[Any], processes: int) -> None:
    """Nor positions: a run that stops in the middle has seen no batch that was prepared for later."""
    with loader_of(stacked, noisy, workers=processes) as loader:
        steps = loader.steps(0, STEPS)
        found = [plain(next(steps))]
        if processes:
            wait_for_workers(loader)
        found += [plain(step) for step in islice(steps, 10)]
        state = loader.state()
        steps.close()  # type: ignore[attr-defined]
        assert found == expected[:11]
        assert list(map(plain, loader.steps(11, STEPS))) == expected[11:]  # the same loader goes on where it was
    with loader_of(stacked, noisy) as loader:
        loader.load(state)
        assert list(map(plain, loader.steps(11, STEPS))) == expected[11:]


def test_a_thread_makes_them() -> None:
    with loader_of(where_made) as loader:
        names = [{micro.batch for micro in micro_batches} for _, micro_batches in loader.steps(0, 4)]
    assert names == [{(os.getpid(), "drawbar-batches")}] * 4


def test_so_many_batches_are_ahead_and_no_more(tmp_path: Path) -> None:
    """A bound on the memory: after the step in use, three micro-batches, the next step that is whole."""
    made = tmp_path / "made"
    with loader_of(Counting(made)) as loader:
        for step, _ in loader.steps(0, 6):
            time.sleep(0.05)
            assert len(made.read_text().splitlines()) <= 3 * (step + 1)
    assert len(made.read_text().splitlines()) == 3 * 6  # nothing past the last step


def test_a_slow_augment_runs_while_a_step_is_trained() -> None:
    def slow(sample: Sample, epoch: int) -> Sample:
        time.sleep(0.01)
        return sample

    waited = []
    with loader_of(stacked, slow) as loader:
        for _ in loader.steps(0, 6):
            time.sleep(0.2)  # the step takes three times as long as its samples
            waited.append(loader.waited)
    assert median(waited[1:]) < 0.05  # a busy machine may delay a single one


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_error_comes_at_its_step(prefetch: bool) -> None:
    """Sample 20 is of the fourth step, and the one before it is trained."""
    with loader_of(stacked, At(20, raise_odd), in_order=True, prefetch=prefetch) as loader:
        made: list[int] = []
        with pytest.raises(Odd, match="sample 7 is odd") as caught:
            made.extend(step for step, _ in loader.steps(0, STEPS))
    assert made == [1, 2, 3]
    assert [entry.name for entry in caught.traceback][-1] == "raise_odd"
    assert loader.state()["consumed"] == 18


def test_a_step_that_cannot_be_planned_takes_back_no_random_draw() -> None:
    """The step before it was trained, and a checkpoint has the state of the generators after its dropout."""

    def plan(_: bool) -> StepPlan:
        if len(drawn) == 3:
            raise OSError("the next block cannot be read")
        return StepPlan([PlannedMicroBatch(lambda: RawBatch([], 0))], 1, None)

    drawn: list[float] = []
    prefetcher = Prefetcher(BatchMaker(len), prefetch=False)
    with pytest.raises(OSError, match="next block"):
        drawn.extend(float(torch.rand(1)) for _ in prefetcher.steps(plan, 0, 10))
    prefetcher.restore_generators()
    assert float(torch.rand(1)) not in drawn


@pytest.mark.parametrize(
    ("do", "warning"),
    some(
        [
            (raise_in_a_worker, "RuntimeError: no model here"),
            (raise_odd_in_a_worker, "Odd: sample 7 is odd"),
            *((draw, "draws from a generator") for draw in (draw_python, draw_numpy, draw_torch)),
        ],
        2,
    ),
)
def test_what_only_a_process_cannot_make_is_made_at_its_step(
    do: Any, warning: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws from the generators of a run as well: only so do they draw alike in every run, and after a resume.
    Sample 20 is of the fourth step."""
    monkeypatch.setattr(prefetch, "_values", len)  # these batches are other ones wherever they are made
    with loader_of(where_made, At(20, do), in_order=True, workers=1) as loader:
        steps = loader.steps(0, 12)
        next(steps)
        wait_for_workers(loader)
        places = [{micro.batch for micro in micro_batches} for _, micro_batches in steps]
    here = (os.getpid(), "MainThread")
    assert places[1] > {here}  # only the first batch of a process is made here, too
    assert all(found == {here} for found in places[3:])
    assert warning in caplog.text


@pytest.mark.exhaustive
def test_an_error_in_a_process_is_the_error_of_this_one() -> None:
    with loader_of(stacked, At(20, raise_odd), in_order=True, workers=1) as loader:
        steps = loader.steps(0, STEPS)
        next(steps)
        wait_for_workers(loader)
        with pytest.raises(Odd, match="sample 7 is odd") as caught:
            list(steps)
    assert [entry.name for entry in caught.traceback][-1] == "raise_odd"


@pytest.mark.exhaustive
def test_a_process_that_cannot_build_the_task_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(OnlyHere(), workers=1) as loader:
        steps = loader.steps(0, 12)
        next(steps)
        wait_for_workers(loader)
        assert {micro.batch for _, micro_batches in steps for micro in micro_batches} == {2}
    assert "cannot build the task as this one did: RuntimeError: no model here" in caplog.text


@pytest.mark.exhaustive
def test_a_killed_process_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """As where memory ran out: training is whole, and may have a day of steps that are not saved."""
    with loader_of(stacked, At(40, kill_worker), in_order=True, prefetch=False) as loader:
        expected = list(map(plain, loader.steps(0, STEPS)))
    with loader_of(stacked, At(40, kill_worker), in_order=True, workers=1) as loader:
        steps = loader.steps(0, STEPS)
        found = [plain(next(steps))]
        wait_for_workers(loader)
        found += map(plain, steps)
    assert found == expected
    assert "a process for preparing batches was killed" in caplog.text


@pytest.mark.parametrize("kind", some([OwnGenerator, ForkedGenerator, LateAttribute], 1))
def test_what_a_process_makes_otherwise_is_made_at_its_step(kind: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in ({"prefetch": False}, {"workers": 2}):
        torch.manual_seed(0)
        with loader_of(stacked, kind(), in_order=True, **options) as loader:
            steps = loader.steps(0, STEPS)
            made = [plain(next(steps))]
            if "workers" in options:
                wait_for_workers(loader)
            found.append(made + list(map(plain, steps)))
    assert found[0] == found[1]
    assert "a process makes another batch than this one" in caplog.text


def test_what_cannot_be_sent_is_made_at_its_step() -> None:
    with loader_of(lambda samples: where_made(samples), workers=1) as loader:
        makers = {micro.batch for _, micro_batches in loader.steps(1, 4) for micro in micro_batches}
    assert makers == {(os.getpid(), "MainThread")}


def test_the_thread_takes_no_cores_from_the_step() -> None:
    """Nor from threads that start later, such as another library's."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with loader_of(lambda samples: torch.get_num_threads()) as loader:
            threads = [micro.batch for _, micro_batches in loader.steps(0, 3) for micro in micro_batches]
            with ThreadPoolExecutor(1) as later:
                threads.append(later.submit(torch.get_num_threads).result())
        assert (threads[0], threads[-2], threads[-1], torch.get_num_threads()) == (1, 1, 3, 3)
    finally:
        torch.set_num_threads(before)
