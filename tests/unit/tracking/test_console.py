"""The console, on a real pseudo-terminal whose bytes are drawn on a small model of a screen, and on a pipe."""

import contextlib
import logging
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from drawbar.tracking.console import Console, PlainConsole, TerminalConsole, make_console
from drawbar.tracking.table import print_table
from drawbar.util.best_score import BestScore

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal:
    """Inside ``with``, standard output is a pseudo-terminal. A thread reads what is written to it."""

    def __enter__(self) -> "Terminal":
        self._reading, writing = os.openpty()
        self._received = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._stdout = os.fdopen(writing, "w", encoding="utf-8")
        # Not in a fixture: pytest puts its own standard output back between a fixture and its test.
        self._redirection = contextlib.redirect_stdout(self._stdout)
        self._redirection.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._redirection.__exit__(None, None, None)
        self._stdout.close()
        self._reader.join()
        os.close(self._reading)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._reading, 65536)
            except OSError:  # Linux: the other side was closed
                return
            if not chunk:  # macOS: the same
                return
            self._received += chunk

    def output(self) -> str:
        """Everything written; complete only after ``with``."""
        return self._received.decode()


def screen(output: str) -> list[str]:
    """The lines that a terminal, wide and high enough, shows after this output."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(output):
        escape = ESCAPE.match(output, at)
        if escape:
            argument, command = escape.groups()
            match command:
                case "A":
                    row -= int(argument or 1)
                case "K":
                    lines[row] = ""
                case "m" | "h" | "l":
                    pass
                case _:
                    raise AssertionError(f"the model of the screen does not know {escape.group()!r}")
            at = escape.end()
            continue
        character = output[at]
        at += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        else:
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def values(loss: float) -> dict[str, float]:
    return {"train/loss": loss, "train/lr": 3e-4, "train/grad_norm": 1.0, "train/tokens_per_second": 18204.0}


def run(console: Console) -> None:
    """A short run with everything that can happen in it."""
    logger = logging.Logger("test_console")
    logger.addHandler(console.logging_handler())
    console.message("run [bold]demo[/bold]")
    for done in range(5):
        console.phase("encoding", done, 4)
    console.start(total_steps=1000, first_step=997)
    for step in (998, 999, 1000):
        console.advance(step)
        console.log(step, values(1000 / step))
        logger.warning("warned [at] %d", step)
    for done in range(3):
        console.phase("evaluating", done, 2)
    console.evaluation(1000, {"eval/validation/loss": 3.912})
    console.best(BestScore(step=1000, metric="loss", score=3.912))
    console.stop()
    console.stop()


LINES = [
    "run [bold]demo[/bold]",
    "step 998/1,000  loss 1.002  lr 3.0e-04  grad_norm 1.00  18,204 tok/s",
    "warning: warned [at] 998",
    "step 999/1,000  loss 1.001  lr 3.0e-04  grad_norm 1.00  18,204 tok/s",
    "warning: warned [at] 999",
    "step 1,000/1,000  loss 1.000  lr 3.0e-04  grad_norm 1.00  18,204 tok/s",
    "warning: warned [at] 1000",
    "step 1,000/1,000  validation  loss 3.912",
]


def test_a_terminal_shows_whole_lines_above_one_view() -> None:
    with Terminal() as terminal:
        console = make_console(is_rank_zero=True)
        assert isinstance(console, TerminalConsole)
        run(console)
    output = terminal.output()
    shown = screen(output)
    assert shown[: len(LINES)] == LINES
    bar, *view = shown[len(LINES) :]
    assert re.fullmatch(r"━{70,79} *100%", bar)
    assert view == [
        "progress    step 1,000/1,000",
        "training    loss 1.000  lr 3.0e-04  grad_norm 1.00  18,204 tok/s",
        "evaluation  step 1,000  loss 3.912",
        "best        loss 3.912  at step 1,000",
    ]
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is given back


def test_the_view_shows_the_run_and_the_phase() -> None:
    with Terminal() as terminal:
        console = TerminalConsole()
        console.start(total_steps=20_000, first_step=11_000)
        for step in (11_001, 11_002, 11_003):
            console.advance(step)
        console.log(11_003, {"train/loss": 4.3214, "train/tokens_per_second": 118_204.0})
        console.advance(11_004)
        console.phase("evaluating", 45, 120)
        console.message("above the view, which is drawn again with it")
        console.stop()
    drawn = ESCAPE.sub("", terminal.output()).split("drawn again with it")[1]
    bar, progress, training, phase_bar, phase, *_ = re.split(r"[\r\n]+", drawn.strip())
    assert bar.split()[-1] == "55%"
    assert re.fullmatch(r"progress    step 11,004/20,000(  \S+ left)?", progress.rstrip())
    assert training.rstrip() == "training    loss 4.321  118,204 tok/s"
    assert phase_bar.split()[-1] == "38%"
    assert phase.rstrip() == "evaluating  45/120"
    assert max(len(line.rstrip()) for line in (bar, progress, training, phase)) < 80


def test_a_failing_run_gives_the_terminal_back() -> None:
    with Terminal() as terminal:
        console = TerminalConsole()
        console.start(total_steps=10, first_step=0)
        console.phase("evaluating", 1, 2)
        console.stop()
        console.message("failed")
    assert terminal.output().count("\x1b[?25h") == 1
    *_, bar, step, last = screen(terminal.output())
    assert bar.endswith("0%")
    assert step == "progress    step 0/10"
    assert last == "failed"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal() as terminal:
        run(make_console(is_rank_zero=True))
    styles = {code for code, command in ESCAPE.findall(terminal.output()) if command == "m"}
    assert styles <= {"0", "1", "2"}  # reset, bold and dim


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Terminal():
        assert isinstance(make_console(is_rank_zero=True), PlainConsole)


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(is_rank_zero=True)
    assert isinstance(console, PlainConsole)
    run(console)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out
    # The time left is only known once two steps are done, and is nothing at the end.
    shown = [re.sub(r"  \S+ left$", "", line) for line in captured.out.splitlines()]
    assert shown == [line for line in LINES if not line.startswith("warning")]
    assert captured.err.splitlines() == [f"warning: warned [at] {step}" for step in (998, 999, 1000)]


def test_plain_lines_end_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    console = PlainConsole(clock=lambda: now[0])
    console.start(total_steps=40, first_step=0)
    for step in (1, 2):
        now[0] += 2.0
        console.advance(step)
    console.log(2, values(4.0))
    assert capsys.readouterr().out.endswith("  18,204 tok/s  1m16s left\n")


def test_a_long_phase_speaks_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    console = PlainConsole(clock=lambda: now[0])
    for done in range(26):
        console.phase("encoding", done, 25)
        now[0] += 1.0
    assert capsys.readouterr().out.splitlines() == ["encoding 10/25 (40%)", "encoding 20/25 (80%)"]


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    console = make_console(is_rank_zero=False)
    assert type(console) is Console
    run(console)
    assert capfd.readouterr() == ("", "")


ROWS = [["this model", "2.12"], ["[trigram]", "13.01"]]


def test_table_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Validation", ["model", "bits/byte"], ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "Validation",
        "",
        "model       bits/byte",
        "----------  ---------",
        "this model       2.12",
        "[trigram]       13.01",
    ]


def test_table_on_a_terminal() -> None:
    with Terminal() as terminal:
        print_table("Validation", ["model", "bits/byte"], ROWS)
    shown = screen(terminal.output())
    assert "│ this model │      2.12 │" in shown
    assert "│ [trigram]  │     13.01 │" in shown


def test_table_on_a_terminal_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with Terminal() as terminal:
        print_table("Scores", ["model", "bits/byte"], ROWS)
    shown = screen(terminal.output())
    assert shown == ["Scores", "this model", "  bits/byte  2.12", "[trigram]", "  bits/byte  13.01"]


def test_output_to_a_file_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out.txt").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        make_console(is_rank_zero=True).log(20, values(4.3214))
        assert (tmp_path / "out.txt").read_text().startswith("step 20  loss 4.321")
