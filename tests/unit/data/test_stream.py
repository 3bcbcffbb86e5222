"""Streams: the same batches at any number of processes, each record once, and on from any step."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from drawbar.config.schema.data_section import DataSection, LimitSection, SourceSection
from drawbar.data.dataset import Sample, encode_records
from drawbar.data.loader import MicroBatchSize, Rows, SampleRows
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.data.prefetch import BatchMaker, Prefetcher
from drawbar.data.sources import LocatedRecord, open_records
from drawbar.data.stream import EndlessRankReader, RankReader, StreamLoader, StreamSettings
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from exhaustive import some
from harness import run_ranks
from tiny import CPU

Batch = list[tuple[int, int, int]]
"""For each sample its record, its number among that record's samples, and its id."""


@dataclass
class Numbers:
    """A source of so many records, from the number ``first`` on."""

    first: int
    records: int
    weight: float | None = None
    size: int | None = None
    given: int = 0
    """Records that were read from it."""

    def read(self, share: int, shares: int, first: int) -> Iterator[LocatedRecord]:
        for number in range(share + first * shares, self.records, shares):
            self.given += 1
            yield LocatedRecord(number // shares, {"number": self.first + number}, f"record {number}")
        self.size = self.records


def samples_of(record: dict[str, Any]) -> list[Sample] | None:
    """Of every five records one is dropped, and one gives three samples."""
    number = record["number"]
    count = {0: 0, 1: 3}.get(number % 5, 1)
    return [{"input_ids": [number] * (1 + number % 7), "number": number, "part": part} for part in range(count)] or None


def one_sample_of(record: dict[str, Any]) -> list[Sample]:
    return [{"input_ids": [1], "number": record["number"], "part": 0}]


Encode = Callable[[dict[str, Any]], list[Sample] | None]


def rows_of(located: list[LocatedRecord], encode: Encode, packed: bool) -> Rows | None:
    records = [one.record for one in located if encode(one.record)]
    if not records:
        return None
    samples = encode_records(records, encode, describe=str)
    return PackedRows(samples, plan_rows(samples.lengths, 12, 0), "sample") if packed else SampleRows(samples)


def collate(rows: list[Sample]) -> Batch:
    found: Batch = []
    for row in rows:
        numbers, parts = ([row[name]] if isinstance(row[name], int) else row[name] for name in ("number", "part"))
        found += zip(numbers, parts, row["ids"], strict=True)
    return found


TWO_ROWS = MicroBatchSize(rows=2)


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    lanes: int = 6
    records: int = 2
    global_batch: int = 4
    micro_batch: MicroBatchSize = TWO_ROWS
    packed: bool = False
    shuffle: bool = True
    steps: int = 30
    first: int = 0
    prefetch: bool = True
    state: dict[str, Any] | None = field(default=None, hash=False)
    code: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def sources(self) -> list[Numbers]:
        starts = [sum(self.sizes[:source]) for source in range(len(self.sizes))]
        weights = self.weights or [None] * len(self.sizes)
        return [Numbers(*of_source) for of_source in zip(starts, self.sizes, weights, strict=True)]

    def loader(
        self, world: Distributed, encode: Encode = samples_of, sources: list[Numbers] | None = None
    ) -> StreamLoader[Batch]:
        loader = StreamLoader(
            sources or self.sources,
            StreamSettings(
                seed=3,
                shuffle=self.shuffle,
                lanes=self.lanes,
                records_per_lane=self.records,
                global_batch=self.global_batch,
                fingerprint="fingerprint",
                code=self.code,
            ),
            lambda located: rows_of(located, encode, self.packed),
            ranks=world.dp_ranks,
            micro_batch=self.micro_batch,
            prefetcher=Prefetcher(BatchMaker(collate), prefetch=self.prefetch),
        )
        if self.state is not None:
            loader.load(json.loads(json.dumps(self.state)))
        return loader

    @property
    def samples(self) -> list[tuple[int, int]]:
        """What an epoch without weights holds."""
        return [
            (sample["number"], sample["part"])
            for number in range(sum(self.sizes))
            for sample in samples_of({"number": number}) or []
        ]


@dataclass
class Step:
    """One step of one rank."""

    counted: Batch
    forwards: int
    padding: list[Batch]
    state: dict[str, Any]


def run(case: Case, world: Distributed, encode: Encode = samples_of) -> list[Step]:
    loader = case.loader(world, encode)
    return [
        Step(
            [sample for micro in micro_batches if not micro.is_padding for sample in micro.batch],
            len(micro_batches),
            [micro.batch for micro in micro_batches if micro.is_padding],
            loader.state(),
        )
        for _, micro_batches in loader.steps(case.first, case.steps)
    ]


def alone() -> Distributed:
    return Distributed(RankInfo(), CPU, timeout=60)


def batches(of_ranks: list[list[Step]]) -> list[Batch]:
    """The samples of each step over all ranks, in ascending order; checks what must hold of every step."""
    found = []
    for steps in zip(*of_ranks, strict=True):
        assert len({step.forwards for step in steps}) == 1
        assert all(step.state == steps[0].state for step in steps)
        assert any(step.counted for step in steps)
        found.append(sorted(sample for step in steps for sample in step.counted))
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) > 1))
    weighted = draw(st.integers(0, 3)) == 0
    return Case(
        sizes=tuple(sizes),
        weights=tuple(draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in sizes) if weighted else None,
        lanes=draw(st.sampled_from([6, 12])),
        records=draw(st.integers(2, 6)),
        global_batch=draw(st.integers(1, 9)),
        micro_batch=draw(st.sampled_from([MicroBatchSize(rows=1), MicroBatchSize(rows=3), MicroBatchSize(tokens=16)])),
        packed=draw(st.booleans()),
        shuffle=draw(st.booleans()),
    )


