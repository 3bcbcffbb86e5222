"""A launcher that another package brings: the one of docs/jobs.md, found by its entry point, under every command."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from drawbar.cli import group
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.launchers import get_launcher
from harness import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"
PYTHON = """\
#!/bin/bash
trap 'echo saved; exit 75' TERM
echo "$*" "$(grep -c . "$4")"
while [ ! -e go ]; do sleep 0.05; done
echo complete
"""
"""Stands for Python: in place of training, it waits."""


def install(folder: Path) -> None:
    """What an installer leaves of a package whose module and pyproject.toml are those of the page."""
    text = PAGE.read_text(encoding="utf-8")
    module = text.partition("```python\n# at_home.py\n")[2].partition("```")[0]
    points = text.partition("```toml\n[project.")[2].partition("```")[0]
    assert points.startswith('entry-points."drawbar.launchers"]\n')
    metadata = folder / "at_home-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "at_home.py").write_text(module)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: at_home\nVersion: 1.0\n")
    entry_points = points.replace('entry-points."drawbar.launchers"]', "[drawbar.launchers]").replace('"', "")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def at_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, and a machine with the launcher and a Python that waits."""
    install(project / "site-packages")
    (project / "python").write_text(PYTHON)
    (project / "python").chmod(0o755)
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_STATE_HOME", str(project / "state"))
    monkeypatch.syspath_prepend(project / "site-packages")
    return project


def call(*arguments: str) -> Result:
    return CliRunner().invoke(group, arguments, standalone_mode=False)


def submit(project: Path, *arguments: str) -> Result:
    return call("submit", "config.yaml", f"cluster.python={project / 'python'}", *arguments)


def job(what: str) -> dict[str, object]:
    return json.loads(call("status", what, "--json").output)["job"]


def test_every_command_works_with_it(at_home: Path) -> None:
    shown = submit(at_home, "--to", "at_home", "--dry-run")
    assert "-m drawbar train" in shown.output, shown.exception
    assert not (at_home / "runs").exists()

    submitted = submit(at_home, "--to", "at_home").output.splitlines()
    number = submitted[-2].split()[1].rstrip(":")
    assert submitted[-2] == f"job {number}: run tiny on 1 × 1 processes"
    log = Path(submitted[-1].removeprefix("log: "))
    wait_until(lambda: log.exists() and log.read_text(), "the job to begin")
    assert (at_home / "runs" / "tiny" / "launch" / f"job-{number}.sh").read_text() in shown.output
    assert "RUNNING" in call("jobs").output
    assert {"number": number, "state": "RUNNING", "launcher": "at_home"}.items() <= job("tiny").items()
    assert call("logs", "tiny").output.startswith("-m drawbar train")
    assert isinstance(call("resume", number).exception, UserError)

    cancelled = call("cancel", "tiny")
    stopped = f"job {number} of {at_home / 'runs' / 'tiny'}: stopped; nothing was saved\n"
    assert cancelled.output == stopped, cancelled.exception
    assert {"state": "STOPPED", "exit_code": 75}.items() <= job(number).items()
    assert log.read_text().endswith("saved\n")

    again = call("resume", number)
    assert again.exception is None
    (at_home / "go").touch()
    followed = call("logs", "tiny", "-f")
    assert (followed.return_value, "complete\n" in followed.output) == (ExitCode.DONE, True), followed.output
    assert job("tiny")["state"] == "COMPLETED"


def test_what_it_cannot_do_is_refused(at_home: Path) -> None:
    with pytest.raises(UserError, match="there is no launcher 'at_hom'") as unknown:
        raise submit(at_home, "--to", "at_hom").exception or AssertionError
    assert "did you mean at_home? There are: at_home, slurm, ssh" in str(unknown.value.remedy)
    for option, says in (
        (["--sweep", "optim.lr=1,2"], "does not take --sweep"),
        (["--snapshot"], "does not take --sweep, --at-once or --snapshot"),
        (["--hosts", "gpu1"], "exclude one another"),
    ):
        assert says in str(submit(at_home, "--to", "at_home", *option).exception)
    several = submit(at_home, "--to", "at_home", "--nodes", "2").exception
    assert "at_home runs a job on one machine, and not on 2\n  where: cluster.nodes" in str(several)


def test_one_that_is_no_launcher_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "no_launcher-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: no-launcher\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[drawbar.launchers]\nlist = builtins:list\nbad = json:loads\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="list is not a subclass of"):
        get_launcher("list", "--to")
    with pytest.raises(UserError, match="bad is not a subclass of"):
        get_launcher("bad", "--to")
