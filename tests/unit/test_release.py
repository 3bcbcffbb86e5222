"""What is installed by people who have no clone, and when it may be released."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import drawbar

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import release
import wheelhouse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.mark.exhaustive
def test_the_wheel_has_the_licence_the_templates_the_page_and_the_types_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [licence] = (name for name in names if name.endswith("dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert {"drawbar/py.typed", "drawbar/cli/__init__.py"} <= set(names)
    assert {f"drawbar/report/assets/{name}" for name in ("report.html", "parity.html", "page.css", "page.js")} <= set(
        names
    )
    assert any(name.startswith("drawbar/templates/classification/") for name in names)
    assert len(list(wheel.parent.glob("*.tar.gz"))) == 1


@pytest.mark.exhaustive
def test_the_wheel_works_without_a_clone(wheel: Path, tmp_path: Path) -> None:
    assert drawbar.__version__ in release.try_wheel(wheel, tmp_path)


def test_a_release_is_of_a_clean_tree_with_a_new_version_that_the_changelog_names(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.1.0\n")
    git("init")
    with pytest.raises(release.NotReady, match="not committed"):
        release.version_to_release(tmp_path)
    git("add", ".")
    git("commit", "--message", "first")
    with pytest.raises(release.NotReady, match=r"begins with 1\.1\.0"):
        release.version_to_release(tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.0 (unreleased)\n\n## 1.1.0\n")
    git("commit", "--all", "--message", "second")
    with pytest.raises(release.NotReady, match=r"1\.2\.0 is unreleased"):
        release.version_to_release(tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0\n")
    git("commit", "--all", "--message", "third")
    assert release.version_to_release(tmp_path) == "1.2.0"
    git("tag", "v1.2.0")
    with pytest.raises(release.NotReady, match=r"v1\.2\.0 is there already"):
        release.version_to_release(tmp_path)


def test_the_changelog_begins_with_this_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == drawbar.__version__


@pytest.mark.parametrize("kind", ["a folder", "a file", "a link"])
def test_a_wheelhouse_replaces_nothing_but_a_wheelhouse(kind: str, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("mine")
    if kind == "a folder":
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    elif kind == "a file":
        out.write_text("mine")
    else:
        out.symlink_to(mine.parent)
    with pytest.raises(SystemExit, match="name another folder"):
        wheelhouse.main(["--out", str(out)])
    assert (out if out.is_file() else out / "thesis.tex").read_text() == "mine"


def test_a_wheelhouse_replaces_one_that_it_made_once_another_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "wheels"
    for name in ("install.sh", "old.whl"):
        with pytest.raises(KeyboardInterrupt), wheelhouse.replaced(out) as filled:
            raise KeyboardInterrupt
        with wheelhouse.replaced(out) as filled:
            (filled / "install.sh").touch()
            (filled / name).touch()
    assert sorted(path.name for path in out.iterdir()) == ["fp8", "install.sh", "old.whl"]
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("wrong", [("--python", "banana"), ("--node", "nowhere.txt")])
def test_a_wheelhouse_is_not_touched_for_a_mistake(wrong: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "install.sh").touch()
    with pytest.raises(SystemExit, match="2"):
        wheelhouse.main(["--out", str(tmp_path), *wrong])
    assert (tmp_path / "install.sh").exists()
