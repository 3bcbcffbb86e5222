"""The pages are code: every command, configuration and script in them runs, in the order of the page."""

import re
from contextlib import chdir
from pathlib import Path

import pytest
from pages import blocks, run_commands, write_files

import drawbar
from drawbar.config.io.explain import schema_json, schema_text
from drawbar.config.rules.rule_table import RULES, check_rules

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The README's files, as it shows them, and the CSV files of somebody who reads it."""
    write_files(README, tmp_path)
    for name, count in (("stars", 60), ("more-stars", 12)):
        rows = [f'"A {"warm" if number % 2 else "cold"} room, number {number}",{number % 2}' for number in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["review,stars", *rows, ""]))
    return tmp_path


def test_every_command_of_the_readme_runs(folder: Path) -> None:
    assert run_commands(README, folder) >= 10
    assert (folder / "runs" / "praise" / "checkpoints").is_dir()
    assert (folder / "reviews" / "reviews-model" / "model.safetensors").exists()


def test_settings_that_need_the_hub_are_those_of_the_program(tmp_path: Path) -> None:
    texts = [block.text for block in blocks(README) if block.language == "yaml" and block.mark == "hub"]
    assert texts
    with chdir(tmp_path):
        for text in texts:
            Path("part.yaml").write_text(text, encoding="utf-8")
            check_rules(drawbar.load_config("part.yaml"), RULES)


def test_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"demo", "test", "quick"} <= named <= targets


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "configs" / "README.md", *sorted(ROOT.glob("examples/*/README.md"))):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_up_to_date() -> None:
    schema = (ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8")
    assert schema == schema_text(schema_json()), "run `make docs`"
