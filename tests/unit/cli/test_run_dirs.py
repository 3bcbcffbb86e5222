"""What counts as a run directory, and what commands say of a project folder and of a run that has no job."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from conftest import make_project
from drawbar.config.io.source import run_folder
from drawbar.errors import ExitCode
from drawbar.jobs.commands.logs import _show_run
from drawbar.tracking.run_view import write_run_status
from drawbar.util.run_dir import LOCK_FILE, is_run_dir
from harness import run_cli, wait_until
from messages import check_one_message

NO_RUN = "is not a run directory: it has a config.yaml, but none of a run's other files"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a short run."""
    folder = make_project(tmp_path_factory.mktemp("plain"))
    settings = ("train.steps=2", "optim.warmup=0", "eval.every=null")
    done = run_cli("train", "config.yaml", *settings, cwd=folder)
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize(
    "command", ["report", "status", "logs", "resume", "watch", "eval", "export --to model", "checkpoint list"]
)
def test_a_project_folder_is_no_run(command: str, project: Path) -> None:
    report = project / "report.html"
    report.write_text("of a real run")
    done = run_cli(*command.split(), ".", cwd=project)
    assert done.code == 2, done.out + done.err
    check_one_message(done.err, f". {NO_RUN}", "it is RUN.DIR/RUN.NAME of that configuration")
    assert report.read_text() == "of a real run"


def test_projects_are_not_listed_as_runs(project: Path) -> None:
    assert json.loads(run_cli("runs", "--json", cwd=project).out)["run"] == "tiny"
    (project / "projects" / "mine").mkdir(parents=True)
    shutil.copy(project / "config.yaml", project / "projects" / "mine")
    assert run_cli("runs", "projects", cwd=project).out == "no runs in projects\n"


def test_a_run_counts_from_its_start_and_without_hidden_files(project: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs").mkdir()  # as a project may have
    assert not is_run_dir(tmp_path)
    (tmp_path / LOCK_FILE).touch()  # before a run writes its configuration
    assert run_folder(tmp_path) == tmp_path
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (project / "runs" / "tiny").glob("[!.]*"):
        (copy / path.name).symlink_to(path)
    assert run_folder(copy) == copy


def test_logs_of_a_run_without_a_job(project: Path) -> None:
    log = (project / "runs" / "tiny" / "logs" / "rank-0000.log").read_text()
    for follow in ((), ("-f",)):
        shown = run_cli("logs", "runs/tiny", *follow, cwd=project)
        assert (shown.code, shown.out) == (0, log), shown.err
    refused = run_cli("logs", "runs/tiny", "--rank", "3", cwd=project)
    assert refused.code == 2
    check_one_message(refused.err, "the run tiny has no log of process 3")


def test_logs_are_followed_until_the_run_ends(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_run_status(tmp_path, "training", 0, 20, started=0.0)
    codes: list[int] = []
    following = threading.Thread(target=lambda: codes.append(_show_run(tmp_path, True, 0)))
    following.start()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0000.log").write_text("first\n")
    shown = b""

    def has_shown(text: bytes) -> bool:
        nonlocal shown
        shown += capfdbinary.readouterr().out
        return text in shown

    wait_until(lambda: has_shown(b"first"), "the first line")
    assert following.is_alive()
    with (tmp_path / "logs" / "rank-0000.log").open("a") as log:
        log.write("last\n")
    write_run_status(tmp_path, "failed", 3, 20, started=0.0)
    following.join()
    wait_until(lambda: has_shown(b"last"), "the last line")
    assert codes == [ExitCode.FAILED]


@pytest.mark.parametrize("command", ["resume", "cancel"])
def test_a_run_without_a_job_is_not_resumed_as_a_job(command: str, project: Path) -> None:
    done = run_cli(command, "runs/tiny", cwd=project)
    assert done.code == 2
    check_one_message(done.err, "it was trained without `drawbar submit`", "`drawbar train CONFIG`")
