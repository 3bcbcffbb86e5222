"""Files that hold something else than their names say are refused by their first bytes, and told what they hold."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from drawbar.config.schema.data_section import DataSection, SourceSection
from drawbar.data.readers import FileReader, RawRecord, Record
from drawbar.data.sources import Records, open_records
from drawbar.errors import UserError
from drawbar.util.file_content import content_of_bytes

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n".encode()
ANNEX = b"/annex/objects/SHA256E-s1048576--0123.jsonl\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"
LINE = b'{"text": "a", "label": "b"}\n'


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "a,b\n1,2\n")
    return buffer.getvalue()


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), buffer)
    return buffer.getvalue()


def arrow() -> bytes:
    table = pa.table({"text": ["a"]})
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


def saved_by_torch() -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, buffer)
    return buffer.getvalue()


def saved_by_numpy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(2))
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("train.jsonl"), io.BytesIO())
    return buffer.getvalue()


def database() -> bytes:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table a (b)")
        return connection.serialize()


OTHERS = {
    "lfs": LFS,
    "annex": ANNEX,
    "gzip": gzip.compress(LINE, mtime=0),
    "zip": zipped("train.csv"),
    "office": zipped("[Content_Types].xml"),
    "torch": saved_by_torch(),
    "parquet": parquet(),
    "arrow": arrow(),
    "pickle": pickle.dumps([{"text": "a"}]),
    "bzip2": bz2.compress(LINE),
    "xz": lzma.compress(LINE),
    "tar": tar(),
    "sqlite": database(),
    "npy": saved_by_numpy(),
    "safetensors": save({"weight": torch.ones(2)}),
}


def opened(path: Path | SourceSection, **settings: Any) -> Records:
    return open_records(DataSection(train=path if isinstance(path, SourceSection) else str(path), **settings), "train")


def refused(path: Path | SourceSection, **settings: Any) -> UserError:
    """What is said when a record is asked for."""
    with pytest.raises(UserError) as caught:
        next(iter(opened(path, **settings)))
    return caught.value


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_text_is_named_whatever_text_it_should_be(kind: str, tmp_path: Path) -> None:
    found = content_of_bytes(OTHERS[kind])
    assert found is not None
    assert found.name == kind
    for ending in (".txt", ".jsonl", ".json", ".csv", ".tsv"):
        path = tmp_path / f"a{ending}"
        path.write_bytes(OTHERS[kind])
        error = refused(path, on_bad_record="skip")
        assert error.what == f"{path} is not what its name says, but {found.what}"
        assert error.where == str(path)
        assert error.remedy == found.remedy_for(path)


@pytest.mark.parametrize(
    ("name", "content", "what", "remedy"),
    [
        ("a.parquet", LFS, "a Git LFS pointer", "git lfs pull"),
        ("a.arrow", LFS, "a Git LFS pointer", "git lfs pull"),
        ("a.jsonl.gz", LFS, "a Git LFS pointer", "git lfs pull"),
        ("a.parquet", gzip.compress(LINE, mtime=0), "a gzip file", "unpack it"),
        ("a.parquet", HTML, "a page of HTML", "download"),
        ("a.arrow", parquet(), "a Parquet file", ".parquet"),
        ("a.jsonl", gzip.compress(LINE, mtime=0), "a gzip file", "a.jsonl.gz"),
        ("a.jsonl", HTML, "a page of HTML", "download"),
        ("a.json", b'\n<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML file", "download"),
        ("a.csv", b"\xef\xbb\xbf<HTML>\n", "a page of HTML", "download"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(LINE, mtime=0), mtime=0), "a gzip file", "unpack"),
        ("a.jsonl.gz", gzip.compress(tar(), mtime=0), "a tar archive", "tar -xf"),
        ("a.txt.gz", LINE, "no gzip file", "rename it without .gz"),
        ("a.txt.gz", HTML, "a page of HTML", "download"),
    ],
)
def test_what_a_file_holds_is_named_with_what_to_do(
    name: str, content: bytes, what: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(tmp_path / name)
    assert f"{name} is not what its name says, but {what}" in error.what
    assert remedy in str(error.remedy)


def test_a_file_far_behind_is_named_before_the_first_record_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_bytes(LFS)
    (stream,) = open_records(DataSection(train=f"{tmp_path}/*.txt"), "train").streams
    with pytest.raises(UserError, match="is not what its name says"):
        next(stream.read())


def test_a_renamed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(LINE, mtime=0))
    (tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.gz")
    assert list(opened(tmp_path / "a.jsonl.gz")) == [json.loads(LINE)]


def test_parallel_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("a\n")
    (tmp_path / "a.de").write_bytes(LFS)
    error = refused(SourceSection(parallel={"en": str(tmp_path / "a.en"), "de": str(tmp_path / "a.de")}))
    assert "git lfs pull" in str(error.remedy)


def test_a_folder_of_a_dataset_with_pointers(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(LFS)  # `datasets` reads three lines of text
    source = SourceSection(dataset=str(tmp_path))
    with pytest.raises(UserError, match="but a Git LFS pointer"):
        list(opened(source))


@pytest.mark.parametrize(
    "content",
    [
        b"version https://example.org/spec/v1\n",
        b"PAR1 is how a Parquet file begins\n",
        b"ARROW is a format\n",
        b"PK is a name\n",
        b"BZh91 is a number\n",
        b"<p>a paragraph\n",
        b"%PDF is a format\n",
        "\N{SNOWMAN} snow\n".encode(),
    ],
)
def test_text_that_begins_alike_is_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert list(opened(tmp_path / "a.txt")) == [{"text": content.decode().strip()}]


def test_pages_of_html_are_text_and_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(HTML)
    for _ in range(2):
        assert len(list(opened(tmp_path / "*.txt", sample_by="document"))) == 2
    said = [record.message for record in caplog.records if "HTML" in record.message]
    assert said == [f"data.train: {tmp_path}/a.txt begins as a page of HTML does, and its tags are read as text"]


class Whole(FileReader):
    """Reads files of any bytes."""

    def units(self) -> Any:
        yield RawRecord(self.path.read_bytes(), self.path, None)

    def decode(self, unit: RawRecord) -> Record:
        return {"size": len(unit.raw)}


def test_a_reader_of_the_users_own_reads_all_but_pointers(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    source = SourceSection(files=str(path), reader=f"{__name__}:Whole")
    path.write_bytes(gzip.compress(LINE, mtime=0))
    assert list(opened(source)) == [{"size": path.stat().st_size}]
    path.write_bytes(LFS)
    assert "a Git LFS pointer" in refused(source).what
