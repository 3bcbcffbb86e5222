"""Collect the wheels that drawbar needs on a machine without a network, and write how to install them there.

    python tools/wheelhouse.py --python 3.12

For a node that has torch, transformers and what usually comes with them. ``--node FILE`` says exactly what is there:
the output of ``pip list --format=freeze`` on it. Needs a network, here; the folder is then carried to the node.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from release import build

ROOT = Path(__file__).resolve().parents[1]
NODE = """
    absl-py accelerate==1.15.0 aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi
    charset-normalizer click colorama einops filelock frozenlist fsspec grpcio h11 hf-xet httpcore httpx
    huggingface-hub==1.33.0 idna jinja2 joblib lightning lightning-utilities lxml markdown markdown-it-py markupsafe
    mdurl mpmath msgpack multidict networkx ninja numpy==2.5.2 packaging pandas peft pillow pip portalocker
    propcache protobuf psutil py-cpuinfo pyarrow pygments python-dateutil pytorch-lightning pyyaml regex requests
    rich sacrebleu safetensors==0.8.0 scikit-learn scipy setuptools shellingham six sympy tabulate tensorboard
    tensorboard-data-server threadpoolctl tokenizers==0.23.2 torch==2.11.0 torchmetrics tqdm transformers==5.17.0
    triton typer typing-extensions tzdata urllib3 werkzeug wheel xxhash yarl
"""
"""What a node for deep learning usually has, of all that drawbar could need; versions where they decide something."""
EXTRAS = ("liger", "deepspeed")
"""Of drawbar's extras, those that are always collected."""
SOURCE_ALONE = ("deepspeed", "rouge-score", "seqeval")
"""Published without wheels; they are built here, and are the same on every machine."""
FP8 = "fp8"
"""The extra, and the folder, of torchao: transformers imports it wherever it is, which takes seconds."""
GLIBC = ("2_28", "2_27", "2_17", "2_12", "2_5")

INSTALL = """\
# Installs drawbar and what it needs into a folder of its own, without a network, and puts it on the path of this shell:
#
#     . {folder}/install.sh          into $SITE, by default /tmp/drawbar-site; what is there already is left as it is
#
wheels=$(dirname "${{BASH_SOURCE[0]}}")
SITE=${{SITE:-/tmp/drawbar-site}}
[ -e "$SITE/drawbar" ] || {command} --target "$SITE" "$wheels"/*.whl || return
export PYTHONPATH="$SITE${{PYTHONPATH:+:$PYTHONPATH}}" PATH="$SITE/bin:$PATH"
"""
INSTALL_FP8 = """\
# The same for torchao, which parallel.fp8 needs, and nothing else: source it after install.sh.
wheels=$(dirname "${{BASH_SOURCE[0]}}")
[ -e "$SITE-fp8/torchao" ] || {command} --target "$SITE-fp8" "$wheels"/fp8/*.whl || return
export PYTHONPATH="$PYTHONPATH:$SITE-fp8"
"""
COMMAND = "python3 -m pip install --quiet --no-index --no-deps --no-compile"


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    with replaced(parsed.out) as folder:
        fill(folder, parsed)


def fill(out: Path, parsed: argparse.Namespace) -> None:
    """Put all into an empty folder, and say what it is.

    Raises:
        SystemExit: pip finds no wheel, or drawbar and the node do not go together.
    """
    there = installed("\n".join(NODE.split()) if parsed.node is None else parsed.node)
    drawbar = build(ROOT, out)
    for path in out.glob("*.tar.gz"):
        path.unlink()
    older = disagreement(drawbar, parsed.python, there)
    if older is not None:
        sys.exit(f"error: {older}: install another version there")
    collect(needs(drawbar, parsed.python, (*EXTRAS, *parsed.extras)), parsed.python, there, out)
    collect(
        [one for one in needs(drawbar, parsed.python, (FP8,)) if one.name == "torchao"], parsed.python, there, out / FP8
    )
    (out / "install.sh").write_text(INSTALL.format(folder=out.name, command=COMMAND), encoding="utf-8")
    (out / "fp8.sh").write_text(INSTALL_FP8.format(command=COMMAND), encoding="utf-8")
    wheels = sorted(out.rglob("*.whl"))
    print("\n".join(f"{path.stat().st_size / 2**20:7.2f} MiB  {path.relative_to(out)}" for path in wheels))
    size = sum(path.stat().st_size for path in wheels) / 2**20
    print(f"{size:7.2f} MiB in {len(wheels)} wheels for Python {parsed.python}")
    print(f"on the node, in the folder that holds {out.name}:\n\n    . {out.name}/install.sh\n\nwhich is\n")
    print(f"    {COMMAND} --target /tmp/drawbar-site {out.name}/*.whl\n    export PYTHONPATH=/tmp/drawbar-site")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", type=python, default=here, metavar="X.Y", help="of the node (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="replaced (default: %(default)s)")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    parser.add_argument("--with", dest="extras", nargs="+", default=(), choices=sorted(known), help="extras of drawbar")
    parser.add_argument("--node", type=text_of, metavar="FILE", help="`pip list --format=freeze` of the node")
    return parser.parse_args(arguments)


