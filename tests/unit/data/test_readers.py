"""Every format gives the same records, and says file and line of what it cannot read."""

import codecs
import csv
import errno
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config.schema.data_section import DataSection, SourceSection
from drawbar.data.readers import BadRecord, FileReader, RawRecord, ReadOptions
from drawbar.data.sources import Records, open_records
from drawbar.data.tables import CsvTable
from drawbar.data.text_readers import LONG_LINE
from drawbar.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"sentence": 'a "lone quote and\u2028 \x0cspaces  ', "label": "1"},
    {"sentence": "naïve 😀", "label": "0"},
    {"sentence": "", "label": "01"},
]

Write = Callable[[Path, list[dict[str, Any]]], None]


def opened(path: Path | str, **settings: Any) -> Records:
    return open_records(DataSection(train=str(path), **settings), "train")


def refused(path: Path | str, **settings: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        len(opened(path, **settings))
    return caught.value


def table_text(rows: list[dict[str, Any]], separator: str) -> str:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    if separator == "\t":
        return "".join("\t".join(line) + "\n" for line in lines)
    buffer = io.StringIO()
    csv.writer(buffer).writerows(lines)
    return buffer.getvalue()


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def write_ipc_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_ipc_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_with_datasets(path: Path, rows: list[dict[str, Any]]) -> None:
    Dataset.from_list(rows).save_to_disk(path.parent / "saved")
    (saved,) = (path.parent / "saved").glob("*.arrow")
    saved.rename(path)


TEXT: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".tsv": lambda rows: table_text(rows, "\t"),
    ".csv": lambda rows: table_text(rows, ","),
    ".json": json.dumps,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
}
BINARY: dict[str, Write] = {
    "a.parquet": write_parquet,
    "file.arrow": write_ipc_file,
    "stream.arrow": write_ipc_stream,
    "datasets.arrow": write_with_datasets,
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("suffix", TEXT)
def test_text_formats_give_the_same_records(tmp_path: Path, suffix: str, mark: bytes, end: str) -> None:
    content = mark + TEXT[suffix](ROWS).replace("\r\n", "\n").replace("\n", end).encode()
    (tmp_path / f"a{suffix}").write_bytes(content)
    (tmp_path / f"b{suffix}.gz").write_bytes(gzip.compress(content))
    assert list(opened(tmp_path / f"a{suffix}")) == ROWS
    assert list(opened(tmp_path / f"b{suffix}.gz")) == ROWS
    assert opened(tmp_path / f"b{suffix}.gz").where(1).startswith(f"{tmp_path}/b{suffix}.gz")


@pytest.mark.parametrize("name", BINARY)
def test_binary_formats_give_the_same_records(tmp_path: Path, name: str) -> None:
    rows = [{**row, "n": number, "tokens": [{"id": 1.5}], "none": None} for number, row in enumerate(ROWS)]
    BINARY[name](tmp_path / name, rows)
    records = opened(tmp_path / name)
    assert list(records) == rows
    assert [records.where(number) for number in range(3)] == [f"{tmp_path / name}, row {n}" for n in (1, 2, 3)]


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@given(rows=st.lists(st.tuples(cells, cells), min_size=1))
def test_csv_is_what_python_wrote(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("a", "b"), *rows])
    assert [tuple(record.values()) for record in opened(path)] == rows


def test_line_breaks_inside_of_quotes_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,label\r\n"one\r\ntwo\nthree\rfour\r\n",1\r\nfive,2\r\n')
    records = opened(path)
    assert list(records) == [{"text": "one\r\ntwo\nthree\rfour\r\n", "label": "1"}, {"text": "five", "label": "2"}]
    assert records.where(1) == f"{path}:6"


def test_a_row_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"one\n\ntwo ""x""",1\n\nthree ,2\n')
    records = opened(path)
    assert list(records) == [{"text": 'one\n\ntwo "x"', "label": "1"}, {"text": "three ", "label": "2"}]
    assert [records.where(number) for number in range(2)] == [f"{path}:2", f"{path}:6"]


