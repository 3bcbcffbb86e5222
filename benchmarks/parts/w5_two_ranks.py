"""W5: DDP and FSDP on two ranks: speed, exposed communication, collectives and bytes of a step."""

import os
import statistics
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common.collectives import of_one_step
from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, ratio
from benchmarks.parts.w1_fixed_length import language_model
from benchmarks.peers.comparison import PEERS, Contender, compare
from benchmarks.peers.workload import Settings, Workload

RANKS = 2
MICRO_BATCHES = 2
COUNTED = [
    ("drawbar", "ddp"),
    ("loop by hand", "ddp"),
    ("drawbar", "fsdp"),
    ("loop by hand", "fsdp"),
    ("drawbar", "zero1"),
]
SHORT, LONG = 2, 5
"""Steps of the two runs whose difference is counted."""


def measure(options: Options) -> Report:
    report = Report("W5", f"DDP and FSDP on {RANKS} ranks, {MICRO_BATCHES} micro-batches a step")
    workload, builder = language_model(options)
    arguments = {"workload": asdict(workload), "builder": builder}
    options.run(Call("benchmarks.peers.workload:prepare", arguments))
    _measure_speed(workload, options, report)
    counted = {
        (peer, strategy, parts): _count(workload, peer, strategy, parts, options)
        for peer, strategy in COUNTED
        for parts in (1, MICRO_BATCHES)
    }
    sizes = options.run(Call("benchmarks.parts.w5_two_ranks:parameter_bytes", {"workload": asdict(workload)}))
    _add_traffic(report, counted, sizes)
    return report


def _settings(strategy: str, parts: int = MICRO_BATCHES, **options: Any) -> Settings:
    return Settings("fp32", micro_batches=parts, strategy=strategy, options=options)


def _measure_speed(workload: Workload, options: Options, report: Report) -> None:
    ddp = [peer for peer in PEERS if peer != "DeepSpeed"]
    contenders = [Contender(peer, _settings("ddp"), "DDP", ranks=RANKS) for peer in ddp]
    contenders += [Contender(peer, _settings("fsdp"), "FSDP", ranks=RANKS) for peer in ("drawbar", "loop by hand")]
    contenders.append(Contender("DeepSpeed", _settings("zero1"), "ZeRO-1", ranks=RANKS))
    alone = Contender("loop by hand", _settings("ddp", alone=True), "without communication", True, RANKS)
    measured = compare(workload, [*contenders, alone], "loop by hand fp32, DDP", options, report.notes)
    quiet = measured.pop(alone.name)
    rows = []
    for one in measured.values():
        twin = measured.get(f"loop by hand fp32, {one.contender.label}")
        exposed = [1 - speed / most for speed, most in zip(one.speeds, quiet.speeds, strict=True)]
        rows.append(one.row(twin) | {"exposed communication": Statistic.of(exposed) if one.counts else None})
    report.tables.append(Table("Training", rows))
    report.notes.append(
        "Exposed communication: the share of a step by which it is longer than in the same loop without "
        f"communication, at the same time on the same {os.cpu_count()} cores."
    )
    for label in ("DDP", "FSDP"):
        ours, twin = measured[f"drawbar fp32, {label}"], measured[f"loop by hand fp32, {label}"]
        speed = ratio(ours.speeds, twin.speeds).median
        report.checks.append(Check(f"{label}: drawbar ÷ the loop by hand", speed, 0.95))


def _count(workload: Workload, peer: str, strategy: str, parts: int, options: Options) -> dict[str, dict[str, float]]:
    found: list[dict[str, Any]] = []
    for steps in (SHORT, LONG):
        work = replace(workload, steps=steps, warm_up=1)
        folder = options.new_folder("count")
        inner = {"workload": asdict(work), "settings": asdict(_settings(strategy, parts)), "folder": str(folder)}
        arguments = {"function": f"benchmarks.peers.{PEERS[peer][0]}:train", "arguments": inner}
        found.append(options.run(Call("benchmarks.common.collectives:count", arguments, ranks=RANKS)))
    return of_one_step(found[0], found[1], LONG - SHORT)


def _add_traffic(report: Report, counted: dict[Any, Any], sizes: dict[str, int]) -> None:
    rows = []
    for (peer, strategy, parts), found in counted.items():
        total = sum(one["bytes"] for one in found.values())
        rows.append(
            {
                "run": f"{peer}, {strategy}",
                "micro-batches": parts,
                "collectives": ", ".join(f"{one['calls']:g} {name}" for name, one in sorted(found.items())),
                "MB": total / 1e6,
                "÷ formula": total / _formula(strategy, parts, sizes) if peer == "drawbar" else None,
            }
        )
    report.tables.append(Table("Collectives of one step, and their input bytes", rows))
    report.notes.append(
        "The formula of docs/strategies.md, in bytes of the parameters (fp32): ddp their gradients; zero1 gradients "
        "and parameters; fsdp in each micro-batch all parameters, those of the blocks once more (if the head is tied "
        "to the embedding, all but the last block), and all gradients."
    )
    by_run = {(row["run"], row["micro-batches"]): row for row in rows}
    one, many = (by_run["drawbar, ddp", parts]["MB"] for parts in (1, MICRO_BATCHES))
    report.checks.append(Check(f"DDP: bytes of {MICRO_BATCHES} micro-batches ÷ those of one", many / one, 1.001, False))
    off = statistics.mean(abs(by_run["drawbar, fsdp", parts]["÷ formula"] - 1) for parts in (1, MICRO_BATCHES))
    report.checks.append(Check("FSDP: how far its bytes are from the formula", off, 0.05, False))


def _formula(strategy: str, micro_batches: int, sizes: dict[str, int]) -> float:
    every, again = sizes["all"], sizes["gathered again"]
    return {"ddp": every, "zero1": 2 * every, "fsdp": micro_batches * (every + again + every)}[strategy]


def parameter_bytes(workload: dict[str, Any]) -> dict[str, int]:
    """Of the model, and of the blocks that FSDP gathers once more for the backward."""
    from torch import nn

    model = Workload.of(workload).model()
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    again = blocks[:-1] if model.config.tie_word_embeddings else blocks
    return {
        "all": sum(parameter.nbytes for parameter in model.parameters()),
        "gathered again": sum(parameter.nbytes for block in again for parameter in block.parameters()),
    }