def python(written: str) -> str:
    if re.fullmatch(r"3\.\d+", written) is None:
        raise argparse.ArgumentTypeError(f"{written} is no version of Python such as 3.12")
    return written


def text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from error


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of one that this tool has made before; that stays until then.

    Raises:
        SystemExit: something else is there, which stays.
    """
    own = out.is_dir() and not out.is_symlink() and ((out / "install.sh").is_file() or not any(out.iterdir()))
    if os.path.lexists(out) and not own:
        sys.exit(f"error: {out} is there, and holds no wheels of drawbar: name another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".wheels-") as folder:
        filled = Path(folder) / out.name
        (filled / FP8).mkdir(parents=True)
        yield filled
        if own:
            shutil.rmtree(out)
        filled.rename(out)


def installed(listed: str) -> dict[str, Version | None]:
    """What pip lists, as ``name==version`` or ``name @ file:…``: the version by name, or None where it is not said."""
    found: dict[str, Version | None] = {}
    for line in listed.splitlines():
        name, _, version = line.replace("@", "==").partition("==")
        if name.strip() and not name.startswith(("#", "-")):
            with suppress(InvalidVersion):
                found[canonicalize_name(name.strip())] = None
                found[canonicalize_name(name.strip())] = Version(version.strip())
    return found


def needs(wheel: Path, python: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a wheel says that it needs, on Linux with this Python."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
               "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython"}  # fmt: skip
    found = map(Requirement, lines)
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({**machine, "extra": extra}) for extra in ("", *extras))
    ]


def disagreement(wheel: Path, python: str, there: Mapping[str, Version | None]) -> str | None:
    """What a wheel needs in another version than the node has; None where there is no such thing."""
    for one in needs(wheel, python):
        version = there.get(canonicalize_name(one.name))
        if version is not None and not one.specifier.contains(version.base_version, prereleases=True):
            return f"{wheel.name} needs {one.name}{one.specifier}, and the node has {version}"
    return None


def collect(wanted: Iterable[Requirement], python: str, there: Mapping[str, Version | None], out: Path) -> None:
    """Put wheels of what is wanted and not there into a folder, and of what these need, and so on: the versions that
    are tested, or older ones where these do not agree with what is there.

    Raises:
        SystemExit: pip finds no such wheel.
    """
    asked: dict[str, SpecifierSet] = {}
    extras: dict[str, set[str]] = {}
    have: dict[str, Version] = {}
    todo = list(wanted)
    while todo:
        for one in todo:
            name = canonicalize_name(one.name)
            asked[name] = asked.get(name, SpecifierSet()) & one.specifier
            extras.setdefault(name, set()).update(one.extras)
        missing = [
            name for name in dict.fromkeys(canonicalize_name(one.name) for one in todo)
            if name not in there and (name not in have or have[name] not in asked[name])
        ]  # fmt: skip
        todo = []
        with tempfile.TemporaryDirectory() as folder:
            fetch({name: asked[name] for name in missing}, python, Path(folder))
            for wheel in Path(folder).glob("*.whl"):
                name, version, *_ = parse_wheel_filename(wheel.name)
                if disagreement(wheel, python, there) is not None:
                    todo.append(Requirement(f"{name}<{version}"))
                    continue
                for older in out.glob(f"{wheel.name.partition('-')[0]}-*.whl"):
                    older.unlink()
                shutil.move(wheel, out / wheel.name)
                have[name] = version
                todo += needs(out / wheel.name, python, extras[name])


def fetch(asked: Mapping[str, SpecifierSet], python: str, folder: Path) -> None:
    """Put their wheels into a folder, without what they need; the tested versions, of those that are asked for."""
    tested = folder / "constraints.txt"
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line]
    kept = [pin for pin in pins if str(pin.specifier)[2:] in asked.get(canonicalize_name(pin.name), SpecifierSet())]
    tested.write_text("\n".join(map(str, kept)), encoding="utf-8")
    built = [f"{name}{versions}" for name, versions in asked.items() if name in SOURCE_ALONE]
    ready = [f"{name}{versions}" for name, versions in asked.items() if name not in SOURCE_ALONE]
    platforms = [f"--platform=manylinux_{glibc}_{os.uname().machine}" for glibc in GLIBC]
    platforms += [f"--platform=manylinux{year}_{os.uname().machine}" for year in ("2014", "2010", "1")]
    options = ["--no-deps", "-c", str(tested)]
    if ready:
        wheels = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
        pip("download", *options, *wheels, "--dest", str(folder), *ready)
    if built:
        # DeepSpeed looks at torch while it is built, and would compile for it
        pip("wheel", *options, "--no-build-isolation", "--wheel-dir", str(folder), *built, env={"DS_BUILD_OPS": "0"})


def pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
