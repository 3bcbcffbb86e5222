"""Log files: one a rank, appended, from the first record on."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.errors import UserError
from drawbar.runtime.log import errors_in_log, log_to_file, logger, open_log_file, start_logging
from exhaustive import params
from harness import run_cli


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    close()
    logger.level, logger.propagate = before[:2]
    logger.handlers[:] = before[2]


def close() -> None:
    for handler in logger.handlers:
        handler.close()


def console() -> tuple[io.StringIO, logging.Handler]:
    stream = io.StringIO()
    return stream, logging.StreamHandler(stream)


def test_records_from_before_the_file_are_in_it(tmp_path: Path) -> None:
    stream, handler = console()
    start_logging(0, handler)
    logger.info("early %d", 1)
    logger.warning("early two")
    assert not list(tmp_path.iterdir())
    open_log_file(tmp_path, 0)
    logger.info("late")
    logger.debug("not worth keeping")
    lines = (tmp_path / "logs" / "rank-0000.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO early 1", "WARNING early two", "INFO late"]
    assert stream.getvalue().splitlines() == ["early 1", "early two", "late"]


def test_a_second_run_appends(tmp_path: Path) -> None:
    for number in range(2):
        start_logging(0, console()[1])
        logger.info("start %d", number)
        open_log_file(tmp_path, 0)
        logger.info("end %d", number)
        close()
    lines = (tmp_path / "logs" / "rank-0000.log").read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == ["start 0", "end 0", "start 1", "end 1"]


def test_early_records_of_a_run_that_failed_are_not_the_next_ones(tmp_path: Path) -> None:
    start_logging(0, console()[1])
    logger.info("of a run that never opened its file")
    start_logging(0, console()[1])
    open_log_file(tmp_path, 0)
    assert (tmp_path / "logs" / "rank-0000.log").read_text() == ""


def test_other_ranks_have_a_file_and_no_console(tmp_path: Path) -> None:
    stream, handler = console()
    start_logging(3, handler)
    logger.warning("from rank 3")
    open_log_file(tmp_path, 3)
    assert "from rank 3" in (tmp_path / "logs" / "rank-0003.log").read_text()
    assert stream.getvalue() == ""


def test_a_log_that_cannot_be_written_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0000.log").symlink_to("/dev/full")
    stream, handler = console()
    start_logging(0, handler)
    open_log_file(tmp_path, 0)
    for number in range(3):
        logger.info("line %d", number)
    assert stream.getvalue().splitlines() == ["line 0", "line 1", "line 2"]
    assert capsys.readouterr().err.count("No space left on device") == 1
    with pytest.raises(OSError, match="No space left"):
        close()
    logger.handlers.clear()


def test_what_ends_a_run_is_in_its_log(tmp_path: Path) -> None:
    start_logging(0, console()[1])
    open_log_file(tmp_path, 0)
    for error in (UserError("what a user can mend", remedy="mend it"), ValueError("of the program")):
        with pytest.raises(type(error)), errors_in_log():
            raise error
    text = (tmp_path / "logs" / "rank-0000.log").read_text()
    assert "ERROR error: what a user can mend\n  fix:   mend it\n" in text
    assert 'test_log.py", line' in text
    assert text.endswith("ValueError: of the program\n")


@pytest.mark.parametrize("early", [True, False])
def test_an_error_for_the_file_alone(early: bool, tmp_path: Path) -> None:
    stream, handler = console()
    start_logging(0, handler)
    if early:
        log_to_file("gone wrong: 100%")
    open_log_file(tmp_path, 0)
    if not early:
        log_to_file("gone wrong: 100%")
    assert (tmp_path / "logs" / "rank-0000.log").read_text().endswith("ERROR gone wrong: 100%\n")
    assert stream.getvalue() == ""


CLEARS = "a\x1b[2J\x1b]0;title\x07b\r\n\tc\xa0d"
"""What makes a terminal clear its screen and change its title; and what a text may have."""
VISIBLE = "a\\x1b[2J\\x1b]0;title\\x07b\\x0d\n\tc\xa0d"


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path) -> None:
    assert str(UserError(CLEARS, where=CLEARS, remedy=CLEARS)).count(VISIBLE) == 3
    stream, handler = console()
    start_logging(0, handler)
    open_log_file(tmp_path, 0)
    logger.info("a file: %s", CLEARS)
    log_to_file(CLEARS)
    assert stream.getvalue() == f"a file: {VISIBLE}\n"
    assert (tmp_path / "logs" / "rank-0000.log").read_text().count(VISIBLE) == 2


@pytest.mark.parametrize("processes", params([1, 2], often=[1]))
def test_an_exception_of_the_user_moves_no_cursor(processes: int, project: Path) -> None:
    (project / "own.py").write_text(
        "import drawbar\n\nclass Own(drawbar.CausalLM):\n"
        f"    def build_model(self):\n        raise RuntimeError({CLEARS!r})\n"
    )
    done = run_cli("train", "config.yaml", "task.type=own:Own", f"launch.nproc={processes}", cwd=project)
    assert done.code == 2
    assert VISIBLE.partition("\\x0d")[0] in done.err
    assert "\x1b" not in done.err + done.out