def drawn(count: int) -> list[Case]:
    """Random cases, others in every run of the tests."""
    found: list[Case] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


UNEVEN = Case((17, 4, 31))
HARD_CASES = (
    UNEVEN,
    replace(UNEVEN, packed=True, global_batch=3),
    replace(UNEVEN, weights=(1, 2, 1)),
    Case((2,), lanes=48, steps=6),  # most ranks have padding micro-batches alone, from the first step on
    Case((6, 0, 1), global_batch=9, steps=9),  # the source in the middle is empty, and the last is dropped
    Case((40,), lanes=6, records=40, micro_batch=MicroBatchSize(tokens=9)),  # an epoch is one block
)


@settings(max_examples=25)
@given(case=cases().filter(lambda case: case.weights is None))
@example(case=HARD_CASES[0])
@example(case=HARD_CASES[1])
@example(case=HARD_CASES[3])
@example(case=HARD_CASES[4])
def test_every_sample_once_an_epoch(case: Case) -> None:
    """Each epoch ends with a step, and all steps but its last one are whole."""
    epochs: list[Batch] = [[]]
    for step in run(case, alone()):
        epochs[-1] += step.counted
        found = sorted((record, part) for record, part, _ in epochs[-1])
        if len(found) < len(case.samples):
            assert len(set(found)) == len(found)
            assert case.packed or len(step.counted) == case.global_batch
        else:
            assert found == case.samples
            assert len({number for _, _, number in epochs[-1]}) == len(found)
            assert sorted(epochs[-1]) == sorted(epochs[0])  # in each epoch a sample has the same id
            epochs.append([])
    assert len(epochs) > 1 or len(case.samples) > case.steps * case.global_batch


def test_without_shuffle_records_come_in_their_order() -> None:
    """And a source after the other, at once and in every epoch."""
    case = Case((31, 9), lanes=6, records=3, shuffle=False, global_batch=8)
    steps = case.loader(alone(), one_sample_of).steps(0, 10)
    found = [sorted(number for micro in micros for number, _, _ in micro.batch) for _, micros in steps]
    assert found == [list(range(first, first + 8)) for first in range(0, 40, 8)] * 2


