"""docs/gpu.md: its eight commands run as they stand with ``--quick``, on what tools/wheelhouse.py has collected; and so
does every case of ``python -m benchmarks gpu``."""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from pages import blocks

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import wheelhouse
from benchmarks.gpu.command import CASES

ROOT = Path(__file__).parents[2]
COMMANDS = [block.text for block in blocks(ROOT / "docs" / "gpu.md") if block.language == "bash"]
NODE = set(wheelhouse.installed("\n".join(wheelhouse.NODE.split())))
FAILED = {"error", "killed"}


@dataclass(frozen=True)
class Node:
    """A folder as it is on a machine without a network: the clone, and the wheels in it."""

    folder: Path
    wheels: Path
    why_no_wheels: str

    def bash(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script; pip reaches no index, and knows no folder of wheels but that which it is given."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PIP_"))}
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SITE": str(self.folder / "site")}
        own |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
        command = ["bash", "-c", script]
        return subprocess.run(
            command, cwd=self.folder, env={**kept, **own, **environment}, capture_output=True, text=True, timeout=400
        )


def version_here(name: str) -> str:
    """Empty where it is not installed: CUDA's torch alone needs triton."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    folder = tmp_path_factory.mktemp("node")
    for name in ("benchmarks", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "tried"), "hjson"]
    tried = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    wheels = folder / "wheels"
    if tried.returncode == 0:
        listed = folder / "node.txt"  # this environment, as if it had nothing else
        listed.write_text("\n".join(f"{name}=={version_here(name)}" for name in NODE))
        wheelhouse.main(["--out", str(wheels), "--node", str(listed)])
        return Node(folder, wheels, "")
    wheels.mkdir()
    for name in ("install.sh", "fp8.sh"):  # the commands run all the same, on what is installed here
        (wheels / name).touch()
    return Node(folder, wheels, f"no package index is reachable: {tried.stderr[-300:]}")


@pytest.fixture
def filled(node: Node) -> Node:
    """The same, where there are wheels."""
    if node.why_no_wheels:
        pytest.skip(node.why_no_wheels)
    return node


@pytest.mark.exhaustive
def test_every_need_of_a_wheel_is_a_wheel_or_on_the_node(filled: Node) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = {wheelhouse.canonicalize_name(path.name.partition("-")[0]): path for path in filled.wheels.rglob("*.whl")}
    assert {"drawbar", "pydantic", "datasets", "liger-kernel", "deepspeed", "torchao"} <= set(wheels)
    assert wheels["torchao"].parent.name == "fp8"
    needed = {
        wheelhouse.canonicalize_name(one.name)
        for path in wheels.values()
        for one in wheelhouse.needs(path, python)
        if path.name.partition("-")[0] != "torchao"
    }
    assert needed - set(wheels) <= NODE
    assert "torch" in needed
    assert not NODE & (set(wheels) - {"pip"})


def test_what_a_node_has_is_left_out_and_agreed_with(tmp_path: Path) -> None:
    there = wheelhouse.installed("Torch==2.11.0+cu130\nruamel.yaml @ file:///x\n# no\n-e git\nhub==1.10.0\nfree\n")
    assert {name: str(one) for name, one in there.items()} == {
        "torch": "2.11.0+cu130", "ruamel-yaml": "None", "hub": "1.10.0", "free": "None",
    }  # fmt: skip
    wheel = tmp_path / "made-1.0-py3-none-any.whl"
    for needed, message in (("torch>=2.11", None), ("hub<3,>=1.31", "needs hub<3,>=1.31, and the node has 1.10.0")):
        with zipfile.ZipFile(wheel, "w") as archive:
            lines = f"Requires-Dist: {needed}\nRequires-Dist: free>9\nRequires-Dist: hub>9; python_version < '3'\n"
            archive.writestr("made-1.0.dist-info/METADATA", lines)
        found = wheelhouse.disagreement(wheel, "3.12", there)
        assert found == (message and f"{wheel.name} {message}")


@pytest.mark.exhaustive
def test_the_wheels_train_without_an_index(filled: Node) -> None:
    """As docs/launch.md says it."""
    script = """
        . wheels/install.sh && drawbar --version || exit
        python3 -c "import drawbar, datasets, pydantic; print(*(one.__file__ for one in (drawbar, datasets, pydantic)))"
        drawbar init project --template language_model && cd project && drawbar train config.yaml train.steps=2
    """
    done = filled.bash(script)
    assert done.returncode == 0, done.stderr
    version, *rest = done.stdout.splitlines()
    assert version.startswith("drawbar 0.")
    assert rest[0].count(str(filled.folder / "site")) == 3
    assert "2 steps made" in done.stdout + done.stderr
    assert not (filled.folder / "site" / "torchao").exists()


def test_the_commands_can_be_pasted_and_end_in_time() -> None:
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        assert len(command) <= 2000
        minutes = [float(found) for found in re.findall(r"--minutes (\S+)", command)]
        seconds = [float(found) for found in re.findall(r"timeout (\d+)", command)]
        assert 0 < sum(minutes) + sum(seconds) / 60 < 9
    asked = {word.partition(":")[0] for command in COMMANDS for word in command.split()}
    assert set(CASES) <= asked


@pytest.mark.exhaustive
def test_every_command_runs_and_every_case_is_measured(node: Node) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for command in COMMANDS:
        out = node.folder / "results"
        done = node.bash(command, QUICK="--quick", OUT=str(out))
        assert done.returncode == 0, done.stdout + done.stderr
    for path in sorted(out.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["case"], []).append(line)
    assert list(found) == list(dict.fromkeys(found))
    assert set(found) == set(CASES)
    for case, lines in found.items():
        assert [line for line in lines if FAILED & line.keys()] == [], case
        assert any("seconds" in line and "refused" not in line for line in lines), case
    assert sorted(path.name for path in out.glob("*.gz")) == ["step-compiled.trace.json.gz", "step-eager.trace.json.gz"]
    losses = {line["setting"]: line["losses"] for line in found["step"] if "losses" in line}
    assert {"drawbar", "loop by hand", "Trainer", "drawbar, compiled"} <= set(losses)
    for name, values in losses.items():
        assert values == pytest.approx(losses["loop by hand"], rel=1e-5), name
    [resumed] = [line for line in found["save"] if line["setting"] == "bitwise resume"]
    assert resumed["bitwise"]
