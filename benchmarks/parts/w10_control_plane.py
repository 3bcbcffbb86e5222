"""W10: what a rank does besides computing, simulated at up to 16,384 ranks in one process: seconds and bytes, and how
they grow."""

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Curve, Report, Table
from benchmarks.common.statistic import growth

RANKS = (8, 64, 1024, 16384)
ROWS_PER_RANK = 4
SAMPLES = 10**6
IN_A_STEP = ("order of a step",)
"""What happens in every step: it must not grow with the ranks."""


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
    for row in rows:
        limit = 0.1 if row["what"] in IN_A_STEP else 1.1
        report.checks.append(Check(f"{row['what']}: exponent of growth", row["grows like ranks to the"], limit, False))
    for unit, lines in curves.items():
        report.curves.append(Curve(f"w10-{unit}", "The control plane of one rank", "ranks", unit, lines))
    report.notes.append(
        f"{ROWS_PER_RANK} rows a rank in each step, {SAMPLES:,} samples; exponents between the two largest sizes. "
        "Process groups are torch's fake ones: nothing is sent."
    )
    return report


def simulate(ranks: int, folder: str) -> dict[str, Any]:
    """Seconds and bytes of each piece, for rank 0 of so many."""
    work = {
        "mesh": ("every rank", lambda: _mesh(ranks)),
        "order of a step": ("every rank", _order_of_a_step(ranks)),
        "packing plan": ("every rank", _packing_plan()),
        "checkpoint": ("rank 0", _checkpoint(ranks, Path(folder))),
        "introductions": ("every rank", lambda: _introductions(ranks)),
        "signs of life": ("a rank that waits", _signs_of_life(ranks)),
    }
    return {name: {"on": on, **_measure(piece)} for name, (on, piece) in work.items()}


def _measure(piece: Callable[[], int]) -> dict[str, float]:
    """Seconds of one call, and the bytes that it keeps, sends or writes: what it returns, or else its peak memory."""
    start = time.perf_counter()
    said = piece()
    seconds = time.perf_counter() - start
    if said:
        return {"seconds": seconds, "bytes": said}
    tracemalloc.start()
    piece()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seconds": seconds, "bytes": peak}


def _mesh(ranks: int) -> int:
    """Hybrid sharding on nodes of eight: torch makes the groups of all five axes."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drawbar.config.parallel_dims import ParallelDims
    from drawbar.distributed.device_mesh import build_mesh

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    build_mesh(ParallelDims(dp_replicate=ranks // 8, dp_shard=8), torch.device("cpu"))
    return 0


def _order_of_a_step(ranks: int) -> Callable[[], int]:
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
        prefetcher=Prefetcher(BatchMaker(list, unchanged), ahead=False),
    )
    steps = loader.steps(0, 10**9)
    next(steps)

    def piece() -> int:
        next(steps)
        return 0

    return piece


def _packing_plan() -> Callable[[], int]:
    import numpy as np

    from drawbar.data.plan import plan_rows

    lengths = np.random.default_rng(0).integers(10, 500, SAMPLES)

    def piece() -> int:
        plan = plan_rows(lengths, 512, 0)
        return int(plan.samples[:].nbytes + np.asarray(plan.ends).nbytes)

    return piece


def _checkpoint(ranks: int, folder: Path) -> Callable[[], int]:
    """What grows of it: the generators of all ranks. The tensors are the same at any number."""
    import torch

    from drawbar.checkpoint.format import Snapshot
    from drawbar.checkpoint.save import write_files
    from drawbar.runtime.seed import rng_state

    own = rng_state(torch.device("cpu"))
    rng = {f"seed-{rank:04d}/{name}": tensor.clone() for rank in range(ranks) for name, tensor in own.items()}
    snapshot = Snapshot(1, {"weight": torch.zeros(8)}, {"step": torch.zeros(1)}, rng, {"world_size": ranks})

    def piece() -> int:
        target = folder / str(len(list(folder.iterdir())))
        write_files(target, snapshot)
        return sum(path.stat().st_size for path in target.iterdir())

    return piece


def _introductions(ranks: int) -> int:
    """What each rank tells all others when it joins: the address of its watchdog, and its node's name."""
    told = [(("127.0.0.1", 40000 + rank % 8), f"node-{rank // 8:05d}") for rank in range(ranks)]
    messages = [pickle.dumps(one) for one in told]
    for message in messages:
        pickle.loads(message)
    return sum(map(len, messages))


def _signs_of_life(ranks: int) -> Callable[[], int]:
    """One look at what all ranks say that they do, by a rank that waits for one of them."""
    import torch.distributed as dist

    from drawbar.distributed.liveness import Liveness

    store = dist.HashStore()
    for rank in range(ranks):
        Liveness(store, rank, 1, 600.0).join()
    waiting = Liveness(store, 0, ranks, 600.0)

    def piece() -> int:
        found = waiting._look()
        return len(json.dumps({rank: str(activity) for rank, activity in found.items()}))

    return piece