def test_a_field_longer_than_pythons_own_limit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(opened(tmp_path / "a.csv")[0]["text"]) == 200_000


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_columns_name_those_of_files_without_a_header(tmp_path: Path, name: str, separator: str) -> None:
    (tmp_path / name).write_text(f"good film {separator}1\nbad film {separator}0\n")
    wanted = [{"sentence": "good film ", "label": "1"}, {"sentence": "bad film ", "label": "0"}]
    assert list(opened(tmp_path / name, columns=["sentence", "label"])) == wanted
    own = SourceSection(files=str(tmp_path / name), columns=["sentence", "label"])
    assert list(open_records(DataSection(train=own, columns=["x"]), "train")) == wanted
    assert list(opened(tmp_path / name)[0]) == ["good film ", "1"]  # without the setting, a header


@pytest.mark.parametrize("separator", [";", "|", "\t", " "])
def test_another_separator(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text{separator}label\n"one, two{separator}"{separator}1\nthree{separator}2\n')
    wanted = [{"text": f"one, two{separator}", "label": "1"}, {"text": "three", "label": "2"}]
    assert list(opened(path, separator=separator)) == wanted
    own = SourceSection(files=str(path), separator=separator)
    assert list(open_records(DataSection(train=own, separator="?"), "train")) == wanted


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        ("Review ID;Review Text;Stars\n1;good, and long;5\n", {}),
        ("Review ID;Review Text, whole;Stars\n1;good;5\n", {}),
        ("1;good;5\n", {"columns": ["id", "text", "stars"]}),
        ("1;good, and long;5\n", {"columns": ["id", "text", "stars"]}),
    ],
)
def test_a_row_that_does_not_fit_because_of_another_separator(
    tmp_path: Path, content: str, settings: dict[str, Any]
) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert "separated by ';': set 'data.separator=\";\"'" in str(refused(tmp_path / "a.csv", **settings).remedy)


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_first_line_for_excel_is_no_header(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"sep={separator}\ntext{separator}label\none{separator}1\n")
    for read_with in (",", ";"):
        with pytest.raises(UserError, match="tells Excel the separator") as refused:
            list(opened(path, separator=read_with))
        assert f'data.separator="{separator}"' in str(refused.value.remedy)


def test_a_separator_is_one_character_of_a_csv_file(tmp_path: Path) -> None:
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(ValueError, match="separator"):
            DataSection(separator=wrong)
    (tmp_path / "a.tsv").write_text("text\tlabel\na\t1\n")
    with pytest.raises(UserError, match=r"only \.csv files[\s\S]*data\.train\.separator"):
        open_records(DataSection(train=SourceSection(files=str(tmp_path / "a.tsv"), separator=";")), "train")


def test_the_usual_separator_leaves_what_a_run_remembers_of_its_files_unchanged(tmp_path: Path) -> None:
    options = [ReadOptions(separator=separator) for separator in ",;"]
    assert [CsvTable.open(tmp_path, one).settings() for one in options] == [
        ["CsvTable", "columns=None"],
        ["CsvTable", "columns=None", "separator=';'"],
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'\xef\xbb\xbf\n{"a": 1}\r\n\r\n{"a": 2}',
        b'{"a": 1}\n{"a": 2, "b": [3]}\n',
        b'{"a": 1, "b": [3]}\n{"a": 2}\n',
    ],
)
def test_a_json_file_of_lines(tmp_path: Path, content: bytes) -> None:
    for name, of_name in (("a.json", content), ("b.json.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(of_name)
        records = opened(tmp_path / name)
        assert [record["a"] for record in records] == [1, 2]
        assert records.where(0).startswith(f"{tmp_path}/{name}:")


def test_a_json_file_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n')
    assert list(opened(tmp_path / "a.json")) == [{"a": 1}]
    (tmp_path / "a.json").write_text('{"version": "1.1", "data": [{"a": 1}, {"a": 2}]}')
    assert list(opened(tmp_path / "a.json")) == [{"a": 1}, {"a": 2}]


def test_a_broken_line_of_a_json_file_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    assert refused(tmp_path / "a.json").where == f"{tmp_path}/a.json:2"
    assert list(opened(tmp_path / "a.json", on_bad_record="skip")) == [{"a": 1}, {"a": 3}]


def test_json_file_with_one_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "data": [{"a": 1}, {"a": float("nan")}]}))
    records = opened(path)
    assert records[0] == {"a": 1}
    assert records.where(1) == f"{path}, record 2"


