"""Report and parity page in a real browser: they are drawn, ask for nothing, and can be used by everybody.

The pages hold texts that try to be markup wherever a text may stand: a script that ran would be an error, a dialog or a
request, all of which are seen here.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar.parity.parity_page import render_parity
from drawbar.report.report_page import write_report
from drawbar.tracking.run_view import write_run_status
from parity_reports import parity_report
from programs import need_programs
from report_pages import HOSTILE

pytestmark = pytest.mark.exhaustive

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = " ".join(HOSTILE).replace("\x00", "").replace("\n", " ")
NAME = "".join(HOSTILE).replace("\x00", "").replace("/", "∕").replace("\n", " ")
"""The same as the name of a folder."""
WIDE, NARROW = 1280, 390
VIEWS = [("light", WIDE), ("dark", NARROW)]
SECONDS = 60_000
"""Milliseconds that the browser may take for anything."""
FOCUSED = """(e => [
  e.tagName, e.id || e.dataset.rows || "", getComputedStyle(e).outlineStyle, Boolean(e.parentElement.open),
])(document.activeElement)"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    need_programs("chromium")
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root chromium refuses to start with it
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=options, timeout=SECONDS, chromium_sandbox=not options
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    found = {"report": folder / "report.html", "parity": folder / "parity.html"}
    write_report([make_run(folder / NAME), make_run(folder / "other", "1.0e-2")], found["report"])
    found["parity"].write_bytes(render_parity(parity_report(TEXT).values()))
    return found


def make_run(folder: Path, lr: str = "1.0e-3") -> Path:
    """A run as its files tell of it."""
    evaluation = folder / "eval" / "validation"
    evaluation.mkdir(parents=True)
    (folder / "logs").mkdir()
    text = json.dumps(TEXT, ensure_ascii=False)
    (folder / "config.yaml").write_text(f"data: {{train: {text}}}\noptim: {{lr: {lr}}}\n", encoding="utf-8")
    rows = [
        {"step": step, "time": time.time() + step, "train/loss": 4 / step, "train/lr": 0.1, f"eval/a/{TEXT}": step}
        for step in range(1, 31)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (evaluation / "scores.json").write_text(json.dumps({"step": 30, "records": 2, "loss": 0.5, TEXT: 1.0}))
    (evaluation / "predictions.jsonl").write_text(
        json.dumps({"id": 0, "prediction": TEXT}) + "\n" + json.dumps({"id": 1, "prediction": "a road"}) + "\n"
    )
    (folder / "logs" / "rank-0000.log").write_text(f"2026-01-01 00:00:00,000 ERROR error: {TEXT}\n", encoding="utf-8")
    write_run_status(folder, "complete", 30, 30, started=0.0)
    return folder


@contextmanager
def opened(browser: "Browser", file: Path, scheme: Any = "light", width: int = WIDE) -> "Iterator[Page]":
    """A page in the browser. At the end: nothing went wrong in it, and it has asked for nothing but itself."""
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
    )
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    seen: list[str] = []
    page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert seen == [file.as_uri()]


@pytest.mark.parametrize("kind", ["report", "parity"])
def test_pages_are_drawn_and_have_no_barriers(browser: "Browser", pages: dict[str, Path], kind: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for scheme, width in VIEWS:
        with opened(browser, pages[kind], scheme, width) as page:
            figures = json.loads(page.locator("#figure-data").text_content() or "")
            assert figures
            for figure in figures:
                drawn = page.locator(f"#{figure['id']} .scatterlayer .trace").count()
                assert drawn == len(figure["traces"])
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "it is wider than the window"
            assert TEXT.split()[0] in page.locator("main").inner_text()
            page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            found = Axe().run(page)
            assert not found.response["violations"], (scheme, width, found.generate_report())


def test_a_short_column_of_predictions_stays_narrow(browser: "Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"], width=NARROW) as page:
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        cell = page.locator("#predictions-0-0 tbody td").first
        assert cell.inner_text() == "0"
        assert cell.bounding_box()["width"] < 0.25 * NARROW


def test_a_report_by_the_keyboard_alone(browser: "Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.locator(".skip").bounding_box()["x"] >= 0  # it is seen once it has the focus
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            tag, kind, outline, is_open = page.evaluate(FOCUSED)
            reached.add(kind or tag)
            if tag == "BODY":
                break
            assert outline != "none", (tag, kind)
            if kind == "logarithmic":
                page.keyboard.press("Space")
            if tag == "SUMMARY" and not is_open:
                page.keyboard.press("Enter")
            if kind == "predictions-0-0":
                page.keyboard.type("a ROAD")
        assert {"logarithmic", "predictions-0-0", "events-0", "settings-table", "SUMMARY"} <= reached
        assert page.evaluate("document.getElementById('figure-0').layout.yaxis.type") == "log"
        assert page.locator("#predictions-0-0 tbody tr:visible").count() == 1
        assert page.locator("#predictions-0-0-count").inner_text() == "1 of 2"
