"""The page of ``drawbar parity``: of a real comparison, and of results that hold anything."""

import json
from pathlib import Path

import pytest

from drawbar.parity.parity_page import bar_share, exceeds, render_parity, shown
from drawbar.report.page import MARKER
from harness import run_cli
from messages import check_one_message
from parity_reports import STEPS, parity_report
from report_pages import HOSTILE, Page, read_page


def page_of(folder: Path, text: str) -> Page:
    file = folder / "parity.html"
    file.write_bytes(render_parity(parity_report(text).values()))
    # those to look at come before the one that is equal
    return read_page(file, ["summary", "strategy-1", "strategy-2", "strategy-3", "strategy-0"])


def test_a_real_comparison(project: Path) -> None:
    command = ("parity", "config.yaml", "--ranks", "1", "--strategies", "single activation_checkpointing=full")
    done = run_cli(*command, "--steps", "3", "--layers", "1", "--json", "--html", "pages/parity.html", cwd=project)
    assert done.code == 0, done.err
    assert "page: pages/parity.html" in done.err
    [case] = json.loads(done.out)["cases"]
    page = read_page(project / "pages" / "parity.html", ["summary", "strategy-0"])
    assert page.one("h1").text == "Parity of tiny"
    assert "The strategy computes what one process computes." in page.source
    loss, norm, apart = page.figures
    assert [trace["name"] for trace in loss["traces"]] == ["one process", "single activation_checkpointing=full"]
    assert loss["traces"][1]["x"] == [1, 2, 3]
    assert loss["traces"][1]["y"] == pytest.approx(case["curves"]["loss"]["found"], rel=1e-6)
    assert norm["traces"][0]["y"] == pytest.approx(case["curves"]["grad_norm"]["reference"], rel=1e-6)
    assert apart["logarithmic"]
    assert [trace["is_bound"] for trace in apart["traces"]] == [False, True, False, True]

    (project / "mine.html").write_text("<!doctype html><p>mine\n")
    refused = run_cli(*command, "--html", "mine.html", cwd=project)
    assert refused.code == 2
    check_one_message(refused.err, "mine.html is there already", "--html")


def test_each_verdict_and_the_first_module(tmp_path: Path) -> None:
    page = page_of(tmp_path, "model.layers.1.mlp")
    assert page.source.partition("\n")[0].endswith(MARKER.decode())
    assert "2 of 4 strategies do not compute what one process computes" in page.source
    rows = page.section("summary")
    for verdict in ("✓ equal", "✗ diverges", "– refused", "✗ crashed"):
        assert verdict in rows
    [around, every] = page.all("tr", **{"class": "first"})
    assert "model.layers.1.mlp" in around.text
    assert "first to differ" in around.text
    assert around.text == every.text
    assert "All 22 modules" in page.section("strategy-1")
    assert "∞" in around.text
    assert "cannot be" in page.section("strategy-2")
    assert "RuntimeError" in page.section("strategy-3")
    assert len(page.figures) == 6
    assert page.figures[2]["traces"][0]["y"] == [None, *[1e-8] * (STEPS - 1)]  # what is equal has no logarithm
    assert page.figures[5]["traces"][0]["y"] == [None] * STEPS


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_text(tmp_path: Path, text: str) -> None:
    page = page_of(tmp_path, text)
    plain = text.replace("\x00", "�")  # as every HTML parser reads it
    assert text in page.one("h1").text or plain in page.one("h1").text
    for section in ("summary", "strategy-1", "strategy-2", "strategy-3"):
        assert text in page.section(section) or plain in page.section(section), section
    assert not page.all("svg", "b", "img")
    assert "<" not in page.source.split('id="figure-data">')[1].split("</script>")[0]


def test_the_json_can_be_read_by_any_program() -> None:
    found = json.loads(parity_report().as_json(), parse_constant=pytest.fail)
    worst = found["cases"][1]["modules"][20]["gradient"]
    assert worst["value"] == "inf"
    assert [module["standing"] for module in found["cases"][1]["modules"][19:]] == [
        "equal", "first to differ", "differs",
    ]  # fmt: skip


def test_bars_and_numbers() -> None:
    def worst(value: float | str) -> dict[str, object]:
        return {"value": value, "limit": 1e-4}

    assert [bar_share(worst(value)) for value in (0.0, 1e-20, 1e-4, 1e-3, 1.0, "inf", "nan")] == [
        "0", "2.0", "75.0", "87.5", "100.0", "100", "100",
    ]  # fmt: skip
    assert [exceeds(worst(value)) for value in (0.0, 1e-4, 1.1e-4, "inf", "nan")] == [False, False, True, True, True]
    assert [shown(value) for value in (0.0, 1.23e-7, "inf", "nan")] == ["0", "1.2e-07", "∞", "∞"]