def test_parallel_files(tmp_path: Path) -> None:
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(b"one\n\nthree\n"))
    (tmp_path / "b.de").write_bytes(b"eins\r\n zwei \r\n")
    with (tmp_path / "b.de").open("ab") as file:
        file.write(b"\n")
    source = SourceSection(parallel={"source": f"{tmp_path}/a.en.gz", "target": f"{tmp_path}/b.de"})
    records = open_records(DataSection(train=source), "train")
    assert list(records) == [
        {"source": "one", "target": "eins"},
        {"source": "", "target": " zwei "},
        {"source": "three", "target": ""},
    ]
    assert records.where(2) == f"{tmp_path}/a.en.gz:3"


def test_parallel_files_of_different_length(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n3")
    (tmp_path / "b").write_text("1\n2\n")
    source = SourceSection(parallel={"x": f"{tmp_path}/a", "y": f"{tmp_path}/b"})
    with pytest.raises(UserError, match=r"/a has 3 lines, .*/b has 2 lines"):
        len(open_records(DataSection(train=source), "train"))


def test_parallel_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_bytes(b"1\n\xff\n")
    source = SourceSection(parallel={"x": f"{tmp_path}/a", "y": f"{tmp_path}/b"})
    with pytest.raises(UserError) as caught:
        len(open_records(DataSection(train=source), "train"))
    assert caught.value.where == f"{tmp_path}/b:2"


BAD_RECORDS = [
    ("a.txt", b"good\ncaf\xe9\n", ":2", "not UTF-8 text: byte 0xe9 at column 4"),
    ("a.jsonl", b'{}\n{"a": "\xff"}', ":2", "not UTF-8"),
    ("a.jsonl", b'{"a": 1}\n\n{"a": 2,}\n', ":3", "not valid JSON"),
    ("a.jsonl", b'{"b": 1}\n{"a":\n', ":2", "not valid JSON"),
    ("a.jsonl", b"{}\n[1]", ":2", "holds a JSON list, not an object"),
    ("a.jsonl", b"{}\n7", ":2", "holds a JSON int"),
    ("a.jsonl", b'{}\n{"a": ' + b"[" * 100_000, ":2", "cannot be read"),
    ("a.jsonl", b'{}\n{"a": ' + b"1" * 5000 + b"}", ":2", "cannot be read"),
    ("a.jsonl", b'{}\n{"a": ["x\\uD83Dy"]}', ":2", "half of a surrogate pair (\\ud83d)"),
    ("a.json", b'[{}, {"a": "\\ud83d"}]', ", record 2", "half of a surrogate pair"),
    ("a.json", b"[{}, 7]", ", record 2", "holds a JSON int"),
    ("a.csv", b"a,b\n1,2\n\n1\n", ":4", "has 1 fields, but the header names 2: a, b"),
    ("a.csv", b'a,b\n1,2\n1,"2"3\n', ":3", "not valid CSV"),
    ("a.csv", b"a,b\n1,2\n1,a\rb,2\r\n", ":3", "holds a carriage return outside of quotes"),
    ("a.csv", b"a,b\n1,2\n1,\xff\n", ":3", "not UTF-8 text: byte 0xff"),
    ("a.tsv", b'a\tb\n1\t"\n1\t2\t3\n', ":3", "has 3 fields, but the header names 2: a, b"),
    ("a.tsv", b"a\tb\n1\t2\n1\t\xff\n", ":3", "not UTF-8 text: byte 0xff at column 3"),
]


@pytest.mark.parametrize(("name", "content", "where", "what"), BAD_RECORDS)
def test_a_bad_record_is_named_or_left_out(tmp_path: Path, name: str, content: bytes, where: str, what: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refused(path)
    assert what in error.what
    assert error.where == f"{path}{where}"
    assert "data.on_bad_record=skip" in str(error.remedy)
    records = opened(path, on_bad_record="skip")
    assert len(records) == 1
    reading = records.reading()
    assert len(list(reading)) == 1
    assert (reading.total, reading.bad_count) == (2, 1)
    (message,) = reading.bad
    assert message.startswith(f"{path}{where}: ")
    assert what in message


def test_a_table_whose_lines_end_in_carriage_returns_is_told_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "mac.csv").write_bytes(b"text,label\rabc,a\rb,b\r")
    error = refused(tmp_path / "mac.csv")
    assert "carriage return" in error.what
    assert r"tr '\r' '\n' < mac.csv > new-mac.csv" in str(error.remedy)


def truncated_gzip() -> bytes:
    return gzip.compress(json_lines([{"a": number} for number in range(1000)]).encode())[:-20]


def parquet_bytes() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": ["word"] * 1000}), buffer, compression="none", use_dictionary=False)
    return buffer.getvalue()


def arrow_bytes() -> bytes:
    table = pa.table({"a": ["word"] * 1000})
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


BAD_FILES = [
    ("a.jsonl.gz", truncated_gzip(), "not a complete gzip file"),
    ("a.csv.gz", b"a,b\n", "is not what its name says, but no gzip file"),
    ("a.json", b'[{"a": 1},\n {"a": }]', "not valid JSON"),
    ("a.json", b'{"a": 1,\n "b": }', "not valid JSON"),
    ("a.json", b'{"a": [], "b": []}', "with 2 lists"),
    ("a.json", b"7", "a JSON int"),
    ("a.json", b'["\xff"]', "not UTF-8"),
    ("a.tsv", b"a\tb\ta\n1\t2\t3\n", "two columns are named 'a'"),
    ("a.csv", b'a,b\n1,2\n1,"2\n1,2\n', "never closed"),
    ("a.parquet", b"not a table", "cannot be read in the format of its extension"),
    ("a.parquet", parquet_bytes()[:-5], "cannot be read in the format of its extension"),
    ("a.parquet", b"PAR1" + b"\xff" * 400 + parquet_bytes()[404:], "cannot be read in the format of its extension"),
    ("a.arrow", b"not a table", "cannot be read in the format of its extension"),
    ("a.arrow", b"ARROW1\0\0 and no more", "cannot be read in the format of its extension"),
    ("a.arrow", arrow_bytes()[:-2000], "cannot be read in the format of its extension"),
]


@pytest.mark.parametrize(("name", "content", "what"), BAD_FILES)
def test_a_damaged_file_is_refused_even_where_records_may_be_bad(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(tmp_path / name, on_bad_record="skip")
    assert what in str(error)
    assert str(error.where).startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", b"", "it is empty"),
        ("a.jsonl", b"", "it is empty"),
        ("a.json", b"", "it is empty"),
        ("a.csv", b"", "it is empty"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "it is empty"),
        ("a.txt", b"\n \n\t\n\xe3\x80\x80", "only blank lines"),
        ("a.jsonl", b"\n\n", "only blank lines"),
        ("a.json", b"[]", "its list is empty"),
        ("a.tsv", b"a\tb\n", "only blank lines, or a header alone"),
    ],
)
@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
def test_files_without_records(tmp_path: Path, name: str, content: bytes, what: str, sample_by: str) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(tmp_path / name, sample_by=sample_by)
    assert what in str(error)
    assert error.where == f"{tmp_path}/{name}"


