"""A registry: what is registered, what other packages bring, and what is said of a name that there is not."""

from pathlib import Path

import pytest

from drawbar.errors import UserError
from drawbar.util import registry
from drawbar.util.registry import Registry, load_points


def install(folder: Path, package: str, entry_points: str, module: str = "") -> None:
    """What an installer leaves: metadata, and a module of the package's name."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    (folder / f"{package}.py").write_text(module)


@pytest.fixture
def animals() -> Registry[type]:
    class Horse:
        pass

    return Registry("animal", "drawbar.tests.animals", {"horse": Horse, "ox": "collections:OrderedDict"})


def test_what_is_registered_is_found_and_may_be_imported_late(animals):
    assert animals.get("horse", "here").__name__ == "Horse"
    assert animals.get("ox", "here").__name__ == "OrderedDict"
    assert animals.names() == ["horse", "ox"]


def test_an_installed_package_brings_one_and_replaces_none(animals, tmp_path, monkeypatch):
    points = "[drawbar.tests.animals]\nmule = stable:Mule\nhorse = stable:Mule\n"
    install(tmp_path, "stable", points, "class Mule: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert animals.get("mule", "here").__name__ == "Mule"
    assert animals.get("horse", "here").__name__ == "Horse"
    assert animals.names() == ["horse", "ox", "mule"]


def test_what_a_package_brings_is_looked_for_once(animals, tmp_path, monkeypatch):
    install(tmp_path, "stable", "[drawbar.tests.animals]\nmule = stable:Mule\n", "class Mule: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = animals.get("mule", "here")
    searched = []
    monkeypatch.setattr(registry, "installed_points", lambda group: searched.append(group) or [])

    assert animals.get("mule", "here") is found
    assert searched == []
    with pytest.raises(UserError):
        animals.get("hinny", "here")
    assert searched


def test_a_name_that_there_is_not_is_refused_with_the_nearest(animals):
    with pytest.raises(UserError, match="there is no animal 'hors'") as caught:
        animals.get("hors", "--animal")
    assert caught.value.where == "--animal"
    assert "did you mean horse? There are: horse, ox" in caught.value.remedy


def test_a_package_that_cannot_be_imported_is_named(animals, tmp_path, monkeypatch):
    install(tmp_path, "broken_stable", "[drawbar.tests.animals]\nmule = broken_stable:Mule\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UserError, match=r"'mule' \(broken_stable:Mule\) cannot be imported: AttributeError") as caught:
        animals.get("mule", "here")
    assert "broken_stable" in caught.value.remedy


def test_two_packages_with_one_name_are_both_named(animals, tmp_path, monkeypatch):
    for package in ("stable_a", "stable_b"):
        install(tmp_path, package, f"[drawbar.tests.animals]\nmule = {package}:Mule\n", "class Mule: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UserError, match="several packages provide the animal 'mule': stable_a, stable_b"):
        animals.get("mule", "here")


def test_of_two_packages_with_one_name_none_wins(tmp_path, monkeypatch, capsys):
    for package in ("stable_a", "stable_b"):
        points = f"[drawbar.tests.animals]\nmule = {package}:Mule\n{package} = {package}:Mule\n"
        install(tmp_path, package, points, "class Mule: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert sorted(dict(load_points("drawbar.tests.animals", "animal"))) == ["stable_a", "stable_b"]
    assert "several packages provide the animal 'mule': stable_a, stable_b; uninstall" in capsys.readouterr().err
