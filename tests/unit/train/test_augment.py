"""``Task.augment``: its chance is that of the seed, the epoch and the sample, and of nothing else."""

from collections.abc import Iterator

import numpy as np

import drawbar
from drawbar.config.schema.run_config import RunConfig, RunSection
from drawbar.config.schema.task_sections import TaskConfig
from drawbar.data.dataset import Sample, encode_records
from drawbar.data.loader import EvalLoader, Loader, MicroBatchSize, Rows, SampleRows, TrainLoader
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.data.prefetch import Augment, BatchMaker, Prefetcher
from drawbar.data.sampler import Shuffled
from drawbar.data.sources import LocatedRecord
from drawbar.data.stream import StreamLoader, StreamSettings
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.train.batches import make_augment
from harness import run_ranks
from tiny import CPU

RECORDS = 26
LAYOUTS = ["padded", "packed", "streaming", "packed streaming"]

Draws = dict[int, int]
"""What was drawn for each record."""


class Noisy(drawbar.Task):
    """A task that draws a number for each sample."""

    def augment(self, sample: Sample, train: bool, rng: np.random.Generator) -> Sample:
        return {**sample, "noise": int(rng.integers(2**60))}


def augment_of(seed: int, train: bool) -> Augment:
    config = RunConfig(task=TaskConfig(), run=RunSection(seed=seed))
    return make_augment(Noisy(config), config, train)


def rows_of(numbers: range | list[int], packed: bool) -> Rows:
    records = [{"input_ids": [1] * (1 + number % 5), "number": number, "noise": 0} for number in numbers]
    samples = encode_records(records, lambda record: record, describe=str)
    return PackedRows(samples, plan_rows(samples.lengths, 6, 0), "sample") if packed else SampleRows(samples)


def collate(rows: list[Sample]) -> Draws:
    found: Draws = {}
    for row in rows:
        numbers, draws = ([row[name]] if isinstance(row[name], int) else row[name] for name in ("number", "noise"))
        found |= zip(numbers, draws, strict=True)
    return found


class Source:
    """The records as a stream."""

    weight = None

    def read(self, share: int, shares: int, first: int) -> Iterator[LocatedRecord]:
        for number in range(share + first * shares, RECORDS, shares):
            yield LocatedRecord(number // shares, {"number": number}, str(number))


def loader_of(layout: str, seed: int, world: Distributed) -> Loader[Draws]:
    packed, micro_batch = "packed" in layout, MicroBatchSize(rows=2)
    prefetcher = Prefetcher(BatchMaker(collate, augment_of(seed, train=True)))
    if "streaming" in layout:
        settings = StreamSettings(seed=0, shuffle=True, lanes=2, records_per_lane=4, global_batch=5, fingerprint="")

        def encode(located: list[LocatedRecord]) -> Rows:
            return rows_of([one.record["number"] for one in located], packed)

        return StreamLoader(
            [Source()], settings, encode, ranks=world.dp_ranks, micro_batch=micro_batch, prefetcher=prefetcher
        )
    rows = rows_of(range(RECORDS), packed)
    sampler = Shuffled(len(rows), seed=0)
    return TrainLoader(
        rows,
        sampler,
        global_batch=5,
        micro_batch=micro_batch,
        ranks=world.dp_ranks,
        prefetcher=prefetcher,
    )


def draws(layout: str, seed: int, world: Distributed) -> list[Draws]:
    """What this rank drew in each of two epochs."""
    epochs: list[Draws] = [{}, {}]
    loader = loader_of(layout, seed, world)
    epoch = 0
    for _, micro_batches in loader.steps(0, 100):
        for micro in micro_batches:
            if not micro.is_padding:
                assert not epochs[epoch].keys() & micro.batch.keys()
                epochs[epoch] |= micro.batch
        epoch = int(loader.epoch)
        if epoch == 2:
            break
    return epochs


def draws_of_all(seeds: list[int]) -> list[list[Draws]]:
    """On one rank of several."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        return [draws(layout, seed, world) for layout in LAYOUTS for seed in seeds]


def test_two_processes_draw_what_one_draws() -> None:
    """In every layout; and epochs, samples and seeds draw differently."""
    at_two = zip(*run_ranks(draws_of_all, 2, [0, 1]), strict=True)
    alone = draws_of_all([0, 1])
    for one, ranks in zip(alone, at_two, strict=True):
        for epoch in (0, 1):
            first, second = (rank[epoch] for rank in ranks)
            assert first
            assert second
            assert not first.keys() & second.keys()
            assert first | second == one[epoch]
            assert one[epoch].keys() == set(range(RECORDS))
    for of_seed, of_other in zip(alone[::2], alone[1::2], strict=True):
        drawn = [draw for epochs in (of_seed, of_other) for epoch in epochs for draw in epoch.values()]
        assert len(set(drawn)) == 4 * RECORDS


def test_packing_changes_no_draw() -> None:
    world = Distributed(RankInfo(), CPU, timeout=60)
    assert draws("padded", 0, world) == draws("packed", 0, world)
    assert draws("streaming", 0, world) == draws("packed streaming", 0, world)


def evaluated(world_size: int, rows_a_forward: int) -> Draws:
    found: Draws = {}
    for rank in range(world_size):
        loader = EvalLoader(
            rows_of(range(RECORDS), packed=False),
            micro_batch=MicroBatchSize(rows=rows_a_forward),
            dp_rank=rank,
            dp_size=world_size,
            collate=collate,
            augment=augment_of(0, train=False),
        )
        passes = [[(micro.batch, not micro.is_padding) for micro in loader] for _ in range(2)]
        assert passes[0] == passes[1]
        for batch, counts in passes[0]:
            found |= batch if counts else {}
    return found


def test_every_evaluation_draws_the_same() -> None:
    expected = evaluated(1, 4)
    assert len(set(expected.values())) == RECORDS
    assert evaluated(2, 4) == evaluated(3, 2) == evaluated(1, 4) == expected


def test_an_augment_cannot_change_which_sample_it_is() -> None:
    class Renamed(drawbar.Task):
        def augment(self, sample: Sample, train: bool, rng: np.random.Generator) -> Sample:
            return {"input_ids": sample["input_ids"]}

    config = RunConfig(task=TaskConfig())
    augment = make_augment(Renamed(config), config, train=True)
    assert augment({"input_ids": [1], "label": 2, "id": 7, "ids": [7]}, 0) == {"input_ids": [1], "id": 7, "ids": [7]}