def test_parquet_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "it has no rows" in refused(tmp_path / "a.parquet").what


def test_a_value_that_python_cannot_hold(tmp_path: Path) -> None:
    offsets, data = pa.py_buffer(b"\0\0\0\0\x01\0\0\0\x02\0\0\0"), pa.py_buffer(b"a\xff")
    table = pa.table({"a": pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])})
    pq.write_table(table, tmp_path / "a.parquet")
    error = refused(tmp_path / "a.parquet")
    assert "cannot be a Python value: 'utf-8' codec" in error.what
    assert error.where == f"{tmp_path}/a.parquet, row 2"
    assert list(opened(tmp_path / "a.parquet", on_bad_record="skip")) == [{"a": "a"}]


NUL_FILES = {
    "a.txt": b"one\ntw\0o\n",
    "a.tsv": b"text\tlabel\nt\0wo\t1\n",
    "a.csv": b"text,label\n1,t\0wo\n",
    "a.jsonl": b'{"text": "one"}\n{"text": "tw\0o"}\n',
}


@pytest.mark.parametrize("name", NUL_FILES)
def test_a_line_with_nul_bytes_is_a_bad_record(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(NUL_FILES[name] + NUL_FILES[name].splitlines()[0] + b"\n")
    error = refused(tmp_path / name)
    assert "NUL" in error.what
    assert error.where == f"{tmp_path}/{name}:2"
    assert len(opened(tmp_path / name, on_bad_record="skip")) == {"a.txt": 2, "a.jsonl": 2}.get(name, 1)


def test_utf_16_without_a_mark_is_named(tmp_path: Path) -> None:
    """Of English text, every second byte is NUL, and all of them are UTF-8."""
    (tmp_path / "a.txt").write_bytes("a road\n".encode("utf-16-le"))
    assert "iconv -f UTF-16LE" in str(refused(tmp_path / "a.txt"))


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, b""])
def test_utf16_with_the_line_breaks_of_windows(tmp_path: Path, mark: bytes) -> None:
    """As spreadsheets write it: to a reader of bytes, each carriage return stands alone."""
    (tmp_path / "a.csv").write_bytes(mark + "text,label\r\na road,1\r\n".encode("utf-16-le"))
    assert "iconv -f UTF-16" in str(refused(tmp_path / "a.csv"))


