"""Acceptance: ``drawbar init`` writes projects that train, learn, and pass their own tests."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from importlib.resources import files
from pathlib import Path

import click
import pytest

from drawbar.cli import group
from drawbar.cli.init import TEMPLATES, init, project_name, write_project
from drawbar.config.io.load_config import load_config
from drawbar.config.schema.section import Section
from drawbar.errors import UserError
from exhaustive import some
from harness import run_cli, run_script
from runs import losses

EACH = pytest.mark.parametrize("template", TEMPLATES)
TWO_OFTEN = pytest.mark.parametrize("template", some(TEMPLATES, 2))
FEW_STEPS = ("train.steps=12", "train.epochs=null", "eval.every=null", "tracking.log_every=1")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make(folder: Path, template: str = "language_model") -> Path:
    """The project ``demo`` in ``folder``."""
    write_project(folder / "demo", template)
    return folder / "demo"


def commands(project: Path) -> list[list[str]]:
    """What the README tells to type."""
    (block,) = re.findall(r"^```bash\n(.*?)^```", (project / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


# --- the templates


def test_the_package_holds_the_templates_that_the_command_offers() -> None:
    folder = files("drawbar") / "templates"
    assert {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")} == set(TEMPLATES)
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    assert '"templates/**/*"' in pyproject.read_text()  # else no wheel has them


@EACH
def test_a_project_is_complete_and_small(template: str, tmp_path: Path) -> None:
    project = contents(make(tmp_path, template))
    assert {"config.yaml", "README.md", "test_project.py", ".gitignore", "data/make_data.py"} <= set(project)
    assert not any(name.endswith("-tpl") or b"{{" in text for name, text in project.items())
    assert sum(len(text) for name, text in project.items() if name.startswith("data/")) < 35_000
    assert ("task.py" in project) == (template == "custom_task")


@EACH
def test_the_configuration_is_valid_and_bears_the_project_name(template: str, tmp_path: Path) -> None:
    with chdir(make(tmp_path, template)):
        loaded = load_config("config.yaml")
    assert loaded.config.run.name == "demo"
    assert loaded.config.eval.mode == "auto"  # so that another eval.metric does not keep the worst checkpoint
    assert isinstance(loaded.config.task, Section)
    sys.modules.pop("task", None)
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(tmp_path))]


@EACH
def test_every_command_of_the_readme_parses(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, template))
    found = commands(Path())
    assert [words[1] for words in found] == ["train", "train", "eval", found[3][1]]
    assert found[3][1] == ("generate" if template == "language_model" else "predict")
    for program, name, *rest in found:
        assert program == "drawbar"
        group.commands[name].make_context(name, rest)


@EACH
def test_the_data_are_what_their_script_writes(template: str, tmp_path: Path) -> None:
    project = make(tmp_path, template)
    before = contents(project)
    for path in [*project.glob("data/train.*"), *project.glob("data/valid.*")]:
        path.unlink()
    done = subprocess.run([sys.executable, "-B", "data/make_data.py"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(project) == before


@EACH
def test_the_code_passes_the_linter(template: str, tmp_path: Path) -> None:
    project = make(tmp_path, template)
    settings = Path(__file__).parents[3] / "pyproject.toml"
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(settings), str(project)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=settings.parent)  # where src/drawbar is
        assert done.returncode == 0, done.stdout + done.stderr


@TWO_OFTEN
def test_a_project_trains_and_its_commands_work(template: str, tmp_path: Path) -> None:
    project = make(tmp_path, template)
    train, _, evaluate, use = commands(project)
    done = run_cli(*train[1:], *FEW_STEPS, cwd=project)
    assert done.code == 0, done.out + done.err
    trace = losses(project / "runs" / "demo")
    assert len(trace) == 12
    assert min(trace[11], trace[12]) < trace[1]
    scores = project / "runs" / "demo" / "eval" / "validation" / "scores.json"
    scores.unlink()
    for words in (evaluate, use):
        done = run_cli(*words[1:], cwd=project)
        assert done.code == 0, done.out + done.err
    assert scores.exists()
    if use[1] == "predict":
        output = [json.loads(line) for line in (project / "predictions.jsonl").read_text().splitlines()]
        assert len(output) >= 2
        assert all(line["prediction"] is not None for line in output)


@TWO_OFTEN
def test_the_projects_own_test_passes(template: str, tmp_path: Path) -> None:
    project = make(tmp_path, template)
    program = Path(pytest.__file__).with_name("__main__.py")
    done = run_script(program, "-q", "-p", "no:cacheprovider", "test_project.py", cwd=project)
    assert done.code == 0, done.out + done.err
    assert "2 passed" in done.out
    assert not (project / "runs").exists()


@pytest.mark.exhaustive
def test_the_projects_own_test_can_fail(tmp_path: Path) -> None:
    project = make(tmp_path, "custom_task")
    config = project / "config.yaml"
    config.write_text(config.read_text().replace("lr: 1.0e-2", "lr: 0.0"))
    program = Path(pytest.__file__).with_name("__main__.py")
    done = run_script(program, "-q", "-p", "no:cacheprovider", "test_project.py", cwd=project)
    assert done.code == 1
    assert "1 failed, 1 passed" in done.out


def test_the_task_of_a_project_is_a_program(tmp_path: Path) -> None:
    project = make(tmp_path, "custom_task")
    done = run_script(project / "task.py", "train", "config.yaml", "train.epochs=null", "train.steps=2", cwd=project)
    assert done.code == 0, done.out + done.err
    assert (project / "runs" / "demo" / "config.yaml").exists()


# --- the command


def call(*arguments: str) -> str:
    """What ``drawbar init ARGUMENTS`` prints, in a real process."""
    return _process(*arguments).stdout


def _process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "import sys; from drawbar.cli.init import init; init.main(sys.argv[1:], prog_name='drawbar init')"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)


def test_the_next_commands_are_printed_and_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = call("new/my project")
    typed = [shlex.split(line) for line in output.splitlines() if line.startswith("  ")]
    assert typed == [
        ["cd", "new/my project"],
        ["drawbar", "train", "config.yaml"],
        ["drawbar", "eval", "runs/my-project"],
    ]
    with chdir(tmp_path / typed[0][1]):
        assert str(load_config("config.yaml").config.run_dir) == typed[2][2]


def test_an_empty_folder_is_filled_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    same = os.stat(".").st_ino
    output = call(".", "--template", "classification")
    assert "cd " not in output
    assert os.stat(tmp_path / "here").st_ino == same  # the shell that stands in it sees the files
    assert contents(Path()) == contents_of("classification", tmp_path, name="here")
    assert sorted(os.listdir(tmp_path)) == ["again", "here"]


def contents_of(template: str, folder: Path, name: str) -> dict[str, bytes]:
    write_project(folder / "again" / name, template)
    return contents(folder / "again" / name)


@pytest.mark.parametrize("found", ["a file in the folder", "a hidden file", "a file", "a dangling link"])
def test_nothing_that_is_there_is_touched(found: str, tmp_path: Path) -> None:
    target = tmp_path / "demo"
    if found == "a file":
        target.write_text("mine")
    elif found == "a dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        (target / (".hidden" if "hidden" in found else "config.yaml")).write_text("mine")
    before = contents(tmp_path), sorted(os.listdir(tmp_path))
    with pytest.raises(UserError) as caught:
        init.main([str(target)], standalone_mode=False)
    assert caught.value.where == "DIR"
    assert caught.value.remedy
    assert (contents(tmp_path), sorted(os.listdir(tmp_path))) == before


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "package"
    shutil.copytree(str(files("drawbar") / "templates"), broken / "templates")
    (broken / "templates" / "seq2seq" / "data" / "valid.en").unlink()
    (broken / "templates" / "seq2seq" / "data" / "valid.en").symlink_to("nowhere")
    # by sys.modules: the package's attribute of that name is the command
    monkeypatch.setattr(sys.modules["drawbar.cli.init"], "files", lambda package: broken)
    with pytest.raises(UserError, match="cannot be written"):
        write_project(tmp_path / "demo", "seq2seq")
    assert os.listdir(tmp_path) == ["package"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(UserError, match="Permission denied") as caught:
        write_project(tmp_path / "closed" / "demo", "language_model")
    assert "closed" in str(caught.value.where)


def test_a_path_through_a_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        write_project(tmp_path / "file" / "demo", "language_model")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("demo", "demo"),
        ("My model_2.1", "My-model_2.1"),
        (".hidden", "hidden"),
        ("é", "project"),
        ("a" * 200, "a" * 128),
    ],
)
def test_a_name_that_a_run_can_bear(folder: str, name: str) -> None:
    assert project_name(Path(folder)) == name
    load_config(None, [f"run.name={json.dumps(name)}"])


def test_an_unknown_template_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError) as caught:
        init.main([str(tmp_path / "demo"), "--template", "clasification"], standalone_mode=False)
    assert all(name in caught.value.format_message() for name in TEMPLATES)
    assert not (tmp_path / "demo").exists()


def test_the_help_lists_every_template_and_needs_no_torch() -> None:
    code = "import sys; from drawbar.cli.init import init; init(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, modules = done.stdout.splitlines()
    for name, meaning in TEMPLATES.items():
        assert re.search(rf"^ +{name} +{re.escape(meaning)}$", "\n".join(text), re.MULTILINE)
    assert not {"torch", "transformers", "numpy", "pydantic"} & set(modules.split())
