"""Build a release, see that it works where nothing else of drawbar is, and tag it. It uploads nothing.

.venv/bin/python tools/release.py
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class NotReady(Exception):
    """What is missing before a release can be made."""


def version_to_release(root: Path) -> str:
    """The version of ``pyproject.toml``.

    Raises:
        NotReady: the tree has changes, the tag is there already, or ``CHANGELOG.md`` begins with another version, or
            says that it is unreleased.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if _git(root, "status", "--porcelain"):
        raise NotReady("there are changes that are not committed: git status")
    if _git(root, "tag", "--list", f"v{version}"):
        raise NotReady(f"the tag v{version} is there already: set another version in pyproject.toml")
    headings = [line for line in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    if headings[0].split()[1] != version:
        raise NotReady(f"CHANGELOG.md begins with {headings[0][3:]}, and pyproject.toml has {version}")
    if headings[0].endswith("(unreleased)"):
        raise NotReady(f"CHANGELOG.md says that {version} is unreleased: write the day of the release there")
    return version


def build(root: Path, target: Path) -> Path:
    """Build wheel and source archive into a folder. Returns the wheel."""
    with tempfile.TemporaryDirectory() as folder:  # a build leaves files beside its source
        copy = Path(folder)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / name, copy)
        shutil.copytree(
            root / "src" / "drawbar", copy / "src" / "drawbar", ignore=shutil.ignore_patterns("__pycache__")
        )
        lines = ("import sys", "from setuptools import build_meta", "target = sys.argv[1]")  # a build changes sys.argv
        program = "\n".join((*lines, "build_meta.build_wheel(target)", "build_meta.build_sdist(target)"))
        subprocess.run([sys.executable, "-c", program, str(target)], cwd=copy, check=True, capture_output=True)
    [wheel] = target.glob("*.whl")
    return wheel


def try_wheel(wheel: Path, folder: Path) -> str:
    """Install the wheel into an empty environment that sees the libraries of this one. Returns the version it says."""
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    site = next(environment.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # as plain folders: the .pth files in them, among them that of drawbar's own clone, are not read
    (site / "libraries.pth").write_text("\n".join(libraries))
    command = [str(environment / "bin" / "drawbar")]
    project = folder / "project"
    subprocess.run([*command, "init", str(project), "--template", "language_model"], check=True, cwd=folder)
    subprocess.run([*command, "config", "show", "config.yaml"], check=True, cwd=project, stdout=subprocess.DEVNULL)
    done = subprocess.run([*command, "--version"], check=True, cwd=folder, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    try:
        version = version_to_release(ROOT)
    except NotReady as error:
        sys.exit(f"error: {error}")
    target = ROOT / "dist"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    wheel = build(ROOT, target)
    with tempfile.TemporaryDirectory() as folder:
        print(f"{wheel.name} works: {try_wheel(wheel, Path(folder))}")
    _git(ROOT, "tag", "--annotate", f"v{version}", "--message", f"drawbar {version}")
    print(f"tagged v{version}; to publish: git push origin v{version}, and twine upload dist/*")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
