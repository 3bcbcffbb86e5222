"""The documentation site: it builds without a warning, asks no other server for anything, and every public name,
command, option and setting is in it."""

import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from importlib import import_module
from inspect import getattr_static, isclass, isfunction
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import pytest
from pages import blocks

import drawbar
from drawbar.cli import group
from drawbar.config.io.fields import catalogue
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api.md"
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)(?:\(\))?\n((?:   :.*\n)*)", re.MULTILINE)
DOCUMENTED: dict[str, str] = dict(DIRECTIVE.findall(API.read_text(encoding="utf-8")))
"""The names in docs/reference/api.md, with the options of their directives."""


class Page(HTMLParser):
    """What a page of HTML links to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.images: list[Path] = []  # those of the site itself
        self.images_without_text = 0
        self._folder = path.parent
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        self.images_without_text += tag == "img" and not given.get("alt")
        address = urlsplit(given.get("src", ""))
        if tag == "img" and address.path and not address.scheme and not address.netloc:
            self.images.append((self._folder / unquote(address.path)).resolve())
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("next", "prev", "index", "search", "canonical"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", str(folder / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


@pytest.mark.exhaustive
def test_every_page_is_on_the_site(site: Path, html: dict[Path, Page]) -> None:
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md", *ROOT.glob("examples/*/README.md")):
        assert (site / page.relative_to(ROOT)).with_suffix(".html") in html
    assert "docs/index.html" in (site / "index.html").read_text()
    assert "zero1" in (site / "searchindex.js").read_text()


def test_links_of_the_site_lead_somewhere(html: dict[Path, Page]) -> None:
    for path, page in html.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link == "#":
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert file.exists(), f"{path.name}: {link}"
            if parts.fragment and file in html:
                assert unquote(parts.fragment) in html[file].ids, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path, html: dict[Path, Page]) -> None:
    loaded = {address for page in html.values() for address in page.loaded}
    for style in site.rglob("*.css"):
        loaded |= set(re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text(encoding="utf-8")))
    assert loaded
    assert not [address for address in loaded if "//" in address and not address.startswith("data:")]


def test_images_are_on_the_site(html: dict[Path, Page]) -> None:
    assert any(page.images for page in html.values())
    assert [
        (path.name, str(image)) for path, page in html.items() for image in page.images if not image.is_file()
    ] == []


def test_images_have_texts(html: dict[Path, Page]) -> None:
    assert [path.name for path, page in html.items() if page.images_without_text] == []


def find(name: str) -> Any:
    """What is documented under a name: a class or a function."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_every_public_name_is_documented() -> None:
    assert {f"drawbar.{name}" for name in drawbar.__all__} <= DOCUMENTED.keys()


def test_every_name_that_a_page_imports_is_documented() -> None:
    text = API.read_text(encoding="utf-8")
    known = {name.rpartition(".")[2] for name in DOCUMENTED} | set(re.findall(r"`(\w+)`", text))
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for block in blocks(page):
            for names in re.findall(r"^from drawbar[\w.]* import (.+)$", block.text, re.MULTILINE):
                assert set(re.split(r",\s*", names)) <= known, page.name


def members(name: str) -> dict[str, Any]:
    """The methods and properties of a documented class that its directive shows."""
    found, options = find(name), DOCUMENTED[name]
    if not isclass(found) or ":members:" not in options:
        return {}
    shown = re.findall(r"\w+", "".join(re.findall(r":members:(.*)", options)))
    left_out = re.findall(r"\w+", "".join(re.findall(r":exclude-members:(.*)", options)))
    names = shown or [member for member in vars(found) if not member.startswith("_") and member not in left_out]
    values = {member: getattr_static(found, member) for member in names}
    return {member: value for member, value in values.items() if isinstance(value, property) or isfunction(value)}


def test_documented_names_have_docstrings() -> None:
    """autodoc leaves out, without a word, what has no docstring."""
    assert [name for name in DOCUMENTED if not find(name).__doc__] == []
    shown = {f"{name}.{member}": value for name in DOCUMENTED for member, value in members(name).items()}
    assert [name for name, value in shown.items() if not value.__doc__] == []


def walk(command: click.Command) -> list[click.Command]:
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [command, *(found for part in inner for found in walk(part))]


def test_every_command_and_option_is_documented() -> None:
    # in a process of its own: click keeps the help option of a command as its first caller here has made it
    rendered = subprocess.run([sys.executable, DOCS / "cli_reference.py"], capture_output=True, text=True, check=True)
    assert (DOCS / "reference" / "cli.md").read_text(encoding="utf-8") == rendered.stdout, "run `make docs`"
    for command in walk(group):
        assert command.help, command.name
        for option in command.params:
            assert not isinstance(option, click.Option) or option.hidden or option.help, f"{command.name} {option.name}"


def test_every_setting_has_a_meaning() -> None:
    for name, task in BUILT_IN_TASKS.items():
        known = catalogue(run_config_type(task))
        values = {key: setting for key, setting in known.items() if not setting.is_section}
        without = {key for key, setting in values.items() if not setting.meaning}
        assert without <= {"task.type"}, name  # the page explains it once, for causal_lm


def test_pages_speak_of_settings_that_there_are() -> None:
    """Of all that is written as ``section.key`` in the pages of the site itself."""
    known: dict[str, set[str]] = defaultdict(set)
    for task in BUILT_IN_TASKS.values():
        for key in catalogue(run_config_type(task)):
            known[key.partition(".")[0]].add(key)
    sections = "|".join(section for section, keys in known.items() if len(keys) > 1)
    for page in (DOCS / "index.md", DOCS / "first_run.md", DOCS / "troubleshooting.md", *DOCS.glob("tutorial/*.md")):
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[`=:]", page.read_text(encoding="utf-8")):
            assert key in known[key.partition(".")[0]], f"{page.name}: {key}"