@pytest.mark.parametrize("ending", [".txt", ".csv", ".tsv", ".jsonl", ".txt.gz"])
@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_utf16_says_itself_what_it_is(tmp_path: Path, ending: str, mark: bytes) -> None:
    encoding = "utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"
    content = mark + "text\na road\n".encode(encoding)
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    assert f"iconv -f UTF-16 -t UTF-8 {tmp_path}/a{ending} > {tmp_path}/utf8-a{ending}" in str(
        refused(tmp_path / f"a{ending}")
    )


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("piece", "looks_like"),
    [
        (b"a text without an end ", "without line breaks"),
        (b"a line\r", "carriage returns"),
        (b'[{"text": "x"}], ', "JSON"),
        (b"<p>x</p>", "HTML"),
    ],
)
def test_a_line_of_megabytes_is_said_to_be_one(
    tmp_path: Path, warnings: Callable[[], list[str]], piece: bytes, looks_like: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + piece * (2 * LONG_LINE // len(piece)) + b"\ntwo\n")
    for _ in range(2):  # once, however often the file is read
        assert len(opened(path)) == 3
    (warning,) = warnings()
    assert warning.startswith(f"{path}:2 is a line of 2.0 MiB")
    assert looks_like in warning


def test_a_whole_file_as_one_record_is_meant(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "a.txt").write_bytes(b"x " * LONG_LINE)
    assert len(opened(tmp_path / "a.txt", sample_by="document")) == 1
    assert not warnings()


def test_a_long_line_of_parallel_files(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "a.en").write_text("x " * LONG_LINE)
    (tmp_path / "a.de").write_text("y")
    source = SourceSection(parallel={"source": str(tmp_path / "a.en"), "target": str(tmp_path / "a.de")})
    assert len(open_records(DataSection(train=source), "train")) == 1
    assert warnings()[0].startswith(f"{tmp_path}/a.en:1 is a line of 2.0 MiB")


def test_a_column_inside_a_column_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines([{"translation": {"en": "one", "de": "eins"}}]))
    records = opened(path, rename={"source": "translation.en", "target": "translation.de"})
    assert records[0] == {"translation": {"en": "one", "de": "eins"}, "source": "one", "target": "eins"}
    assert "'translation.en', 'translation.de'" in str(refused(path, rename={"source": "translation.fr"}))


OWN_READERS = """
from drawbar import FileReader, RawRecord


class Whole(FileReader):
    def units(self):
        yield RawRecord(self.path.read_bytes(), self.path, None)


class Listed(Whole):
    def decode(self, unit):
        return [1]


class Failing(Whole):
    def decode(self, unit):
        return {}["x"]
"""


FAILING_READERS = """
import errno, os
from drawbar import FileReader, RawRecord


class Numbers(FileReader):
    def units(self):
        for number in range(5):
            yield RawRecord(number, self.path, number)

    def decode(self, unit):
        return {"n": unit.raw}


class FailsInUnits(Numbers):
    def units(self):
        for unit in super().units():
            if unit.raw == 3 and self.path.name == "b.own":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            yield unit


class FailsInDecode(Numbers):
    def decode(self, unit):
        if unit.raw == 3 and self.path.name == "b.own":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().decode(unit)


class Vanished(Numbers):
    def decode(self, unit):
        return {"n": (self.path.parent / "images" / "3.png").read_bytes()}
"""


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("FailsInUnits", "b.own", "Input/output error"),
        ("FailsInDecode", "b.own", "Input/output error"),
        ("Vanished", "images/3.png", "No such file or directory"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"validation_share": 0.5}])
