"""Tables and figures of the tutorial, from ``measured.json``; `make docs` calls it."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
MARKS = ("<!-- measured by measure.py; written by `make docs` -->", "<!-- end of measured -->")
KINDS = ("parameters", "gradients", "optimizer", "activations")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send")
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
"""Tol's "bright" scheme: told apart by people who see few colors (https://sronpersonalpages.nl/~pault/)."""
SHOWN = {
    "one_process": ("one process", "one process, 8 micro-batches", "one process, activation checkpointing"),
    "ddp": ("one process", "ddp", "ddp, 2 micro-batches"),
    "zero1": ("ddp", "zero1"),
    "fsdp": ("ddp", "zero1", "fsdp", "fsdp, 2 micro-batches", "fsdp, reshard=false", "fsdp, replicate=2"),
    "tensor": ("one process", "ddp", "tensor=4", "tensor=4, sequence"),
    "pipeline": ("one process, 8 micro-batches", "ddp", "pipeline=4, gpipe", "pipeline=4, 1f1b"),
    "context": ("one process", "ddp", "context=4", "fsdp, context=4"),
    "combinations": (
        *("one process", "ddp", "zero1", "fsdp", "tensor=4", "pipeline=4, 1f1b", "context=4"),
        *("fsdp, tensor=2", "fsdp, pipeline=2", "fsdp, context=4", "tensor=2, pipeline=2"),
    ),
}
"""By page: the layouts in its table and in its figure."""
TITLES = {"one_process": "one process", "ddp": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP", "tensor": "tensor parallelism"}
TITLES |= {"pipeline": "pipeline parallelism", "context": "context parallelism", "combinations": "all layouts"}


def largest(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """``kept`` and ``sent`` of a layout, by kind: those of the rank that keeps most, and of the one that sends most."""
    listed = list(ranks)
    most = max(listed, key=lambda rank: sum(rank[kind] for kind in KINDS))
    return {
        "kept": {kind: most[kind] for kind in KINDS},
        "sent": max((rank["sent"] for rank in listed), key=lambda sent: sum(sent.values())),
    }


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}" if size else "0"


def table(measured: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    lines = ["| MB on a rank | parameters | gradients | optimizer | activations | sum | sent in a step |"]
    lines.append(f"| --- |{' ---: |' * 6}")
    for name in names:
        found = largest(measured[name])
        kept = found["kept"]
        sizes = [*(kept[kind] for kind in KINDS), sum(kept.values()), sum(found["sent"].values())]
        lines.append(f"| `{name}` | {' | '.join(map(megabytes, sizes))} |")
    return lines


def figure_of(page: str, measured: Mapping[str, Any]) -> str:
    """Two charts of stacked bars, one below the other, as SVG with a background and a dark variant of its own."""
    found = {name: largest(measured[name]) for name in SHOWN[page]}
    kept = {name: one["kept"] for name, one in found.items()}
    sent = {name: one["sent"] for name, one in found.items()}
    upper, height = _bars(kept, KINDS, "kept on a rank, MB", 0)
    lower, height = _bars(sent, COLLECTIVES, "sent by a rank in a step, MB", height + 12)
    label = f"Measured with {TITLES[page]}: what a rank keeps, and what it sends in a step"
    attributes = f'viewBox="0 0 720 {height}" role="img" aria-label="{escape(label)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>',
            "<style>",
            "text { font: 13px system-ui, sans-serif; fill: #222 } .back { fill: #fff } .axis { stroke: #999 }",
            "@media (prefers-color-scheme: dark) {",
            "text { fill: #ddd } .back { fill: #1b1d20 } .axis { stroke: #666 } }",
            "</style>",
            f'<rect class="back" width="720" height="{height}" rx="8"/>',
            *upper,
            *lower,
            "</svg>",
            "",
        ]
    )


def _bars(
    values: Mapping[str, Mapping[str, int]], kinds: tuple[str, ...], title: str, top: int
) -> tuple[list[str], int]:
    """The lines of one chart, and where it ends."""
    left, width, y = 230, 420, top + 26
    colors = dict(zip(kinds, COLORS, strict=False))
    most = max(sum(parts.values()) for parts in values.values()) or 1
    lines = [f'<text x="16" y="{y}" style="font-weight: 600">{escape(title)}</text>']
    x, y = 16, y + 22
    for kind in (kind for kind in kinds if any(kind in parts for parts in values.values())):
        lines.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colors[kind]}"/>')
        lines.append(f'<text x="{x + 16}" y="{y}">{kind}</text>')
        x += 34 + 7 * len(kind)
    y += 14
    first = y
    for name, parts in values.items():
        lines.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        x = float(left)
        for kind in kinds:
            length = parts.get(kind, 0) / most * width
            if length:
                lines.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="15" fill="{colors[kind]}"/>')
            x += length
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{megabytes(sum(parts.values()))}</text>')
        y += 22
    lines.append(f'<line class="axis" x1="{left}" y1="{first}" x2="{left}" y2="{y}"/>')
    return lines, y + 10


def written(page: Path, measured: Mapping[str, Any]) -> str:
    """The text of a page, with its table anew."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    picture = f"![What a rank keeps and sends with {TITLES[page.stem]}](figures/{page.stem}.svg)"
    block = [MARKS[0], "", *table(measured, SHOWN[page.stem]), "", picture, "", MARKS[1]]
    return before + "\n".join(block) + after


def write_pages() -> list[Path]:
    """Write tables and figures; the files that were written."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    files = {HERE / f"{name}.md": written(HERE / f"{name}.md", measured) for name in SHOWN}
    files |= {HERE / "figures" / f"{name}.svg": figure_of(name, measured) for name in SHOWN}
    (HERE / "figures").mkdir(exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
