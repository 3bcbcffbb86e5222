"""W10: what a rank does besides computing, simulated at up to 16,384 ranks in one process: seconds and bytes, and how
they grow."""

import itertools
import json
import math
import pickle
import shutil
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Curve, Report, Table
from benchmarks.common.statistic import growth

RANKS = (8, 64, 1024, 16384)
ROWS_PER_RANK = 4
SAMPLES = 10**6
CONSTANT = ("order of a step", "digest of signs of life")
"""What every rank does in each step, or while it waits: it must not grow with the ranks."""
CALLS = 5


@dataclass(frozen=True)
class Share:
    """What one rank does."""

    on: str
    """Which rank."""
    run: Callable[[], Any]
    size: Callable[[Any], int] | None = None
    """The bytes that it keeps, sends or writes, from what ``run`` returned; by default, its peak memory counts."""
    prepare: Callable[[], None] | None = None
    """Called before each ``run``, and not measured."""


def measure(options: Options) -> Report:
    report = Report("W10", "the control plane, simulated")
    ranks = RANKS[:2] if options.quick else RANKS
    found = {}
    for size in ranks:
        arguments = {"ranks": size, "folder": str(options.new_folder("ranks"))}
        found[size] = options.run(Call("benchmarks.parts.w10_control_plane:simulate", arguments))
        del found[size]["spawned"]
    what = list(found[ranks[0]])
    rows = []
    curves = {
        unit: {name: [(size, max(found[size][name][unit], 1e-9)) for size in ranks] for name in what}
        for unit in ("seconds", "bytes")
    }
    for name in what:
        row: dict[str, Any] = {"what": name, "on": found[ranks[0]][name]["on"]}
        for size in ranks:
            row |= {f"s at {size:,}": found[size][name]["seconds"], f"kB at {size:,}": found[size][name]["bytes"] / 1e3}
        exponents = [growth(curves[unit][name][-2:]) for unit in curves]
        rows.append(row | {"grows like ranks to the": max(exponents)})
    report.tables.append(Table("One rank's share, by the number of ranks", rows))
    loglinear = growth([(size, size * math.log(size)) for size in ranks[-2:]])
    for row in rows:
        limit = 0.1 if row["what"] in CONSTANT else round(loglinear, 3)
        report.checks.append(Check(f"{row['what']}: exponent of growth", row["grows like ranks to the"], limit, False))
    for unit, lines in curves.items():
        report.curves.append(Curve(f"w10-{unit}", "The control plane of one rank", "ranks", unit, lines))
    report.notes.append(
        f"{ROWS_PER_RANK} rows a rank in each step, {SAMPLES:,} samples; medians of {CALLS} calls, after a first one; "
        "exponents between the two largest sizes, and what may grow is held to that of n log n. "
        "Process groups are torch's fake ones: nothing is sent."
    )
    return report


def simulate(ranks: int, folder: str) -> dict[str, Any]:
    """Seconds and bytes of each share, at so many ranks."""
    work = {
        "mesh": _mesh(ranks),
        "order of a step": _order_of_a_step(ranks),
        "packing plan": _packing_plan(),
        "checkpoint": _checkpoint(ranks, Path(folder)),
        "introductions": _introductions(ranks),
    } | _signs_of_life(ranks)
    return {name: {"on": share.on, **_measure(share)} for name, share in work.items()}


def _measure(share: Share) -> dict[str, float]:
    """Seconds of a call: the median of several, of which the first one does not count; and its bytes."""
    seconds = statistics.median([_seconds(share) for _ in range(1 + CALLS)][1:])
    if share.prepare:
        share.prepare()
    tracemalloc.start()
    made = share.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seconds": seconds, "bytes": share.size(made) if share.size else peak}


def _seconds(share: Share) -> float:
    if share.prepare:
        share.prepare()
    start = time.perf_counter()
    share.run()
    return time.perf_counter() - start