@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_a_file_that_cannot_be_read_further_is_named_and_is_no_bad_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
    says: str,
    more: dict[str, Any],
    on_bad_record: str,
) -> None:
    (tmp_path / "failing_readers.py").write_text(FAILING_READERS)
    for path in ("a.own", "b.own"):
        (tmp_path / path).write_text("text")
    monkeypatch.syspath_prepend(tmp_path)
    source = SourceSection(files=[str(tmp_path / "a.own"), str(tmp_path / "b.own")], reader=f"failing_readers:{name}")
    settings: Any = {"on_bad_record": on_bad_record, **more}
    with pytest.raises(UserError) as caught:
        list(open_records(DataSection(train=source, **settings), "train"))
    assert not isinstance(caught.value, BadRecord)
    assert caught.value.what == f"cannot read {tmp_path / file}: {says}"
    assert caught.value.where == "data.train"


def test_the_digest_of_a_file_that_cannot_be_read_names_it(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"n": 1}\n')

    def fails_at_b(path: Path) -> str:
        if path.name == "b.jsonl":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return "digest"

    with pytest.raises(UserError, match=rf"cannot read {tmp_path}/b.jsonl: Input/output error"):
        opened(f"{tmp_path}/*.jsonl").digest(fails_at_b)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Whole", "the reader Whole cannot be created: TypeError"),
        ("Listed", "the reader Listed makes list of a record, and not dict"),
        ("Failing", "the reader Failing cannot decode a record: KeyError: 'x'"),
    ],
)
def test_a_mistake_in_a_reader_is_said_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    (tmp_path / "own_readers.py").write_text(OWN_READERS)
    (tmp_path / "data.own").write_text("text")
    monkeypatch.syspath_prepend(tmp_path)
    source = SourceSection(files=str(tmp_path / "data.own"), reader=f"own_readers:{name}")
    with pytest.raises(UserError) as caught:
        list(open_records(DataSection(train=source), "train"))
    assert what in caught.value.what


def test_an_ending_that_two_packages_bring_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("reads_a", "reads_b"):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[drawbar.readers]\n.twice = json:loads\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data.twice").write_text("text")
    assert "several packages provide the reader '.twice'" in refused(tmp_path / "data.twice").what


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.csv", b",text,label\n0,a,good\n", ["column 1", "text", "label"]),
        ("a.tsv", b"text\t\t \nx\ty\tz\n", ["text", "column 2", "column 3"]),
    ],
)
def test_a_column_without_a_name_is_named_by_its_place(
    tmp_path: Path, name: str, content: bytes, columns: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    (record,) = open_records(DataSection(train=str(tmp_path / name)), "train")
    assert list(record) == columns


class Curt(FileReader):
    """A reader of lines that says of a bad one only what is wrong."""

    def units(self) -> Iterator[RawRecord]:
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            yield RawRecord(line, self.path, number)

    def decode(self, unit: RawRecord) -> dict[str, Any]:
        if unit.raw == b"stone":
            raise BadRecord("no stones")
        return {"text": unit.raw.decode()}


def test_a_bad_record_of_a_users_reader_gets_its_place_and_a_remedy(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    path = tmp_path / "a.curt"
    path.write_text("one\nstone\ntwo\n")
    train = SourceSection(files=str(path), reader=f"{__name__}:Curt")
    with pytest.raises(UserError) as caught:
        list(open_records(DataSection(train=train), "train"))
    assert caught.value.where == f"{path}:2"
    assert caught.value.remedy == "correct the record; or leave bad records out: data.on_bad_record=skip"
    kept = open_records(DataSection(train=train, on_bad_record="skip"), "train")
    assert [record["text"] for record in kept] == ["one", "two"]
    list(kept.streams[0].read())
    assert warnings() == [f"left out a bad record: {path}:2: no stones"]
