"""docs/performance.md, from the JSON of the suite's last runs: `make docs` writes it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import PARTS
from benchmarks.common.report import PLOTS, RESULTS, check_row
from benchmarks.common.statistic import cell, markdown_table

HEAD = """# Performance

<!-- generated from benchmarks/results by `make docs`; do not edit -->

How fast drawbar is compared with other ways to train the same model on the same batches, and with the limits of the
machine. `make bench` measures all of it again on your machine ([benchmarks](../benchmarks/README.md) says how). A
number with a range is the median of the rounds, with the lowest and the highest; a ratio is taken round by round,
since all contenders take turns. A run counts only if its losses agree with those of the loop written by hand.
"""


def render(results: Path = RESULTS) -> str:
    """The whole page."""
    found = {part: results / f"{part}.json" for part in PARTS}
    sections = [_section(json.loads(path.read_text("utf-8"))) for path in found.values() if path.exists()]
    absent = [part for part, path in found.items() if not path.exists()]
    blocks = [HEAD, *sections]
    if absent:
        blocks.append(f"Not measured yet: {', '.join(absent)}.")
    return "\n".join(block.rstrip("\n") + "\n" for block in blocks)


def _section(report: dict[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    device = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number != "absent")
    blocks = [f"## {report['part']}: {report['title']}"]
    rounds = f"{report['rounds']} round{'s' * (report['rounds'] != 1)}"
    blocks.append(f"{report['date']}, {device}, {machine['memory GiB']} GiB; {rounds}; {packages}.")
    if report["limits"]:
        limits = ", ".join(f"{name} {cell(value)}" for name, value in report["limits"].items())
        blocks.append(f"Limits of the machine, measured in the same run: {limits}.")
    for table in report["tables"]:
        blocks += [f"**{table['title']}**", markdown_table(table["rows"])]
    if report["checks"]:
        blocks += ["**Wanted**", markdown_table([check_row(check) for check in report["checks"]])]
    blocks += [f"![{curve['title']}]({PLOTS.name}/{curve['name']}.svg)" for curve in report["curves"]]
    return "\n\n".join([*blocks, *report["notes"]])
