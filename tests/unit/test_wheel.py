"""What is installed by people who have no clone."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_licence_the_templates_and_the_types_marker(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)  # copies: a build leaves files beside its source
    shutil.copytree(ROOT / "src" / "drawbar", tmp_path / "src" / "drawbar")
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    [path] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [licence] = (name for name in names if name.endswith("dist-info/licenses/LICENSE"))
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert {"drawbar/py.typed", "drawbar/cli/__init__.py"} <= set(names)
    assert any(name.startswith("drawbar/templates/classification/") for name in names)
