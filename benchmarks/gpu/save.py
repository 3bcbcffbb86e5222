"""Saving and loading 1.46 B parameters with their moments; are resumed runs the same bits, and GPUs as CPUs."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_model import MODEL, TINY
from benchmarks.gpu.setting import Place, Setting

SAVES = 2
"""The first of a process makes the buffers that the second finds."""


def settings(place: Place) -> list[Setting]:
    folder = {"folder": str(place.scratch)}
    large = {**folder, "sizes": TINY if place.quick else MODEL}
    small = {**folder, "sizes": TINY if place.quick else TINY | {"hidden_size": 512, "intermediate_size": 1408}}
    return [
        Setting("save and load", "benchmarks.gpu.save:save_and_load", large, seconds=200),
        Setting("bitwise resume", "benchmarks.gpu.save:resume", small),
        Setting("CPU and GPU", "benchmarks.gpu.save:cpu_and_gpu", small),
    ]


def save_and_load(sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    """Of each save, seconds that training waits, and until every byte is on the disk; seconds to load; bytes."""
    from benchmarks.peers.checkpoint_ways import PARTS, open_way

    run, engine = _opened(sizes, folder, [], None)
    _step(run, engine)
    way, target = open_way(PARTS, engine, run.world), Path(folder) / "checkpoints"
    stalls, durable, size = [], [], 0
    for _ in range(SAVES):
        _remove(target)
        _synchronize(run)
        begin = time.perf_counter()
        finish = way.save(target)
        stalls.append(time.perf_counter() - begin)
        finish()
        durable.append(time.perf_counter() - begin)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    begin = time.perf_counter()
    way.load(target)
    _synchronize(run)
    loaded = time.perf_counter() - begin
    return {"gib": size / 2**30, "stall_s": stalls, "durable_s": durable, "load_s": loaded}


def resume(sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    """Steps after a checkpoint, and the same steps after loading it, with deterministic kernels."""
    from benchmarks.peers.checkpoint_ways import PARTS, open_way
    from drawbar.runtime.seed import use_deterministic_kernels

    use_deterministic_kernels()
    run, engine = _opened(sizes, folder, [], None)
    for _ in range(2):
        _step(run, engine)
    way = open_way(PARTS, engine, run.world)
    way.save(Path(folder) / "checkpoints")()
    went_on = [_step(run, engine) for _ in range(3)]
    way.load(Path(folder) / "checkpoints")
    resumed = [_step(run, engine) for _ in range(3)]
    return {"bitwise": went_on == resumed, "losses": went_on, "resumed": resumed}


def cpu_and_gpu(sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    """Largest relative difference of a loss of five steps in fp32 on this device from those on the CPU."""
    found = []
    for device in (torch.device("cpu"), None):
        run, engine = _opened(sizes, folder, ["precision=fp32"], device)
        found.append([_step(run, engine) for _ in range(5)])
    differs = max(abs(here / there - 1) for there, here in zip(*found, strict=True))
    return {"differs_by": differs, "cpu": found[0], "device": found[1]}


def _opened(sizes: dict[str, Any], folder: str, more: list[str], device: torch.device | None) -> tuple[Any, Any]:
    from benchmarks.peers.opened import open_task

    text = ", ".join(f"{name}: {str(value).lower()}" for name, value in sizes.items())
    run = open_task(
        [
            *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama", "parallel.strategy=single"),
            *(f"task.from_scratch={{{text}}}", f"run.dir={folder}/runs", "train.steps=10", "optim.lr=1e-3"),
            *("data.sequence_length=64", "data.padding_free=false", *more),
        ],
        device=device,
    )
    return run, run.engine()


def _step(run: Any, engine: Any) -> float:
    import drawbar
    from drawbar.data.loader import MicroBatch

    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    batch = drawbar.Batch({"input_ids": tokens, "labels": tokens}, ids=[0, 1])
    return float(engine.train_step([MicroBatch(batch)]).loss)


def _synchronize(run: Any) -> None:
    if run.world.device.type == "cuda":
        torch.cuda.synchronize()


def _remove(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()  # what is left of earlier writes
