"""The table of docs/comparison.md, drawbar beside other trainers: `make docs` writes it.

What others can do is what their own documentation or code offered when it was last read (``READ``); what was measured
comes from the suite's last runs.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common.report import RESULTS
from benchmarks.common.statistic import cell, markdown_table

READ = "on 28 November 2026"
BEGIN = "<!-- comparison: written by `make docs` from benchmarks/comparison_table.py; do not edit -->"
END = "<!-- end of comparison -->"
TRAINERS = ("drawbar", "Hugging Face Trainer", "Accelerate", "Lightning", "torchtitan", "axolotl")
WRITTEN = {
    "drawbar": "a YAML file, or a task class",
    "Hugging Face Trainer": "a script with its arguments",
    "Accelerate": "your own loop",
    "Lightning": "a module class",
    "torchtitan": "a configuration of its trainer",
    "axolotl": "a YAML file",
}
"""What a user writes."""
PARALLEL = {
    "drawbar": "DDP, ZeRO-1, FSDP, HSDP, DeepSpeed, TP, PP, CP",
    "Hugging Face Trainer": "DDP, FSDP, HSDP, DeepSpeed, TP, CP, EP",
    "Accelerate": "DDP, FSDP, HSDP, DeepSpeed, TP, CP",
    "Lightning": "DDP, FSDP, HSDP, DeepSpeed; FSDP with TP, experimental, with your own plan",
    "torchtitan": "DDP, FSDP, HSDP, TP, PP, CP, EP",
    "axolotl": "DDP, FSDP, HSDP, DeepSpeed, TP, CP, EP",
}
"""How training is spread over processes (TP, PP, CP, EP: tensor, pipeline, context and expert parallelism; HSDP: FSDP
within groups, DDP between them)."""
SOURCES = {
    "Hugging Face Trainer": "https://huggingface.co/docs/transformers/v5.17.0/expert_parallelism",
    "Accelerate": "https://huggingface.co/blog/accelerate-nd-parallel",
    "Lightning": "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.strategies.ModelParallelStrategy.html",
    "torchtitan": "https://github.com/pytorch/torchtitan",
    "axolotl": "https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/nd_parallelism.qmd",
}
MEASURED = {
    "a small Llama, speed ÷ a loop by hand": ("W1", "{} fp32", "÷ by hand"),
    "the same, compiled": ("W1", "{} fp32, compiled", "÷ by hand"),
    "the same, not compiled: peak MiB": ("W1", "{} fp32", "peak MiB"),
    "… and seconds to the first step": ("W1", "{} fp32", "first step after s"),
    "texts of very different lengths, speed ÷ a loop by hand": ("W2", "{} fp32", "÷ by hand"),
}
"""What was measured: the part of the suite, the row of a trainer, and the column."""


def render(results: Path = RESULTS) -> str:
    """The table, and where its facts come from."""
    rows: list[dict[str, Any]] = [
        {"": "you write", **WRITTEN},
        {"": "parallelism", **PARALLEL},
        *({"": what, **_measured(results, *where)} for what, where in MEASURED.items()),
    ]
    sources = ", ".join(f"[{name}]({address})" for name, address in SOURCES.items())
    machine = json.loads((results / "W1.json").read_text("utf-8"))["machine"]
    note = (
        f"Measured side by side on {machine['cores']} cores of a CPU in fp32: medians, with the lowest and the "
        "highest, of rounds whose losses were equal; – was not measured. For all parts of the suite, including those "
        "where drawbar is not the fastest, see [performance.md](performance.md). The first two rows come from the "
        f"others' own pages and code {READ} (HSDP: FSDP within groups of processes, DDP between them; EP: expert "
        f"parallelism, which drawbar lacks): {sources}."
    )
    return f"{BEGIN}\n{markdown_table(rows).replace('---:', '---')}\n\n{note}\n{END}"


def replace_in(page: str) -> str:
    """The page with this table in the place of the one that it has."""
    before, _, rest = page.partition(BEGIN)
    return before + render() + rest.partition(END)[2]


def _measured(results: Path, part: str, row: str, column: str) -> dict[str, str]:
    tables = json.loads((results / f"{part}.json").read_text("utf-8"))["tables"]
    found = {line.get("run"): line.get(column) for line in tables[0]["rows"]}
    values = {name: found.get(row.format(name)) for name in TRAINERS}
    return {name: "–" if value is None else cell(value) for name, value in values.items()}