def _mesh(ranks: int) -> Share:
    """Hybrid sharding on nodes of eight: torch makes the groups of all five axes."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drawbar.config.parallel_dims import ParallelDims
    from drawbar.distributed.device_mesh import build_mesh

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def run() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        build_mesh(ParallelDims(dp_replicate=ranks // 8, dp_shard=8), torch.device("cpu"))

    return Share("every rank", run, prepare=leave)


def _order_of_a_step(ranks: int) -> Share:
    """Which rows this rank reads, in which micro-batches."""
    import numpy as np

    from drawbar.data.loader import MicroBatchSize, TrainLoader, only_sample
    from drawbar.data.prefetch import BatchMaker, Prefetcher, unchanged
    from drawbar.data.sampler import Shuffled

    class Rows:
        """Lengths alone."""

        lengths = np.random.default_rng(0).integers(10, 500, SAMPLES)
        fingerprint = ""
        samples: Any = None

        def __len__(self) -> int:
            return SAMPLES

        join = staticmethod(only_sample)

        def read(self, index: int) -> list[Any]:
            return [index]

    class Ranks:
        """Of which this one is the first."""

        rank, size = 0, ranks

        def max(self, value: int) -> int:
            return value

    loader = TrainLoader(
        Rows(),
        Shuffled(SAMPLES, 0),
        global_batch=ROWS_PER_RANK * ranks,
        micro_batch=MicroBatchSize(tokens=8192),
        ranks=Ranks(),  # type: ignore[arg-type]
        prefetcher=Prefetcher(BatchMaker(list, unchanged), prefetch=False),
    )
    steps = loader.steps(0, 10**9)
    return Share("every rank", lambda: next(steps))


def _packing_plan() -> Share:
    import numpy as np

    from drawbar.data.packing import plan_rows

    lengths = np.random.default_rng(0).integers(10, 500, SAMPLES)
    return Share(
        "every rank",
        lambda: plan_rows(lengths, 512, 0),
        size=lambda plan: int(plan.samples[:].nbytes + np.asarray(plan.ends).nbytes),
    )


def _checkpoint(ranks: int, folder: Path) -> Share:
    """What grows of it: the generators of all ranks. The tensors are the same at any number."""
    import torch

    from drawbar.checkpoint.format import Snapshot
    from drawbar.checkpoint.write import write_files
    from drawbar.runtime.seed import rng_state

    own = rng_state(torch.device("cpu"))
    rng = {f"seed-{rank:04d}/{name}": tensor.clone() for rank in range(ranks) for name, tensor in own.items()}
    snapshot = Snapshot(1, {"weight": torch.zeros(8)}, {"step": torch.zeros(1)}, rng, {"world_size": ranks})

    target = folder / "checkpoint"
    return Share(
        "rank 0",
        lambda: write_files(target, snapshot),
        size=lambda _: sum(path.stat().st_size for path in target.iterdir()),
        prepare=lambda: shutil.rmtree(target, ignore_errors=True),
    )


def _introductions(ranks: int) -> Share:
    """What each rank tells all others when it joins: the address of its watchdog, and its node's name."""
    told = [(("127.0.0.1", 40000 + rank % 8), f"node-{rank // 8:05d}") for rank in range(ranks)]
    messages = [pickle.dumps(one) for one in told]

    def run() -> None:
        pickle.dumps(told[0])
        for message in messages:
            pickle.loads(message)

    return Share("every rank", run, size=lambda _: sum(map(len, messages)))


def _signs_of_life(ranks: int) -> dict[str, Share]:
    """All ranks but one wait for that one: rank 0 reads what each says that it does, and publishes the digest."""
    import torch.distributed as dist

    from drawbar.distributed.liveness import ActivityReader, LivenessDigest, RankActivity

    store = dist.HashStore()
    reader = ActivityReader(store, ranks, silent_after=20)
    beats = itertools.count()

    def beat() -> None:
        heartbeats = next(beats)
        for rank in range(1, ranks):
            RankActivity(7, heartbeats, is_waiting=True, activity="the end of the run").publish(store, rank)
        RankActivity(6, heartbeats, activity="writing the checkpoint of step 3").publish(store, 0)

    def run() -> LivenessDigest:
        reader.read_all()
        return reader.publish()

    def size(digest: LivenessDigest) -> int:
        entries = store.multi_get([f"liveness/{rank}" for rank in range(ranks)])
        return sum(map(len, entries)) + len(json.dumps(digest))

    beat()
    run()
    return {
        "signs of life": Share("rank 0", run, size, prepare=beat),
        "digest of signs of life": Share(
            "a rank that waits", lambda: LivenessDigest.read(store), size=lambda digest: len(json.dumps(digest))
        ),
    }