def test_shuffle_changes_with_the_epoch() -> None:
    case = Case((60,), records=10, global_batch=6, steps=24)
    steps = [sorted((record, part) for record, part, _ in step.counted) for step in run(case, alone())]
    assert len(case.samples) == 72
    assert sorted(itertools.chain(*steps[:12])) == sorted(itertools.chain(*steps[12:])) == case.samples
    assert not any(step in steps[12:] for step in steps[:12])


def run_all(chosen: list[Case]) -> list[list[Step]]:
    """On one rank of several."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        return [run(case, world) for case in chosen]


@pytest.fixture(scope="module")
def at_two_ranks() -> list[tuple[Case, list[list[Step]]]]:
    chosen = [*HARD_CASES, *drawn(14)]
    of_ranks = run_ranks(run_all, 2, chosen)
    return list(zip(chosen, map(list, zip(*of_ranks, strict=True)), strict=True))


def check_padding(of_ranks: list[list[Step]]) -> None:
    for steps in of_ranks:
        for step in steps:
            assert all(len({number for _, _, number in one}) == len(one) for one in step.padding)
            assert bool(step.counted) == (len(step.padding) < step.forwards)


def test_two_ranks_train_the_batches_of_one(at_two_ranks: list[tuple[Case, list[list[Step]]]]) -> None:
    for case, of_ranks in at_two_ranks:
        assert batches(of_ranks) == batches([run(case, alone())]), case
        check_padding(of_ranks)
    assert any(step.padding for _, of_ranks in at_two_ranks for steps in of_ranks for step in steps)


@pytest.mark.exhaustive
def test_what_two_ranks_saved_goes_on_at_one_and_at_three(
    at_two_ranks: list[tuple[Case, list[list[Step]]]],
) -> None:
    """Three ranks go on from one step, then one rank from a later one."""
    resumed = []
    for number, (case, of_ranks) in enumerate(at_two_ranks):
        stop = min(1 + number, case.steps - 2)
        resumed.append(replace(case, first=stop, state=of_ranks[0][stop - 1].state))
    at_three = [list(steps) for steps in zip(*run_ranks(run_all, 3, resumed), strict=True)]
    for (case, of_two), later, of_three in zip(at_two_ranks, resumed, at_three, strict=True):
        assert batches(of_two)[later.first :] == batches(of_three), case
        check_padding(of_three)
        last = replace(case, first=case.steps - 1, state=of_three[2][-2].state)
        assert batches([run(last, alone())]) == batches(of_two)[-1:], case


def test_padding_micro_batches_are_the_same_in_a_run_that_is_resumed(
    at_two_ranks: list[tuple[Case, list[list[Step]]]],
) -> None:
    """Dropout draws numbers for them, too. A rank without rows in its first step knows no row of its own."""
    expected, resumed = [], []
    for case, of_ranks in at_two_ranks:
        bare = [step for step in range(1, case.steps) if not all(steps[step].counted for steps in of_ranks)]
        resumed += [replace(case, first=step, state=of_ranks[0][step - 1].state) for step in bare[:1]]
        expected += [[[step.padding for step in steps[bare[0] :]] for steps in of_ranks]] if bare else []
    found = [
        [[step.padding for step in steps] for steps in of_ranks]
        for of_ranks in zip(*run_ranks(run_all, 2, resumed), strict=True)
    ]
    assert found == expected != []


@settings(max_examples=25)
@given(case=cases(), stops=st.lists(st.integers(0, 30), max_size=5))
@example(case=HARD_CASES[1], stops=[1, 2, 3, 4])
@example(case=HARD_CASES[2], stops=list(range(30)))
def test_a_run_that_is_resumed_again_and_again_is_the_same_run(case: Case, stops: list[int]) -> None:
    expected = batches([run(case, alone())])
    found: list[Batch] = []
    state = None
    edges = [0, *sorted(stops), case.steps]
    for first, last in itertools.pairwise(edges):
        steps = run(replace(case, first=first, steps=last, state=state), alone())
        found += batches([steps])
        state = steps[-1].state if steps else state
    assert found == expected


def test_the_position_can_be_set_back() -> None:
    """In the same process, in the middle of a block, with the next one read already."""
    loader = UNEVEN.loader(alone())
    expected = [(step, [micro.batch for micro in micros]) for step, micros in loader.steps(0, 25)]
    loader.load(UNEVEN.loader(alone()).state())
    for step, _ in loader.steps(0, 7):
        if step == 7:
            state = loader.state()
    list(loader.steps(7, 12))
    loader.load(state)
    assert [(step, [micro.batch for micro in micros]) for step, micros in loader.steps(7, 25)] == expected[7:]


def test_other_data_is_refused() -> None:
    loader = UNEVEN.loader(alone())
    with pytest.raises(UserError, match="the training data changed") as caught:
        loader.load({**loader.state(), "fingerprint": "another"})
    assert "--fork NEWNAME" in str(caught.value.remedy)


def test_changed_code_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """It may be that of a metric."""
    before, now = (
        Case(UNEVEN.sizes, code={"task.py": "a", "metric.py": metric}).loader(alone()) for metric in ("b", "c")
    )
    state = before.state()
    before.load(state)
    assert not caplog.messages
    now.load(state)
    assert "changed since the checkpoint was written: metric.py;" in caplog.text


@pytest.mark.parametrize("second", some([1, 3, 10, 300], 2))
def test_weights_decide_the_proportions_and_sources_begin_again(second: int) -> None:
    """However small a source is, however often it begins again within one block, and where no block can have its share
    exactly."""
    case = Case((2000, second, 1000), weights=(1.0, 2.0, 1.0), records=5, global_batch=20, steps=400)
    steps = run(case, alone(), encode=one_sample_of)
    numbers = [number for step in steps for number, _, _ in step.counted]
    sources = Counter(0 if number < 2000 else 1 if number < 2000 + second else 2 for number in numbers)
    assert sources[1] / len(numbers) == pytest.approx(0.5, abs=0.005)
    assert sources[0] / len(numbers) == pytest.approx(0.25, abs=0.005)
    read_from = Counter(number for number in numbers if 2000 <= number < 2000 + second)
    assert len(read_from) == second
    unfinished = 2 * case.records * case.lanes / second  # of the last block, not all may have come yet
    assert max(read_from.values()) - min(read_from.values()) <= 1 + unfinished


@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
def test_a_stream_without_samples_is_refused(weights: tuple[float, float] | None) -> None:
    loader = Case((31, 7), weights=weights).loader(alone(), lambda record: None)
    with pytest.raises(UserError, match="no samples: the task's encode dropped all records"):
        next(loader.steps(0, 1))


@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
def test_long_stretches_without_samples_are_passed(weights: tuple[float, float] | None) -> None:
    """One record in 300 gives a sample: most blocks are empty, and all the data behind it too."""
    case = Case((100, 200), weights=weights, global_batch=1)
    loader = case.loader(alone(), lambda record: one_sample_of(record) if record["number"] == 103 else None)
    assert [micro.batch[0][0] for _, micros in loader.steps(0, 5) for micro in micros] == [103] * 5


@pytest.mark.parametrize(("lanes", "records", "start"), [(4, 2, 24), (12, 3, 24), (6, 5, 24), (5, 2, 20)])
def test_a_fork_with_other_lanes_goes_on_where_a_block_began(
    lanes: int, records: int, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After 28 records, of blocks of 12. None is left out, and few come a second time."""
    before = Case((200, 100))
    seen = run(replace(before, steps=7), alone(), one_sample_of)
    after = replace(before, lanes=lanes, records=records, state=seen[-1].state, steps=(300 - start) // 4)
    forked = run(after, alone(), one_sample_of)
    assert "other lanes or blocks than before: it goes on where a block of 12 records began" in caplog.text
    first, second = ([number for step in steps for number, *_ in step.counted] for steps in (seen, forked))
    assert len(set(second)) == len(second) == 300 - start
    assert {*first, *second} == set(range(300))
    assert forked[-1].state["cursor"]["epoch"] == 1


def test_a_weighted_source_that_the_limit_leaves_out_is_an_error(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for file in files:
        file.write_text("".join(f'{{"number": {number}}}\n' for number in range(20)))
    sources = [SourceSection(files=str(file), weight=1.0) for file in files]
    streams = open_records(DataSection(train=sources, limit=LimitSection(train=20)), "train").streams
    loader = Case((20, 20), weights=(1.0, 1.0), global_batch=30).loader(alone(), sources=streams)
    with pytest.raises(UserError, match="a source with a weight gave no samples: the sources before it use up"):
        next(loader.steps(0, 1))


def test_a_closed_stream_encodes_no_further_lane() -> None:
    ahead, goes_on = threading.Event(), threading.Event()
    encoded: set[int] = set()

    def encode(record: dict[str, Any]) -> list[Sample]:
        encoded.add(record["number"])
        if record["number"] >= 12:  # in the second block
            ahead.set()
            goes_on.wait(60)
        return one_sample_of(record)

    loader = Case((60,), prefetch=False).loader(alone(), encode)
    next(loader.steps(0, 9))
    assert ahead.wait(60)
    loader.close()
    goes_on.set()
    loader._thread.shutdown()
    assert sorted(encoded) == [*range(13), 18]


def test_an_error_of_the_stream_is_raised_in_its_step() -> None:
    """What is read ahead costs no step before it."""

    class Broken(Numbers):
        def read(self, share: int, shares: int, first: int) -> Iterator[LocatedRecord]:
            for located in super().read(share, shares, first):
                if located.record["number"] == 30:
                    raise UserError("not JSON", where="train.jsonl:31", remedy="mend it")
                yield located

    made: dict[bool, list[int]] = {False: [], True: []}
    for ahead, steps in made.items():
        loader = Case((60,), prefetch=ahead).loader(alone(), sources=[Broken(0, 60)])
        with pytest.raises(UserError, match="not JSON"):
            steps.extend(step for step, _ in loader.steps(0, 40))
    assert made[True] == made[False] != []


@pytest.mark.parametrize("kind", [RankReader, EndlessRankReader])
def test_a_read_that_failed_is_made_again(kind: type[RankReader]) -> None:
    """It fails again, and does not go on behind the record that could not be read."""

    class Broken(Numbers):
        def read(self, share: int, shares: int, first: int) -> Iterator[LocatedRecord]:
            for located in super().read(share, shares, first):
                if located.record["number"] == 8:
                    raise UserError("not JSON", where="train.jsonl:9", remedy="mend it")
                yield located

    reader = kind(Broken(0, 60), alone().dp_ranks)
    assert [number for number, _ in reader.take(0, 6)[0]] == [0, 1, 2, 3, 4, 5]
    for _ in range(3):
        with pytest.raises(UserError, match="not JSON"):
            reader.take(6, 12)


@pytest.mark.parametrize("weights", [None, (1.0, 1.0)])
def test_memory_is_constant(weights: tuple[float, float] | None) -> None:
    """The block in use, the next one, a record of each source to know whether there are more, and the step that is
    prepared ahead; never more."""
    case = Case((1500, 1500), weights=weights, lanes=6, records=6, global_batch=10)
    sources = case.sources
    loader = case.loader(alone(), one_sample_of, sources)
    ahead = [sum(source.given for source in sources) - step * 10 for step, _ in loader.steps(0, 300)]
    assert len(ahead) == 300
    assert max(ahead) <= 2 * 36 + 2 + 10
