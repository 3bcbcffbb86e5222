"""W6: saving and loading: how long training waits, when a checkpoint is safe on the disk, how long a start takes."""

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave, ratio

WAYS = ("drawbar", "torch.save with fsync", "torch.save", "safetensors with fsync", "torch's distributed checkpoint")

KINDS = ("model", "optimizer")


def measure(options: Options) -> Report:
    report = Report("W6", "saving and loading model and optimizer")
    call = partial(Call, "benchmarks.parts.w6_checkpoints:save_and_load")
    cases = {
        way: partial(options.run, call({"way": way, "folder": str(options.folder), "quick": options.quick}))
        for way in WAYS
    }
    found = interleave(cases, options.rounds)
    durable = [one["save_s"] for one in found["torch.save with fsync"]]
    rows = []
    for way, results in found.items():
        of = {key: [one[key] for one in results] for key in ("wait_s", "save_s", "load_s")}
        size = results[0]["bytes"]
        row = {"way": way, "MB": round(size / 1e6), "training waits s": Statistic.of(of["wait_s"])}
        row |= {"written after s": Statistic.of(of["save_s"]), "load s": Statistic.of(of["load_s"])}
        rows.append(
            row
            | {
                "MB/s": Statistic.of(size / 1e6 / s for s in of["save_s"]),
                "÷ torch.save with fsync": ratio(of["save_s"], durable),
            }
        )
    report.tables.append(Table("One checkpoint", rows))
    report.notes.append(
        "drawbar's is on the disk with checksums, and is copied first, so that training goes on meanwhile."
    )
    waits = ratio([one["wait_s"] for one in found["drawbar"]], durable).median
    report.checks.append(Check("training waits ÷ torch.save with fsync", waits, 0.5, False))
    return report


def save_and_load(way: str, folder: str, quick: bool) -> dict[str, float]:
    """Seconds that training waits, until the files are written, and to load them into the model again."""
    from benchmarks.peers.opened import open_task

    hidden, layers = (32, 2) if quick else (512, 8)
    sizes = f"hidden_size: {hidden}, intermediate_size: {hidden * 3}, num_hidden_layers: {layers}"
    settings = [
        *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama", "precision=fp32", "train.steps=1"),
        f"task.from_scratch={{{sizes}, num_attention_heads: 4, vocab_size: 8192}}",
        f"run.dir={folder}/runs",
    ]
    run = open_task(settings)
    target = Path(folder) / "checkpoint"
    shutil.rmtree(target, ignore_errors=True)
    engine = run.engine()
    for parameter in engine.module.parameters():
        parameter.grad = parameter.detach().clone()
    engine.updater.step(1e-3, lambda: None)  # so that the optimizer has its state
    found = _drawbar(engine, target) if way == "drawbar" else _other(way, engine, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {**found, "bytes": size}


def _drawbar(engine: Any, target: Path) -> dict[str, float]:
    import torch

    from drawbar.checkpoint.directory import CheckpointDirectory
    from drawbar.checkpoint.format import Snapshot
    from drawbar.checkpoint.load import read
    from drawbar.engines.results import EngineState
    from drawbar.runtime.seed import rng_state

    begin = time.perf_counter()
    state = engine.state()
    rng = {f"seed-0000/{name}": tensor for name, tensor in rng_state(torch.device("cpu")).items()}
    copied = time.perf_counter()
    snapshot = Snapshot(1, state.model, state.optimizer, rng, {"engine": state.values})
    CheckpointDirectory(target).write(snapshot)
    written = time.perf_counter()
    found = read(target / "step-00000001")
    engine.load(EngineState(found.model, found.optimizer, found.state["engine"]))
    return {"wait_s": copied - begin, "save_s": written - begin, "load_s": time.perf_counter() - written}


def _other(way: str, engine: Any, target: Path) -> dict[str, float]:
    """By the model's and the optimizer's state, as each way writes it; training waits until it is written."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    from drawbar.engines.results import EngineState

    state = engine.state()
    tensors = {f"{kind}:{name}": one.clone() for kind in KINDS for name, one in getattr(state, kind).items()}
    target.mkdir(parents=True)
    file = target / "state"
    begin = time.perf_counter()
    if way.startswith("torch.save"):
        torch.save(tensors, file)
    elif way.startswith("safetensors"):
        save_file(tensors, file)
    else:
        dcp.save(tensors, checkpoint_id=target, no_dist=True)
    if "fsync" in way:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    written = time.perf_counter()
    if way.startswith("torch.save"):
        tensors = torch.load(file)
    elif way.startswith("safetensors"):
        tensors = load_file(file)
    else:
        dcp.load(tensors, checkpoint_id=target, no_dist=True)
    parts = {
        kind: {key[len(kind) + 1 :]: one for key, one in tensors.items() if key.startswith(kind)} for kind in KINDS
    }
    engine.load(EngineState(**parts, values=state.values))
    return {"wait_s": written - begin, "save_s": written - begin, "load_s": time.perf_counter() - written}
