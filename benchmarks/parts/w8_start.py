"""W8: how long from the command to the first step, and from a crash to the step after it."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import DRAWBAR, seconds_to_step
from benchmarks.common.fresh_process import Call
from benchmarks.common.limits import IMPORT_MODEL, import_seconds
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave, ratio
from benchmarks.parts.w1_fixed_length import language_model
from benchmarks.peers.comparison import PEERS
from benchmarks.peers.workload import Settings, Workload, drawbar_settings

SAVED, KILLED = 2, 3
"""Steps: the one with a checkpoint, and the one after which the run is killed."""


def measure(options: Options) -> Report:
    report = Report("W8", "from the command to the first step, and from a crash to the next one")
    workload, builder = language_model(options)
    workload = replace(workload, steps=4, warm_up=1)
    arguments = {"workload": asdict(workload), "builder": builder}
    options.run(Call("benchmarks.peers.workload:prepare", arguments))
    imported = "import torch and the model's classes"
    found = interleave(
        {
            imported: lambda: import_seconds("import torch; " + IMPORT_MODEL, 1),
            "drawbar train": lambda: _first_step(workload, options, 1),
            "drawbar train, 2 ranks": lambda: _first_step(workload, options, 2),
            "drawbar train, after a crash": lambda: _resumed_step(workload, options),
            "loop by hand": lambda: _peer(workload, "loop by hand", options),
            "Hugging Face Trainer": lambda: _peer(workload, "Hugging Face Trainer", options),
        },
        options.rounds,
    )
    imports = found[imported]
    rows = [
        {"what": name, "seconds": Statistic.of(times), "÷ imports": ratio(times, imports)}
        for name, times in found.items()
    ]
    report.tables.append(Table("Seconds until a step is done; the data are encoded, files are in the page cache", rows))
    for name, limit in (("drawbar train", 1.5), ("drawbar train, 2 ranks", 2.0)):
        share = ratio(found[name], imports).median
        report.checks.append(Check(f"{name}: first step ÷ {imported}", share, limit, at_least=False))
    return report


def _command(workload: Workload, runs: Path, ranks: int) -> list[str]:
    settings = [*drawbar_settings(workload, runs), f"task.model={workload.model_path}", "precision=fp32"]
    settings += ["tracking.log_every=1", f"launch.nproc={ranks}", f"checkpoint.every={SAVED}"]
    return [*DRAWBAR, "train", *settings]


def _first_step(workload: Workload, options: Options, ranks: int) -> float:
    folder = options.new_folder("start")
    seconds = seconds_to_step(_command(workload, folder, ranks), folder / "run", folder, step=1)
    shutil.rmtree(folder)
    return seconds


def _resumed_step(workload: Workload, options: Options) -> float:
    folder = options.new_folder("crash")
    command = _command(workload, folder, 1)
    seconds_to_step(command, folder / "run", folder, KILLED, kill_after=True)
    seconds = seconds_to_step(command, folder / "run", folder, SAVED + 1)
    shutil.rmtree(folder)
    return seconds


def _peer(workload: Workload, peer: str, options: Options) -> float:
    folder = options.new_folder("run")
    arguments: dict[str, Any] = {"workload": asdict(workload), "settings": asdict(Settings()), "folder": str(folder)}
    found = options.run(Call(f"benchmarks.peers.{PEERS[peer][0]}:train", arguments))
    return found["first_step_at"] - found["spawned"]
