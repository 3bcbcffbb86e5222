"""docs/first_run.md and docs/tutorial: commands run, and numbers are true; docs/troubleshooting.md quotes drawbar."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import blocks, run_commands

import drawbar
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = DOCS / "tutorial"
CHAPTERS = ("index", "one_process", "ddp", "zero1", "fsdp", "tensor", "pipeline", "context", "combinations")

sys.path.append(str(TUTORIAL))
from layouts import LAYOUTS  # noqa: E402
from measure import measure_all  # noqa: E402
from write_pages import MEASURED, SHOWN, figure_of, written  # noqa: E402


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, object]]]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_every_command_of_the_first_run_runs(tmp_path: Path) -> None:
    assert run_commands(DOCS / "first_run.md", tmp_path) >= 10
    assert len((tmp_path / "reviews" / "labelled.jsonl").read_text().splitlines()) > 1


@pytest.mark.exhaustive
def test_every_command_of_the_tutorial_runs_and_the_losses_are_the_same(tmp_path: Path) -> None:
    run_commands(TUTORIAL / "index.md", tmp_path)
    project = tmp_path / "spread"
    for chapter in CHAPTERS[1:]:
        assert run_commands(TUTORIAL / f"{chapter}.md", project) >= 1, chapter
    losses = {
        run: json.loads((project / "runs" / run / "eval" / "validation" / "scores.json").read_text())["loss"]
        for run in ("one", "small", "ddp", "zero1", "fsdp", "tensor", "pipeline")
    }
    assert losses == pytest.approx(dict.fromkeys(losses, losses["one"]), rel=1e-4)


def test_every_layout_of_the_tutorial_is_allowed(tmp_path: Path) -> None:
    parts = [block for name in CHAPTERS for block in blocks(TUTORIAL / f"{name}.md") if block.mark == "part"]
    assert len(parts) >= 2
    for block in parts:
        (tmp_path / "part.yaml").write_text(block.text, encoding="utf-8")
        check_rules(drawbar.load_config(tmp_path / "part.yaml"), RULES + TRAIN_RULES)


def test_tables_and_figures_are_those_of_the_measurement(measured: dict[str, list[dict[str, object]]]) -> None:
    assert measured.keys() == LAYOUTS.keys()
    for name in SHOWN:
        page = TUTORIAL / f"{name}.md"
        assert page.read_text(encoding="utf-8") == written(page, measured), "run `make docs`"
        drawn = (TUTORIAL / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == figure_of(name, measured), "run `make docs`"


def test_all_layouts_came_to_the_same_losses(measured: dict[str, list[dict[str, object]]]) -> None:
    wanted = measured["one process"][0]["losses"]
    for name, ranks in measured.items():
        for rank in ranks:
            assert rank["losses"] == pytest.approx(wanted, rel=1e-6), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp", "tensor=4, sequence"])
def test_the_numbers_can_be_measured_again(name: str, measured: dict[str, list[dict[str, object]]]) -> None:
    for found, wanted in zip(measure_all([name])[name], measured[name], strict=True):
        for kind in ("parameters", "gradients", "optimizer", "sent"):
            assert found[kind] == wanted[kind]
        assert found["activations"] == pytest.approx(wanted["activations"], rel=0.01)  # kernels differ by machine


def texts(folder: Path) -> Iterator[str]:
    """Every text in the source; what is put into it while the program runs is ``…``."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_messages_are_those_of_the_program() -> None:
    quoted = [block.text.strip() for block in blocks(DOCS / "troubleshooting.md") if block.mark == "message"]
    known = set(texts(Path(drawbar.__file__).parent))
    assert len(quoted) >= 25
    assert [message for message in quoted if message not in known] == []
