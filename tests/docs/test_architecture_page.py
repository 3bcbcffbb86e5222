"""The walks of docs/architecture.md are those of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "drawbar"
SECTION = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("## Walks\n")[2].partition("\n## ")[0]
WALKS = dict(re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=\n- |\Z)", SECTION, re.MULTILINE | re.DOTALL))
MOST = {"Record → loss": 15, "YAML → engine": 11}
STARTS = {"cli/train", "train/prepare", "train/callbacks/save", "jobs/commands/submit", "jobs/slurm/slurm_launcher"}


@pytest.mark.parametrize("name", WALKS)
def test_each_module_is_named_by_one_before_it(name: str) -> None:
    modules = re.findall(r"`(.+?)`", WALKS[name])
    assert len(modules) == len(set(modules)) <= MOST.get(name, len(modules))
    for number, module in enumerate(modules):
        assert (SOURCE / f"{module}.py").is_file(), module
        package, _, last = f"drawbar.{module.replace('/', '.')}".rpartition(".")
        names = re.compile(rf"\b{re.escape(package)}\.{last}\b|from {re.escape(package)} import .*\b{last}\b")
        before = [(SOURCE / f"{one}.py").read_text("utf-8") for one in modules[:number]]
        assert module in STARTS or any(names.search(text) for text in before), module


def test_there_are_four() -> None:
    assert len(WALKS) == 4
