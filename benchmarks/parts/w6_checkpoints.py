"""W6: saving and loading: how long training waits, when a checkpoint is safe on the disk, how long a start takes."""

import ctypes
import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.process_memory import status_bytes
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, ratio

SIZES = {"small": (256, 6), "middle": (640, 8), "large": (1024, 10)}
"""Hidden size and layers of a Llama, by name."""
QUICK = {"tiny": (32, 2)}
SAVES = 2
"""One way after the other; the last of each counts: what it needs only once has been made before."""
RANKS = 2
LAYOUTS = {
    "ddp": ["parallel.strategy=ddp"],
    "fsdp": ["parallel.strategy=fsdp"],
    "tensor": [f"parallel.tensor={RANKS}"],
    "pipeline": [f"parallel.pipeline={RANKS}"],
}


def measure(options: Options) -> Report:
    from benchmarks.peers.checkpoint_ways import ALONE, PARTS, TOGETHER

    report = Report("W6", "saving and loading model and optimizer")
    found: dict[str, Any] = {}
    sizes = QUICK if options.quick else SIZES
    for size in sizes:
        found = _measured(ALONE, size, 1, options)
        report.tables.append(_table(f"One process, {size}", found))
    _check(report, f"one process, {size}: {PARTS}", found, PARTS)
    found = _measured(TOGETHER, size, RANKS, options)
    report.tables.append(_table(f"{RANKS} ranks of FSDP, {size}", found))
    _check(report, f"{RANKS} ranks, {size}: {PARTS}", found, PARTS)
    _add_other_layouts(report, size, options)
    report.notes += [
        "Training waits: from the call until it returns. Durable: until every byte is synced to the disk; if a way "
        "does not sync by itself, the benchmark syncs afterwards, within that time. The disk alone: the same bytes "
        "written from where they are, without format, copy or checksum. A copy in memory alone: the same bytes copied"
        " once to memory that is ready, the least that training must wait if it continues during the write. The "
        "write: from when training continues until every byte is synced to the disk. Of two saves the second counts.",
        "Memory: the peak of the process, or of rank 0, above its previous level. Loading reads files that were just "
        "written, and so mostly from memory.",
    ]
    return report


def _measured(ways: tuple[str, ...], size: str, ranks: int, options: Options) -> dict[str, list[dict[str, Any]]]:
    """Each round is a fresh process, or one a rank, in which the ways take turns."""
    arguments = {"ways": ways, "folder": str(options.new_folder("w6")), "shape": (QUICK | SIZES)[size]}
    call = Call("benchmarks.parts.w6_checkpoints:save_and_load", arguments, ranks=ranks)
    rounds = [options.run(call) for _ in range(options.rounds)]
    return {way: [found[way] for found in rounds] for way in ways}


def _table(title: str, found: dict[str, list[dict[str, Any]]]) -> Table:
    from benchmarks.peers.checkpoint_ways import BACKGROUND, DISK, MEMORY

    def of(key: str, results: list[dict[str, Any]], unit: float = 1.0) -> Statistic:
        return Statistic.of(one[key] / unit for one in results)

    rows: list[dict[str, Any]] = []
    for way, results in found.items():
        writes = way != MEMORY
        row: dict[str, Any] = {"way": way, "MB": round(results[0]["bytes"] / 1e6) if writes else None}
        row["training waits s"] = None if way == DISK else of("stall_s", results)
        row["durable after s"] = of("durable_s", results) if writes else None
        goes_on = way in BACKGROUND
        row["the write: rate ÷ the disk's"] = _write_rate(results, found[DISK]) if goes_on else None
        row["durable: rate ÷ the disk's"] = _rate(results, found[DISK]) if writes else None
        row["memory MB"] = None if way == DISK else of("peak_bytes", results, 1e6)
        row["load s"] = of("load_s", results)
        row["memory of loading MB"] = None if way == DISK else of("load_peak_bytes", results, 1e6)
        rows.append(row)
    return Table(title, rows)


def _rate(ours: list[dict[str, Any]], disk: list[dict[str, Any]]) -> Statistic:
    """Bytes a second that are safe on the disk, as a share of what the disk alone can do."""
    return ratio(*([one["bytes"] / one["durable_s"] for one in results] for results in (ours, disk)))


def _write_rate(ours: list[dict[str, Any]], disk: list[dict[str, Any]]) -> Statistic:
    """The same of the write alone, which begins when training goes on."""
    written = [one | {"durable_s": one["durable_s"] - one["stall_s"]} for one in ours]
    return _rate(written, disk)


def _check(report: Report, what: str, found: dict[str, list[dict[str, Any]]], way: str) -> None:
    from benchmarks.peers.checkpoint_ways import DISK

    waits = Statistic.of(one["stall_s"] / one["durable_s"] for one in found[way]).median
    written, durable = (rate(found[way], found[DISK]).median for rate in (_write_rate, _rate))
    report.checks.append(Check(f"{what}: the write's rate ÷ the disk's", written, 0.8))
    report.checks.append(Check(f"{what}: rate from the call until durable ÷ the disk's", durable, 0.8))
    report.checks.append(Check(f"{what}: training waits ÷ durable after", waits, 0.15, False))


