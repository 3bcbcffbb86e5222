"""A forecast as tables for a terminal."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drawbar.commands.output_files import writing
from drawbar.errors import UserError
from drawbar.plan.run_forecast import COPY_SPEED, COUNTED, ESTIMATED, RunForecast
from drawbar.plan.step_recorder import ACTIVATIONS, COMMUNICATION, LOGITS
from drawbar.plan.suggestions import Suggestion
from drawbar.util.atomic_files import replacing
from drawbar.util.byte_sizes import readable

Compared = Sequence[tuple[str, RunForecast | UserError]]
"""For each compared strategy: its name, and its forecast or the error that says why it cannot run."""

KNOWN_ERROR_ON_GPUS = "not measured on a GPU yet"
"""Of the largest peak, relative to what torch allocates there: the table of results in docs/gpu.md, case ``memory``."""


def print_forecast(
    console: Console, forecast: RunForecast, compared: Compared, suggestions: Sequence[Suggestion] | None
) -> None:
    """Print a forecast, the strategies side by side, and suggestions.

    Args:
        suggestions: changes with which the run fits, empty if none was found; None if the run fits as it is.
    """
    console.print(_rank_table(forecast))
    for line in _summary_lines(forecast):
        console.print(line, highlight=False, soft_wrap=True)
    if compared:
        _print_side_by_side(console, compared)
    if suggestions:
        console.print("with one of these it fits:", highlight=False)
        for suggestion in suggestions:
            peak = readable(suggestion.forecast.largest.peak.bytes)
            console.print(f"  {suggestion.text}    ({peak})", highlight=False, soft_wrap=True, markup=False)
    elif suggestions is not None:
        console.print("no change that was tried makes it fit: take more or larger devices, or a smaller model")


def _rank_table(forecast: RunForecast) -> Table:
    table = Table(title=f"{forecast.strategy} on {_machine(forecast)}: {forecast.method}", title_justify="left")
    table.add_column("")
    for rank in forecast.ranks:
        table.add_column(
            f"rank {rank.rank}" + (f", stage {rank.stage}" if len(forecast.ranks) > 1 else ""), justify="right"
        )
    rows = {
        "parameters": [rank.parameters for rank in forecast.ranks],
        "gradients": [rank.gradients for rank in forecast.ranks],
        "optimizer state": [rank.optimizer for rank in forecast.ranks],
        "at the peak: activations": [rank.peak.by_kind[ACTIVATIONS] for rank in forecast.ranks],
        "at the peak: logits": [rank.peak.by_kind[LOGITS] for rank in forecast.ranks],
        "at the peak: communication": [rank.peak.by_kind[COMMUNICATION] for rank in forecast.ranks],
        "peak": [rank.peak.bytes for rank in forecast.ranks],
    }
    axes = sorted({axis for rank in forecast.ranks for axis in rank.sent})
    rows |= {f"sent in a step over {axis}": [rank.sent.get(axis, 0) for rank in forecast.ranks] for axis in axes}
    for name, values in rows.items():
        table.add_row(name, *map(readable, values))
    return table


def _summary_lines(forecast: RunForecast) -> list[str]:
    machine, largest = forecast.machine, forecast.largest
    word = "fits" if forecast.fits else "does not fit"
    share = f"{readable(machine.usable)} of {readable(machine.memory)} are usable"
    lines = [f"memory: {word}: the largest peak is {readable(largest.peak.bytes)} (rank {largest.rank}), and {share}"]
    if machine.device == "cuda":
        lines.append(f"how far this is off on a GPU: {KNOWN_ERROR_ON_GPUS}")
    rows = f"{largest.micro_batches} micro-batch{'es' * (largest.micro_batches > 1)} of {largest.rows} longest rows"
    tokens = f", {forecast.tokens:,} tokens" if forecast.tokens else ""
    lines.append(f"a step: {rows} on each rank{tokens}, {forecast.flops:.3g} operations")
    if forecast.steps is None:
        lines.append("steps: not known before the data are encoded (`drawbar prepare`)")
    else:
        total = f", {forecast.steps * forecast.tokens:,} tokens" if forecast.tokens else ""
        lines.append(f"steps: {forecast.steps:,}{total}, {forecast.steps * forecast.flops:.3g} operations")
    if forecast.hours is not None:
        lines.append(f"time: {_time(forecast.hours)} at {machine.utilization:.0%} of the devices' peak")
    stall = forecast.checkpoint / COPY_SPEED
    lines.append(
        f"checkpoint: {readable(forecast.checkpoint)}; training stalls for {stall:.2g} s if one rank copies all of it "
        f"at {COPY_SPEED / 1e9:.0f} GB/s, and for {stall / machine.ranks:.2g} s if each copies its part"
    )
    return lines


def _print_side_by_side(console: Console, compared: Compared) -> None:
    """A table that is readable at 80 columns; below it, why strategies cannot run."""
    found = {name: one for name, one in compared if isinstance(one, RunForecast)}
    if found:
        console.print(_side_by_side(found))
    if any(one.method != COUNTED for one in found.values()):
        console.print(f"* {ESTIMATED}", highlight=False)
    for name, one in compared:
        if isinstance(one, UserError):
            line = f"{name} cannot run: {one.what.splitlines()[0]}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _side_by_side(found: dict[str, RunForecast]) -> Table:
    table = Table(title="strategies side by side", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("strategy")
    for name in ("parameters", "gradients", "optimizer", "peak", "sent in\na step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for name, one in found.items():
        rank = one.largest
        sizes = (rank.parameters, rank.gradients, rank.optimizer, rank.peak.bytes, sum(rank.sent.values()))
        fits = ("yes" if one.fits else "no") + ("" if one.method == COUNTED else "*")
        table.add_row(Text(name), *map(readable, sizes), fits)
    return table


def _machine(forecast: RunForecast) -> str:
    machine = forecast.machine
    what = "GPU" if machine.device == "cuda" else "process"
    each = f"{machine.ranks_per_node} {what}{('es' if what == 'process' else 's') * (machine.ranks_per_node > 1)}"
    return each if machine.nodes == 1 else f"{machine.nodes} × {each}"


def _time(hours: float) -> str:
    return f"{hours * 60:.2g} minutes" if hours < 1 else f"{hours:,.1f} hours"


def write_json(path: Path, forecast: RunForecast, compared: Compared, suggestions: Sequence[Suggestion] | None) -> None:
    """Write the forecast with the strategies beside it and the suggestions. Raises UserError if the disk refuses."""
    others = {name: {"error": one.what} if isinstance(one, UserError) else one.as_dict() for name, one in compared}
    changes = [{"overrides": one.text, "peak": one.forecast.largest.peak.bytes} for one in suggestions or ()]
    text = json.dumps(
        {**forecast.as_dict(), "strategies": others, "suggestions": changes}, ensure_ascii=False, indent=2
    )
    with writing(path, "--json"), replacing(path, one_writer=False) as file:
        file.write(text.encode() + b"\n")
