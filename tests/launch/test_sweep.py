"""Sweeps: values, combinations, and names of runs."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config.io.load_config import load_config
from drawbar.jobs.sweep import combine, name_runs, split_values
from harness import run_cli


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("one", ["one"]),
        ("[0.9, 0.95],[0.9, 0.99]", ["[0.9, 0.95]", "[0.9, 0.99]"]),
        ("{a: [1,2], b: 3},null", ["{a: [1,2], b: 3}", "null"]),
        ("'a,b',\"c,]\", d", ["'a,b'", '"c,]"', "d"]),
        ("['a]', b],c", ["['a]', b]", "c"]),
        ("it's,don't", ["it's", "don't"]),
        ("a],b", ["a]", "b"]),
        ("", [""]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_values_are_told_apart(text: str, values: list[str]) -> None:
    assert list(split_values(text)) == values


def test_all_combinations() -> None:
    assert combine(["optim.lr=1,2", "train.steps=3,4"]) == [
        ("optim.lr=1", "train.steps=3"),
        ("optim.lr=1", "train.steps=4"),
        ("optim.lr=2", "train.steps=3"),
        ("optim.lr=2", "train.steps=4"),
    ]


@pytest.mark.parametrize(
    ("elements", "names"),
    [
        ([("optim.lr=1e-4",), ("optim.lr=3e-4",)], ["base-lr1e-4", "base-lr3e-4"]),
        ([("train.steps=1", "eval.steps=2")], ["base-train.steps1-eval.steps2"]),
        ([("optim.betas=[0.9, 0.95]",)], ["base-betas0.9_0.95"]),
        (
            [("task.model=a/b",), ("task.model=a b",), ("task.model=é",)],
            ["base-modela_b", "base-modela_b-2", "base-model_"],
        ),
        ([("data.train=../x",)], ["base-train.._x"]),
    ],
)
def test_names_of_runs(elements: list[tuple[str, ...]], names: list[str]) -> None:
    assert name_runs("base", elements) == names


@pytest.mark.exhaustive
@given(st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=6, unique=True))
def test_every_run_gets_a_name_of_its_own(values: list[str]) -> None:
    names = name_runs("base", [(f"task.prompt={value}",) for value in values])
    assert len(set(names)) == len(values)
    for name in names:
        assert load_config(None, [f"run.name={name}"]).config.run.name == name


def test_a_sweep_is_one_script(project: Path) -> None:
    """Each element gets what it asks for; ``%`` says how many may run at once."""
    sweep = ("--sweep", "optim.betas=[0.9, 0.95],[0.9, 0.99]", "--sweep", "launch.nproc=1,2", "--at-once", "3")
    done = run_cli("submit", "config.yaml", "run.name=wide", *sweep, "--to", "slurm", "--dry-run", cwd=project)
    assert done.code == 0, done.err
    assert "#SBATCH --array=0-3%3\n" in done.out
    assert "#SBATCH --job-name=wide\n" in done.out
    assert f"#SBATCH --output={project}/runs/wide/launch/slurm-%A_%a.log\n" in done.out
    last = done.out.partition("\n  3)\n")[2].partition("\n    ;;\n")[0]
    assert re.match(r"    drawbar_run=\S+/runs/wide-betas0.9_0.99-nproc2\n    drawbar_yaml='run:\n", last)
    assert "\n  name: wide-betas0.9_0.99-nproc2\n" in last
    assert "\n  betas: [0.9, 0.99]\n" in last
    assert last.endswith("\n    drawbar_settings=(launch.nproc=2)")
