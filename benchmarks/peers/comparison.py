"""Train one workload in several ways, in turn; only those whose losses agree are compared in speed."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common.fresh_process import Call, MeasurementFailed, missing
from benchmarks.common.options import Options
from benchmarks.common.report import Table
from benchmarks.common.statistic import Statistic, ratio
from benchmarks.common.turns import one_after_another
from benchmarks.peers.workload import Settings, Workload

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of a step's loss from that of the reference, an fp32 run: sums in another order, and in
bf16 rounded products, grow by the optimizer's steps. Another sample or another optimizer comes to 1e-2 and more."""
PEERS = {
    "drawbar": ("of_drawbar", ()),
    "loop by hand": ("hand_written", ()),
    "Hugging Face Trainer": ("hf_trainer", ("accelerate",)),
    "Accelerate": ("with_accelerate", ("accelerate",)),
    "Lightning": ("with_lightning", ("lightning",)),
    "DeepSpeed": ("with_deepspeed", ("deepspeed",)),
}
"""By name: its module, and the packages without which it is absent."""
FLOOR = "matrix products alone"
"""What no peer can be faster than: a contender that trains nothing."""
MODULES = PEERS | {FLOOR: ("matrix_products", ())}
CLEARLY_SLOWER = 0.9
"""How fast a contender may be in one trial, relative to another, and still be the faster one."""
ONLY_ON_A_GPU = ("torchtitan", "litgpt")


@dataclass(frozen=True)
class Contender:
    """A peer with settings."""

    peer: str
    settings: Settings
    label: str = ""
    """What is special about the settings, for tables."""
    own_batches: bool = False
    """It chooses its batches itself, so its losses cannot be compared."""
    ranks: int = 1

    @property
    def name(self) -> str:
        compiled = ", compiled" if self.settings.compiled else ""
        return f"{self.peer} {self.settings.precision}{compiled}{f', {self.label}' if self.label else ''}"


@dataclass
class Measured:
    """The rounds of one contender."""

    contender: Contender
    results: list[dict[str, Any]]
    disagreement: float | None = None
    """Largest relative difference of a loss from the reference's; None where it has none."""

    @property
    def speeds(self) -> list[float]:
        return [result["targets_per_second"] for result in self.results]

    @property
    def counts(self) -> bool:
        limit = TOLERANCE[self.contender.settings.precision]
        return self.disagreement is None or self.disagreement <= limit

    def row(self, reference: "Measured | None" = None) -> dict[str, Any]:
        """As a table shows it."""
        first = [result["step_seconds"][0] for result in self.results]
        usual = [statistics.median(result["step_seconds"][1:]) for result in self.results]
        row: dict[str, Any] = {"run": self.contender.name, "targets/s": "its losses differ"}
        if self.counts:
            row["targets/s"] = Statistic.of(self.speeds)
            row["÷ by hand"] = None if reference is None else ratio(self.speeds, reference.speeds)
        row["loss differs by"] = "other batches" if self.contender.own_batches else self.disagreement
        row["first step after s"] = Statistic.of(one["first_step_at"] - one["spawned"] for one in self.results)
        if self.contender.settings.compiled:
            row["compile s"] = statistics.median(one - two for one, two in zip(first, usual, strict=True))
        return row | {"peak MiB": round(max(result["peak_bytes"] for result in self.results) / 2**20)}


def compare(
    workload: Workload, contenders: Sequence[Contender], reference: str, options: Options, notes: list[str]
) -> dict[str, Measured]:
    """Every contender by its name, without those that are absent or fail, which ``notes`` then say.

    Args:
        reference: the name of the contender with whose losses those of all others are compared.

    Raises:
        MeasurementFailed: the reference is among those.
    """
    there = []
    for contender in contenders:
        absent = missing(MODULES[contender.peer][1])
        note = f"{contender.peer} is absent: {', '.join(absent)} is not installed."
        if not absent:
            there.append(contender)
        elif note not in notes:
            notes.append(note)
    found: dict[str, list[dict[str, Any] | None]] = {contender.name: [] for contender in there}
    for _ in range(options.rounds):
        for group in _groups(there):
            for name, result in _train(workload, group, options, notes).items():
                found[name].append(result)
    measured = {
        contender.name: Measured(contender, [result for result in found[contender.name] if result])
        for contender in there
        if all(found[contender.name])
    }
    if reference not in measured:
        raise MeasurementFailed(f"there is nothing to compare with: {'; '.join(notes)}")
    _compare_losses(measured, reference)
    return measured


