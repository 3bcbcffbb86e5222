"""docs/coming_from: the same job elsewhere and in drawbar has the same losses and ends with the same weights."""

import ast
import inspect
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate import Accelerator
from pages import blocks, column, run_command, unknown_settings, write_files
from safetensors.torch import load_file
from transformers import TrainingArguments

from harness import run_script
from runs import largest_difference, losses

PAGES = Path(__file__).parents[2] / "docs" / "coming_from"
NO_COMPILER = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
"""On CPUs, DeepSpeed would spend minutes on compiling an all-reduce of its own."""
STEP = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the README's scripts have written model and data."""
    folder = tmp_path_factory.mktemp("job")
    write_files(PAGES / "README.md", folder)
    done = run_script(folder / "make_job.py", cwd=folder)
    assert done.code == 0, done.err
    return folder


def walked(page: Path, job: Path, folder: Path) -> str:
    """All commands of a page, run on the job in ``folder``; returns what they print."""
    shutil.copytree(job, folder, dirs_exist_ok=True)
    write_files(page, folder)
    for script in folder.glob("*.py"):
        script.write_text(
            script.read_text(encoding="utf-8").replace("import deepspeed\n", NO_COMPILER), encoding="utf-8"
        )
    printed = ""
    for block in blocks(page):
        if block.language == "json":
            (folder / f"{block.mark}.json").write_text(block.text, encoding="utf-8")
        if block.language == "bash":
            for command in block.text.splitlines():
                done = run_command(shlex.split(command), folder)
                assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
                printed += done.out
    return printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["trainer", "lightning", "accelerate", "deepspeed"])
def test_the_job_is_the_same_job(name: str, job: Path, tmp_path: Path) -> None:
    printed = walked(PAGES / f"{name}.md", job, tmp_path)
    theirs = {int(step): float(loss) for step, loss in STEP.findall(printed)}
    assert len(theirs) == 16
    for run in (tmp_path / "runs").glob("[!.]*"):
        assert largest_difference(theirs, losses(run)) < 1e-5, run.name
    begun, ended, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("tiny", "theirs", "ours"))
    assert ended.keys() == ours.keys()
    for name, weight in ended.items():
        learned = weight - begun[name]
        assert learned.norm() > 0, name
        assert (ours[name] - weight).norm() < 1e-3 * learned.norm(), name


@pytest.mark.exhaustive
def test_torchtitan(job: Path, tmp_path: Path) -> None:
    """Its side is Python; ours runs."""
    page = PAGES / "torchtitan.md"
    walked(page, job, tmp_path)
    assert len(losses(tmp_path / "runs" / "ours")) == 16
    ast.parse((tmp_path / "titan_config.py").read_text(encoding="utf-8"))


def test_every_argument_has_a_row() -> None:
    """Those of the versions that are installed: where one of them has a new argument, the page needs a row for it."""
    import lightning  # it takes seconds

    for page, arguments in (
        ("trainer", {field.name for field in fields(TrainingArguments) if field.init}),
        ("lightning", set(inspect.signature(lightning.Trainer).parameters)),
        ("accelerate", set(inspect.signature(Accelerator).parameters)),
    ):
        text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        headings = {"trainer": "`TrainingArguments`", "lightning": "`Trainer(…)`", "accelerate": "`Accelerator(…)`"}
        named = re.findall(r"`(\w+)`", "".join(column(text, headings[page])))
        assert set(named) == arguments, page
        assert len(named) == len(set(named)), page


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_setting_exists(page: Path) -> None:
    assert unknown_settings(page) == []