def _add_other_layouts(report: Report, size: str, options: Options) -> None:
    """What each rank reads of a checkpoint in parts that another layout has written."""
    shape = (QUICK | SIZES)[size]
    folder = str(options.new_folder("w6-parts"))
    rows = []
    saving = {"ways": ["drawbar, parts"], "folder": folder, "shape": shape, "keep": True}
    options.run(Call("benchmarks.parts.w6_checkpoints:save_and_load", saving, ranks=RANKS))
    for name, strategy in LAYOUTS.items():
        arguments = {"folder": folder, "shape": shape, "strategy": strategy}
        got = options.run(Call("benchmarks.parts.w6_checkpoints:bytes_of_loading", arguments, ranks=RANKS))
        rows.append(
            {"read by": name, "needs MB": got["needed"] / 1e6, "reads MB": got["read"] / 1e6}
            | {"ratio": got["read"] / got["needed"]}
        )
        report.checks.append(
            Check(f"bytes that {name} reads ÷ those it needs", got["read"] / got["needed"], 1.1, False)
        )
    report.tables.append(Table(f"A checkpoint of {RANKS} ranks of FSDP, read in another layout, rank 0", rows))


def _settings(shape: tuple[int, int], folder: str) -> list[str]:
    hidden, layers = shape
    sizes = f"hidden_size: {hidden}, intermediate_size: {hidden * 3}, num_hidden_layers: {layers}"
    return [
        *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama", "precision=fp32", "train.steps=1"),
        f"task.from_scratch={{{sizes}, num_attention_heads: 4, vocab_size: 8192}}",
        f"run.dir={folder}/runs",
    ]


def save_and_load(ways: list[str], folder: str, shape: tuple[int, int], keep: bool = False) -> dict[str, Any]:
    """Of each way: seconds that training waits, until the files are on the disk, and to load them again; bytes, and
    peak memory.

    Args:
        keep: leave the files of the last way.
    """
    from benchmarks.peers.checkpoint_ways import open_way
    from benchmarks.peers.opened import open_task

    strategy = ["parallel.strategy=fsdp"] if os.environ.get("WORLD_SIZE") else []
    target = Path(folder) / "checkpoints"
    with ExitStack() as stack:
        run = open_task([*_settings(shape, folder), *strategy], stack)
        engine = run.engine()
        for parameter in engine.module.parameters():
            parameter.grad = parameter.detach().clone()
        engine.updater.step(1e-3, lambda grad_norm: True)  # so that the optimizer has its state
        found = {}
        for way in ways:
            _remove(target, run.world)
            _give_back_memory()
            found[way] = _of_one_way(open_way(way, engine, run.world), target, run.world)
        if not keep:
            _remove(target, run.world)
    return found


def _of_one_way(way: Any, target: Path, world: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(SAVES):
        _remove(target, world)
        before = _restart_peak()
        begin = time.perf_counter()
        finish = way.save(target)
        found["stall_s"] = time.perf_counter() - begin
        finish()
        world.barrier("saving")
        if world.is_rank0:
            _force_to_disk(target)
        found["durable_s"] = time.perf_counter() - begin
        found["peak_bytes"] = status_bytes("VmHWM") - before
        world.barrier("saving")
    before = _restart_peak()
    begin = time.perf_counter()
    way.load(target)
    world.barrier("loading")
    found["load_s"] = time.perf_counter() - begin
    found["load_peak_bytes"] = status_bytes("VmHWM") - before
    found["bytes"] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return found


def _remove(target: Path, world: Any) -> None:
    world.barrier("measuring")
    if world.is_rank0:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()  # what is left of earlier writes
    world.barrier("making room")


def bytes_of_loading(folder: str, shape: tuple[int, int], strategy: list[str]) -> dict[str, int]:
    """What this rank reads of a checkpoint, and the size of what it needs."""
    from benchmarks.peers.opened import open_task
    from drawbar.checkpoint.all_ranks import read_on_all_ranks
    from drawbar.engines.results import EngineState

    with ExitStack() as stack:
        run = open_task([*_settings(shape, folder), *strategy], stack)
        engine = run.engine()
        checkpoint = Path(folder) / "checkpoints" / "step-00000001"
        found = stack.enter_context(read_on_all_ranks(checkpoint, run.world))
        before = _bytes_read()
        engine.load(EngineState(found.model, found.optimizer, found.state["engine"]))
        read = _bytes_read() - before
        state = engine.parts.state
        needed = sum(box.bytes for box in (*state.local_weight_boxes(), *state.local_optimizer_boxes()))
    return {"read": read, "needed": needed}


def _bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def _give_back_memory() -> None:
    """What the way before has freed: the next one would find it ready."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # of glibc


def _restart_peak() -> int:
    """Let the peak of memory begin anew. Returns what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def _force_to_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
