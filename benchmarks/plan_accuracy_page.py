"""docs/plan_accuracy.md, from the JSON of the last measurement: `make docs` writes it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.common.statistic import markdown_table
from drawbar.util.byte_sizes import readable

RESULT = Path(__file__).parent / "results" / "plan_accuracy.json"
HEAD = """# How accurate `drawbar plan` is

<!-- generated from benchmarks/results/plan_accuracy.json by `make docs`; do not edit -->

Two steps of real ranks (gloo, on a CPU) compared with their [plan](plan.md), the worst first;
`python -m benchmarks.plan_accuracy` measures it again. The measured peak is the most that torch's CPU allocator had
allocated, counted on all threads; parameters, gradients and optimizer state are the tensors that the ranks hold. No GPU
was available.
"""


def render(result: Path = RESULT) -> str:
    """The whole page."""
    if not result.exists():
        return f"{HEAD}\nNot measured yet.\n"
    found = json.loads(result.read_text("utf-8"))
    blocks = [HEAD]
    if "sweep" in found:
        blocks.append(_of_sweep(found["sweep"]))
    rows = [_row(row) for row in found["rows"]]
    state = "all equal" if all(row["state"] == "exact" for row in rows) else "not all equal"
    pairs = len({(row["model"], row["ranks"], row["settings"]) for row in found["rows"]})
    worst = max(abs(row["peak_error"]) for row in found["rows"])
    blocks.append(
        f"torch {found['torch']}; {pairs} pairs of model and strategy: the peak is off by {worst:.1%} at most; bytes "
        f"of parameters, gradients and optimizer state: {state}.\n"
    )
    return "\n".join([*blocks, markdown_table(rows)]) + "\n"


def _row(row: dict[str, Any]) -> dict[str, str]:
    planned, measured = row["planned"], row["measured"]
    exact = all(planned[name] == measured[name] for name in ("parameters", "gradients", "optimizer"))
    return {
        "model": row["model"],
        "settings": f"`{row['settings']}`",
        "rank": f"{row['rank']} of {row['ranks']}",
        "state": "exact" if exact else "differs",
        "planned peak": readable(planned["peak"]),
        "measured peak": readable(measured["peak"]),
        "error": f"{row['peak_error']:+.1%}",
    }


def _of_sweep(sweep: dict[str, Any]) -> str:
    return (
        f"**{sweep['configurations']} configurations drawn at random** (models, batches, formats, strategies; "
        f"`--sweep {sweep['configurations']} --seed {sweep['seed']}`), each with the least memory in which "
        f"it fits according to its plan: {sweep['false_fits']} did not fit. The peaks were off by "
        f"{sweep['lowest']:+.1%} to {sweep['highest']:+.1%}; bytes of parameters, gradients and optimizer state "
        f"differed in {sweep['state_differs']}.\n"
    )
