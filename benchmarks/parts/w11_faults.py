"""W11: from a fault of a rank to the end of its run, and to the next step; and what watching the ranks costs a step."""

import ctypes
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import drawbar
from benchmarks.common.command import DRAWBAR, end_of_failing, seconds_to_step
from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave
from benchmarks.parts.w1_fixed_length import language_model
from benchmarks.peers.of_drawbar import overrides
from benchmarks.peers.workload import Settings, Workload, drawbar_settings
from drawbar.distributed import pulse

FAULTS = {"killed": "SIGKILL", "crashed": "a segmentation fault", "stopped": "SIGSTOP"}
SAVED, AT_STEP = 2, 3
LIMIT = 10
"""``launch.timeout`` and ``launch.limits.callback``, in seconds: what a stopped rank takes to be noticed."""
WATCHED_STEPS = 400


class Fault(drawbar.Callback):
    """Meets a rank once, after a step; the file says when."""

    def __init__(self, kind: str, file: str) -> None:
        self.kind, self.file = kind, Path(file)

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if run.rank != 1 or info.step != AT_STEP or self.file.exists():
            return
        self.file.write_text(repr(time.time()))
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "crashed":
            ctypes.string_at(0)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)


class WatchedInTurns(drawbar.Callback):
    """Writes this rank's pulse in every second step alone, and times all of them."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.of_writes = 0.0
        self._files: list[Any] = []
        self._began = 0.0

    def on_train_start(self, run: drawbar.RunHandle) -> None:
        self._files = list(pulse._opened)
        write = pulse.Pulse.write

        def timed(self_: pulse.Pulse) -> None:
            began = time.perf_counter()
            write(self_)
            self.of_writes += time.perf_counter() - began

        setattr(pulse.Pulse, "write", timed)  # noqa: B010 - a type checker refuses the assignment

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        now = time.perf_counter()
        if info.step > 2:
            self.seconds[bool(pulse._opened)].append(now - self._began)
        pulse._opened[:] = [] if pulse._opened else self._files
        self._began = now


def measure(options: Options) -> Report:
    report = Report("W11", "from a fault to the next step, and the cost of watching")
    workload, builder = language_model(options)
    workload = replace(workload, steps=4, warm_up=1)
    options.run(Call("benchmarks.peers.workload:prepare", {"workload": asdict(workload), "builder": builder}))
    found = interleave({fault: partial(_meet, workload, options, fault) for fault in FAULTS}, options.rounds)
    rows = [
        {"a rank is": f"{fault}: {FAULTS[fault]}"}
        | {name: Statistic.of(one[name] for one in times) for name in times[0]}
        for fault, times in found.items()
    ]
    report.tables.append(Table(f"Seconds; two ranks, and limits of {LIMIT} s", rows))
    report.checks += [
        Check(f"{fault}: seconds to the end", Statistic.of(one["to the end"] for one in times).median, limit, False)
        for (fault, times), limit in zip(found.items(), (2, 2, LIMIT + 5), strict=True)
    ]
    workload, builder = language_model(options, steps=12 if options.quick else WATCHED_STEPS)
    options.run(Call("benchmarks.peers.workload:prepare", {"workload": asdict(workload), "builder": builder}))
    steps = options.run(Call("benchmarks.parts.w11_faults:watch", {"workload": asdict(workload)}, ranks=2))
    report.tables.append(
        Table("A step of W1 on two ranks, whose pulses are written in every second step", [_row(steps)])
    )
    report.checks.append(Check("share of a step that the writing takes", steps["share"], 0.005, at_least=False))
    return report


def _row(steps: dict[str, Any]) -> dict[str, Any]:
    return {
        "s, watched": statistics.median(steps["watched"]),
        "s, not watched": statistics.median(steps["unwatched"]),
        "÷": statistics.median(one / other for one, other in zip(steps["watched"], steps["unwatched"], strict=False)),
        "share of writing": steps["share"],
    }


def _meet(workload: Workload, options: Options, fault: str) -> dict[str, float]:
    folder = options.new_folder("fault")
    ended = end_of_failing(_command(workload, folder, fault), folder)
    began = float((folder / "fault").read_text())
    again = seconds_to_step(_command(workload, folder, fault), folder / "run", folder, AT_STEP)
    shutil.rmtree(folder)
    folder = options.new_folder("fault")
    started = time.time()
    command = [*_command(workload, folder, fault), "launch.restarts=1"]
    to_step = seconds_to_step(command, folder / "run", folder, AT_STEP + 1)
    restarted = started + to_step - float((folder / "fault").read_text())
    shutil.rmtree(folder)
    return {
        "to the end": ended - began,
        "from the command again to the next step": again,
        "to the next step, with launch.restarts": restarted,
    }


def _command(workload: Workload, folder: Path, fault: str) -> list[str]:
    callback = {f"{__name__}:Fault": {"kind": fault, "file": str(folder / "fault")}}
    settings = [*drawbar_settings(workload, folder), f"task.model={workload.model_path}", "precision=fp32"]
    settings += ["tracking.log_every=1", "launch.nproc=2", f"checkpoint.every={SAVED}"]
    settings += [f"launch.timeout={LIMIT}", f"launch.limits.callback={LIMIT}", f"callbacks=[{json.dumps(callback)}]"]
    return [*DRAWBAR, "train", *settings]


def watch(workload: Any) -> dict[str, Any]:
    """Train, on each rank: the seconds of steps whose pulse is written and of others, and the share of the writing."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[pulse.PULSE] = f"{folder}/pulse"
        settings = overrides(Workload.of(workload), Settings(), folder)
        config = drawbar.load_config(None, [*settings, "parallel.strategy=ddp"]).config
        turns = WatchedInTurns()
        drawbar.Trainer(config, callbacks=[turns]).fit()
    watched, unwatched = turns.seconds[True], turns.seconds[False]
    return {"watched": watched, "unwatched": unwatched, "share": turns.of_writes / sum(watched)}