def _groups(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Contenders that take turns: those of one rank with the same settings. One of several ranks is alone."""
    groups: dict[tuple[Any, ...], list[Contender]] = {}
    for number, one in enumerate(contenders):
        how = one.settings
        key = (how.precision, how.compiled, how.micro_batches) if one.ranks == 1 else (number,)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _train(
    workload: Workload, group: Sequence[Contender], options: Options, notes: list[str]
) -> dict[str, dict[str, Any] | None]:
    """What each contender of a group returned; None for those that failed."""
    calls, folders = {}, []
    for one in group:
        folders.append(options.new_folder("run"))
        arguments = {"workload": asdict(workload), "settings": asdict(one.settings), "folder": str(folders[-1])}
        calls[one.name] = Call(f"benchmarks.peers.{MODULES[one.peer][0]}:train", arguments, ranks=one.ranks)
    try:
        found = options.take_turns(calls) if group[0].ranks == 1 else one_after_another(calls, options.run)
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    results: dict[str, dict[str, Any] | None] = {}
    for name, result in found.items():
        results[name] = None if isinstance(result, MeasurementFailed) else result
        if isinstance(result, MeasurementFailed):
            note = f"{name} failed: {str(result).strip().splitlines()[-1]}"
            if note not in notes:
                notes.append(note)
    return results


def _compare_losses(measured: dict[str, Measured], reference: str) -> None:
    expected = measured[reference].results[0]["losses"]
    for one in measured.values():
        if not one.contender.own_batches:
            pairs = [
                (mine, wanted)
                for result in one.results
                for mine, wanted in zip(result["losses"], expected, strict=True)
            ]
            one.disagreement = max(abs(mine - wanted) / abs(wanted) for mine, wanted in pairs)


def best_of(measured: dict[str, Measured], peer: str) -> Measured:
    """The fastest settings of a peer on this machine, by the median, among those whose losses agree."""
    of_peer = [one for one in measured.values() if one.contender.peer == peer and one.counts]
    return max(of_peer, key=lambda one: statistics.median(one.speeds))


def compiled_unless_slower(
    workload: Workload, peers: Sequence[str], precision: str, options: Options, notes: list[str]
) -> list[Contender]:
    """The contenders that one round does not find clearly slower when compiled: those are not measured further."""
    candidates = [Contender(peer, Settings(precision, compiled)) for peer in peers for compiled in (False, True)]
    plain = Contender(peers[0], Settings(precision)).name
    found = compare(workload, candidates, plain, replace(options, rounds=1), notes)
    kept = []
    for without, compiled in zip(candidates[::2], candidates[1::2], strict=True):
        if without.name in found and compiled.name in found:
            speeds = found[without.name].speeds[0], found[compiled.name].speeds[0]
            kept += [compiled] * (speeds[1] > CLEARLY_SLOWER * speeds[0])
            notes.append(f"{compiled.name}: {speeds[1] / speeds[0]:.2f} times the uncompiled speed, in one trial.")
    return kept


def where_time_goes(
    workload: Workload, settings: Settings, more: Sequence[Contender], options: Options, notes: list[str]
) -> Table:
    """Milliseconds of a step by kind of operation, of drawbar, a loop by hand and Trainer, and of ``more``: in runs of
    their own under torch.profiler."""
    contenders = [Contender(peer, settings) for peer in ("drawbar", "loop by hand", "Hugging Face Trainer")]
    profiled = replace(workload, profiled=True)
    found = compare(profiled, [*contenders, *more], contenders[1].name, replace(options, rounds=1), notes)
    spent = {name: one.results[0]["seconds_by_kind"] for name, one in found.items()}
    steps = workload.steps - workload.warm_up
    kinds = sorted(spent[contenders[0].name], key=lambda kind: -spent[contenders[0].name][kind])
    rows = [
        {"operations": kind} | {name: 1e3 * own.get(kind, 0.0) / steps for name, own in spent.items()} for kind in kinds
    ]
    return Table("Milliseconds of a step by kind of operation, under torch.profiler", rows)
