"""docs/launch.md: every command runs, the jobs of it on a real Slurm, and all of its runs are the same run."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from made_up import write_data
from pages import blocks, run_command, write_files

from apptainer_stand_in import calls, install, make_image
from drawbar.config.io.load_config import load_config
from drawbar.jobs.settings import ClusterSection
from runs import largest_difference, losses
from slurm_cluster import SlurmCluster

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
PROFILE = next(block.text for block in blocks(PAGE) if block.mark == "profile")
COMMANDS = [shlex.split(line) for block in blocks(PAGE) if block.language == "bash" for line in block.text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files, its profile among them; the data is ours."""
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    path = re.match(r"# ~/.config/(\S+)\n", PROFILE)
    assert path is not None
    profile = tmp_path / "home" / path[1]
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE, encoding="utf-8")
    return tmp_path


@pytest.mark.exhaustive
def test_every_command_runs_and_every_run_is_the_same(
    folder: Path, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(folder / "drawbar.sif")
    tools = install(folder / "bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environ = {"PATH": f"{tools}:{slurm.environment['PATH']}"}
    jobs, printed = [], ""
    for words in COMMANDS:
        if words[1] == "submit":
            said = slurm.run(sys.executable, "-m", "drawbar", *words[1:], cwd=folder, env=environ)
            printed += said
            jobs += re.findall(r"^job (\d+)", said)
        else:
            done = run_command(words, folder)
            assert done.code == 0, done.err
    shown = [line for block in blocks(PAGE) if block.mark == "output" for line in block.text.splitlines()]
    assert [line for line in shown if line not in printed] == []

    assert len(jobs) == 2
    for job in jobs:
        facts = slurm.wait_for(job, "COMPLETED", "FAILED", seconds=150)
        assert facts["JobState"] == "COMPLETED", Path(facts["StdOut"]).read_text()
        assert facts["NumNodes"] == "2"
    assert {call["environ"]["APPTAINER_CONTAINER"] for call in calls(image)} == {str(image)}
    runs = {path.name: losses(path) for path in (folder / "runs").iterdir() if path.name != ".cache"}
    assert set(runs) == {"laptop", "pair", "nodes", "contained"}
    for name, found in runs.items():
        assert len(found) > 0
        assert largest_difference(runs["laptop"], found) < 1e-5, name


def test_lines_that_are_comments_are_settings_too() -> None:
    """What the profile leaves out, since it is not the same everywhere."""
    hidden = re.findall(r"^# (\w+: (?:\[.*\]|\d+))", PROFILE, re.MULTILINE)
    assert len(hidden) == 3
    for line in hidden:
        load_config(None, [f"cluster.{line.replace(': ', '=', 1)}"])


def test_settings_that_the_page_names_exist() -> None:
    names = re.findall(r"`cluster\.(\w+)", PAGE.read_text(encoding="utf-8"))
    assert len(names) > 8
    assert set(names) <= set(ClusterSection.model_fields)


def test_what_does_not_start_is_said_in_these_words() -> None:
    """The first column of the last table."""
    source = "".join(path.read_text() for path in (Path(__file__).parents[2] / "src" / "drawbar").rglob("*.py"))
    table = PAGE.read_text(encoding="utf-8").split("## When it does not start")[1]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    ours = set(messages) - {"No module named drawbar", "there is no apptainer or singularity on the node"}
    assert len(ours) == 4
    assert [message for message in ours if message not in source] == []
