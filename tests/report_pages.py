"""What the tests of pages share: a page, parsed as a browser reads it, and texts that try to be markup."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "br", "link", "img"}
LINKS = {"src", "href", "action", "data", "srcset", "poster", "formaction", "background"}
"""Attributes by which an element asks for something elsewhere."""

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "</td></table><img src=x onerror=alert(3)>",
    "\"'><svg onload=alert(4)>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "😀 مرحبا \u202edesrever\u202c",
    "line\nbreak\ttab\x00\x1b[31m",
]


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    """All text inside, that of inner elements too."""


@dataclass
class Page(HTMLParser):
    """The elements of a page in their order."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        closed = self._open.pop()
        assert closed.tag == tag, f"<{closed.tag}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, *tags: str, **attributes: str) -> list[Element]:
        return [
            element
            for element in self.elements
            if element.tag in tags and attributes.items() <= element.attributes.items()
        ]

    def one(self, tag: str, **attributes: str) -> Element:
        [element] = self.all(tag, **attributes)
        return element

    @property
    def figures(self) -> list[dict[str, Any]]:
        """What the script draws."""
        return json.loads(self.one("script", id="figure-data").text)

    def figure(self, title: str) -> dict[str, Any]:
        titles = [element.text for element in self.all("figcaption")]
        return self.figures[titles.index(title)]

    def section(self, name: str) -> str:
        return self.one("section", id=name).text


REPORT = ["summary", "curves", "time", "padding", "learned", "evaluations", "checkpoints", "events", "settings"]
"""The sections of a report."""


def read_page(file: Path, sections: list[str] = REPORT) -> Page:
    """A page, of which all that must hold for any page is checked."""
    page = Page(file.read_text(encoding="utf-8"))
    assert [element.attributes["id"] for element in page.all("section")] == sections
    check_structure(page)
    check_self_contained(page)
    return page


def check_structure(page: Page) -> None:
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    levels = [int(element.tag[1]) for element in page.all("h1", "h2", "h3", "h4")]
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    assert all(element.attributes.get("scope") in ("col", "row") for element in page.all("th"))
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in page.elements:
        target = element.attributes.get("aria-labelledby")
        assert target is None or target in ids
        assert not any(name.startswith("on") for name in element.attributes)
    for plot in page.all("div", role="img"):
        assert plot.attributes["aria-label"]
    for frame in page.all("div", role="region"):
        assert frame.attributes["tabindex"] == "0"


def check_self_contained(page: Page) -> None:
    """Nothing is asked of anywhere else, and no script runs but the page's two."""
    for element in page.elements:
        for name in LINKS & element.attributes.keys():
            assert element.attributes[name].startswith("#"), (element.tag, element.attributes)
        assert element.tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "audio")
    [style] = page.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    data, *scripts = page.all("script")
    assert data.attributes == {"type": "application/json", "id": "figure-data"}
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()}'" for script in scripts
    )
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert "default-src 'none'" in policy
    assert f"script-src {hashes};" in policy
    assert len(scripts) == 2
