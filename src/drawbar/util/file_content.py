"""What a file holds by its first bytes, whatever its name says: a Git LFS pointer, gzip, Parquet, a page of HTML."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

BEGIN_BYTES = 512
LONGEST_POINTER = 1024
"""Bytes; Git LFS's own limit."""


class Content(NamedTuple):
    """A kind of content that is known by how it begins."""

    name: str
    what: str
    """With its article, for messages."""
    remedy: str
    """What to do where something else was wanted; ``{path}`` and ``{name}`` stand for the file."""

    def remedy_for(self, path: Path) -> str:
        """The remedy, with commands to paste."""
        return self.remedy.format(path=shlex.quote(str(path)), name=shlex.quote(path.name))


GZIP = Content(
    "gzip", "a gzip file", "where it holds records as text, rename it to {name}.gz; else unpack it with gunzip"
)
PLAIN = Content("plain", "no gzip file", "rename it without .gz, or download it again")
"""What a file named ``.gz`` is where it begins as nothing that is known."""
POINTERS = frozenset({"lfs", "annex"})
"""Files that stand for others, and are nobody's data."""
PAGES = frozenset({"html", "xml"})
"""Contents that are text, too."""
_PAGE = "it may be the page of an error or of a log-in, saved in place of the file: download the file itself"
_KNOWN: tuple[tuple[bytes, Content], ...] = (
    # the first, as a length may be the bytes with which something else begins
    (rb"(?s).{4}\x00{4}\{", Content("safetensors", "a safetensors file", "let its name end in .safetensors")),
    (
        rb"version https://(git-lfs\.github\.com|hawser\.github\.com)/spec/v",
        Content(
            "lfs",
            "a Git LFS pointer, three lines in place of the file itself",
            "fetch the files: `git lfs install` once, then `git lfs pull` in their repository",
        ),
    ),
    (
        rb"/annex/objects/",
        Content("annex", "a git-annex pointer, a line in place of the file itself", "fetch it: git annex get {path}"),
    ),
    (rb"\x1f\x8b", GZIP),
    (
        rb"(?s)PK\x03\x04.{0,200}(\[Content_Types\]\.xml|xl/)",
        Content("office", "a file of Excel or another office program", "save the table as .csv there"),
    ),
    (
        rb"(?s)PK\x03\x04.{0,200}data\.pkl",
        Content("torch", "a zip with a pickle, as torch.save writes", "pickles can run code: save it as safetensors"),
    ),
    (rb"PK(\x03\x04|\x05\x06)", Content("zip", "a zip archive", "unpack it: unzip {path}")),
    (rb"PAR1\x15", Content("parquet", "a Parquet file", "let its name end in .parquet")),
    (rb"ARROW1", Content("arrow", "an Arrow file", "let its name end in .arrow")),
    (rb"\x28\xb5\x2f\xfd", Content("zstd", "a zstd file", "unpack it: zstd -d {path}")),
    (rb"\xfd7zXZ\x00", Content("xz", "an xz file", "unpack it: unxz {path}")),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", Content("bzip2", "a bzip2 file", "unpack it: bunzip2 {path}")),
    (rb"\x04\x22\x4d\x18", Content("lz4", "an lz4 file", "unpack it: lz4 -d {path}")),
    (rb"7z\xbc\xaf\x27\x1c", Content("7z", "a 7z archive", "unpack it: 7z x {path}")),
    (rb"(?s).{257}ustar", Content("tar", "a tar archive", "unpack it: tar -xf {path}")),
    (rb"SQLite format 3\x00", Content("sqlite", "an SQLite database", "write its table as .csv or .jsonl")),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", Content("ole", "a file of an old office program", "save it as .csv there")),
    (rb"%PDF-\d", Content("pdf", "a PDF", "take the text out of it first, with pdftotext, say")),
    (rb"\x93NUMPY", Content("npy", "a file of numpy", "write its values as .jsonl or .parquet")),
    (rb"GGUF[\x01-\x0f]\x00\x00\x00", Content("gguf", "a GGUF model", "name the model that it was converted from")),
    (
        rb"\x80[\x02-\x05]",
        Content("pickle", "a pickle", "pickles can run code, and are not read: save it in another format"),
    ),
    (
        rb"(?is)(\xef\xbb\xbf)?\s*(<!--.{0,400}?-->\s*)?<(!doctype\s+html|html|head|body)[\s>]",
        Content("html", "a page of HTML", _PAGE),
    ),
    (rb"(\xef\xbb\xbf)?\s*<\?xml\s", Content("xml", "an XML file", _PAGE)),
)
"""By a pattern of the first bytes; the first that fits counts."""


def content_of(path: Path) -> Content | None:
    """What a file is known to hold; None for anything else, such as plain text, and for what is no file.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():  # what is read from a pipe is gone
        return None
    with path.open("rb") as file:
        return content_of_bytes(file.read(BEGIN_BYTES))


def content_of_bytes(begin: bytes) -> Content | None:
    """``content_of`` a file that begins so."""
    return next((content for pattern, content in _KNOWN if re.match(pattern, begin)), None)


def pointer(path: Path) -> Content | None:
    """``content_of`` where that is a pointer. Raises OSError where the file cannot be read."""
    found = content_of(path) if path.is_file() and path.stat().st_size <= LONGEST_POINTER else None
    return found if found is not None and found.name in POINTERS else None
