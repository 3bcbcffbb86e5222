"""The pages are code: every command, configuration and script in them runs, in the order of the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import write_text
from drawbar.config.explain import markdown_reference
from harness import run_cli

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The README's files, as it shows them; the data is ours."""
    readme = ROOT / "README.md"
    for text in (*blocks(readme, "yaml"), *blocks(readme, "python")):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, f"a block without a file name: {text[:60]}"
        (tmp_path / name.group(1)).write_text(text, encoding="utf-8")
    write_text(tmp_path / "train.txt", 120, seed=1)
    write_text(tmp_path / "valid.txt", 20, seed=2)
    return tmp_path


def test_every_command_of_the_readme_runs(folder: Path) -> None:
    commands = [line for text in blocks(ROOT / "README.md", "bash") for line in text.splitlines() if line.strip()]
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[0] == "drawbar":
            done = run_cli(*words[1:], cwd=folder)
            assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
        else:
            run(command, words, folder)
    assert (folder / "runs" / "nouns" / "eval" / "validation" / "predictions.jsonl").exists()


def run(command: str, words: list[str], folder: Path) -> None:
    programs = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        programs[words[0]] + words[1:], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {
        target
        for page in pages
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_generated_pages_are_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown_reference(), "run `make docs`"


def test_the_loop_can_be_read_at_one_sitting() -> None:
    assert len((ROOT / "src/drawbar/train/trainer.py").read_text().splitlines()) < 400
    assert len((ROOT / "src/drawbar/engines/engine.py").read_text().splitlines()) < 120
    for path in (ROOT / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path
