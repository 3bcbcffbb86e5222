"""A stream gives the records that memory holds, in any number of shares and from any place on."""

import gzip
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.config.schema.data_section import DataSection, LimitSection, SourceSection
from drawbar.data.source_stream import END_BYTES
from drawbar.data.sources import LocatedRecord, SourceStream, open_records
from drawbar.errors import UserError
from drawbar.runtime.log import logger

GOOD = "good"
BAD = "bad"
BLANK = "blank"
LINES = {GOOD: '{"n": %d}', BAD: '{"n": %d', BLANK: "  "}


def streams_of(train: Any, split: str = "train", **more: Any) -> list[SourceStream]:
    return open_records(DataSection(train=train, **more), split).streams


def write_lines(path: Path, kinds: list[str], first: int = 0) -> str:
    lines = [LINES[kind] % number if kind != BLANK else LINES[kind] for number, kind in enumerate(kinds, start=first)]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def write_table(path: Path, rows: int, group: int) -> str:
    pq.write_table(pa.table({"n": list(range(rows))}), path, row_group_size=group)
    return str(path)


shards = st.lists(
    st.lists(st.sampled_from([GOOD, GOOD, BAD, BLANK]), max_size=8).map(lambda kinds: [GOOD, *kinds]),
    min_size=1,
    max_size=4,
)


@given(
    shards=shards,
    shares=st.integers(1, 5),
    validation_share=st.none() | st.floats(0.1, 0.9),
    limit=st.none() | st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_all_records_once_and_go_on_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[str]],
    shares: int,
    validation_share: float | None,
    limit: int | None,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    files = [write_lines(folder / f"{n}.jsonl", kinds, first=100 * n) for n, kinds in enumerate(shards)]
    cut = data.draw(st.integers(0, len(files) - 1))
    groups = [files[:cut], files[cut:]] if cut else [files]
    sources = [SourceSection(files=group) for group in groups]
    more = {"validation_share": validation_share, "limit": LimitSection(train=limit), "on_bad_record": "skip"}
    config = DataSection(train=sources, **more)  # type: ignore[arg-type]
    records = open_records(config, "train")
    try:
        wanted = list(records)
    except UserError:  # the validation share left nothing
        wanted = []

    found: list[tuple[int, int, int]] = []
    for source, stream in enumerate(records.streams):
        for share in range(shares):
            located = list(stream.read(share, shares))
            found += [(source, item.position * shares + share, item.record["n"]) for item in located]
            for first in range(8):
                assert list(stream.read(share, shares, first)) == [item for item in located if item.position >= first]
    assert [number for *_, number in sorted(found)] == [record["n"] for record in wanted]


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
@pytest.mark.parametrize("group", [1, 4, 5000])
def test_shares_of_a_table(tmp_path: Path, shares: int, group: int) -> None:
    rows = 13 if group < 5000 else 3000  # more than are read at once
    (stream,) = streams_of(write_table(tmp_path / "a.parquet", rows, group))
    found = [[located.record["n"] for located in stream.read(share, shares)] for share in range(shares)]
    assert found == [list(range(share, rows, shares)) for share in range(shares)]
    assert [located.record["n"] for located in stream.read(1 % shares, shares, 2)] == found[1 % shares][2:]


def test_uneven_shards_of_several_kinds(tmp_path: Path) -> None:
    spec = [
        write_lines(tmp_path / "a.jsonl", [GOOD, BLANK, GOOD]),
        write_table(tmp_path / "b.parquet", 5, 2),
        write_lines(tmp_path / "c.jsonl", [GOOD]),
    ]
    (stream,) = streams_of(SourceSection(files=spec))
    assert [(item.position, item.where, item.record["n"]) for item in stream.read(1, 3)] == [
        (0, f"{spec[0]}:3", 2),
        (1, f"{spec[1]}, row 3", 2),
        (2, f"{spec[2]}:1", 0),
    ]


def test_compressed_is_as_plain(tmp_path: Path) -> None:
    plain = Path(write_lines(tmp_path / "a.jsonl", [GOOD, BLANK] * 500))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (one,), (other,) = streams_of(str(plain)), streams_of(f"{plain}.gz")
    assert [(a.position, a.record) for a in one.read(2, 3, 10)] == [
        (b.position, b.record) for b in other.read(2, 3, 10)
    ]
    assert next(other.read(2, 3, 10)).where == f"{plain}.gz:65"


def test_records_of_other_shares_are_not_decoded(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD, BAD, GOOD, BAD])
    (stream,) = streams_of(path)
    assert [item.record["n"] for item in stream.read(0, 2)] == [0, 2]
    with pytest.raises(UserError, match="not valid JSON"):
        next(stream.read(1, 2))
    with pytest.raises(UserError, match=r"a.jsonl:4"):
        next(stream.read(1, 2, 1))


def test_a_stream_reads_no_further_than_it_must(tmp_path: Path) -> None:
    """Of a gzip file that is cut off, the beginning can be read."""
    lines = "".join(json.dumps({"n": number, "salt": number**7 % 999983}) + "\n" for number in range(50_000))
    whole = gzip.compress(lines.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (stream,) = streams_of(f"{tmp_path}/a.jsonl.gz")
    assert [item.record["n"] for item in itertools.islice(stream.read(), 1000)] == list(range(1000))
    with pytest.raises(UserError, match="not a complete gzip file"):
        list(stream.read())
    (limited,) = streams_of(f"{tmp_path}/a.jsonl.gz", limit=LimitSection(train=1000))
    assert len(list(limited.read())) == 1000


def test_limit_counts_bad_records_and_those_of_its_split_alone(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD, BAD, GOOD, GOOD])
    (stream,) = streams_of(path, limit=LimitSection(train=3), on_bad_record="skip")
    assert [item.record["n"] for item in stream.read()] == [0, 2]
    write_lines(tmp_path / "a.jsonl", [GOOD] * 50)
    (shared,) = streams_of(path, "validation", limit=LimitSection(validation=5), validation_share=0.3)
    (unlimited,) = streams_of(path, "validation", validation_share=0.3)
    assert list(shared.read()) == list(unlimited.read())[:5]


def test_rename_in_a_stream(tmp_path: Path) -> None:
    (stream,) = streams_of(write_lines(tmp_path / "a.jsonl", [GOOD]), rename={"label": "n"})
    assert list(stream.read()) == [LocatedRecord(0, {"label": 0}, f"{tmp_path}/a.jsonl:1")]


def test_parallel_lines_in_shares(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(5)))
    (stream,) = streams_of(SourceSection(parallel={"x": f"{tmp_path}/a", "y": f"{tmp_path}/b"}))
    assert [item.record for item in stream.read(1, 2)] == [{"x": "a1", "y": "b1"}, {"x": "a3", "y": "b3"}]


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What drawbar logs."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_bad_records_are_logged_and_then_counted(tmp_path: Path, warnings: list[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD] + [BAD] * 13)
    (stream,) = streams_of(path, on_bad_record="skip")
    assert len(list(stream.read(0, 2)) + list(stream.read(1, 2))) == 1
    assert stream.skipped == 13
    assert len(warnings) == 11
    assert f"{path}:3: " in warnings[0]
    assert "not valid JSON" in warnings[0]
    assert "more bad records of data.train" in warnings[-1]


@pytest.mark.parametrize("change", ["cut", "replaced", "appended", "gone"])
def test_a_file_that_changes_under_a_stream_is_an_error(change: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path in paths:
        write_lines(path, ["good"] * 5000)
    (stream,) = streams_of(f"{tmp_path}/*.jsonl")
    assert len(list(stream.read())) == 10_000
    for path in paths:
        path.touch()
    assert len(list(stream.read())) == 10_000  # its content is what it was
    records = stream.read()
    found = [next(records) for _ in range(10)]
    lines = paths[0].read_text().splitlines(keepends=True)
    if change == "gone":
        paths[0].unlink()
    else:
        new = {"cut": lines[:4000], "replaced": lines[::-1], "appended": [*lines, lines[0]]}[change]
        paths[0].write_text("".join(new))
    says = "cannot read .*a.jsonl: No such file" if change == "gone" else "a.jsonl has changed since it was first read"
    with pytest.raises(UserError, match=says):
        found.extend(records)
    assert {record.where.partition(":")[0] for record in found} == {str(paths[0])}  # none of the next file


def test_fingerprint_is_of_sizes_ends_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = bytearray(b"x" * 79 + b"\n") * 4000
    assert len(content) > 2 * END_BYTES

    def fingerprint(**more: Any) -> str:
        path.write_bytes(content)
        return streams_of(str(path), **more)[0].quick_digests["error"]

    before = fingerprint()
    content[END_BYTES + 10] = ord("y")
    assert fingerprint() == before  # the price of never reading it whole
    changed = [
        fingerprint(limit=LimitSection(train=1)),
        fingerprint(sample_by="paragraph"),
        fingerprint(rename={"a": "text"}),
    ]
    for place in (5, len(content) * 8 // 17 + 9, len(content) - 5):  # at both ends, and in an excerpt between them
        content[place] = ord("y")
        changed.append(fingerprint())
    content += b"\n"
    changed.append(fingerprint())
    assert len({before, *changed}) == 8
    path.rename(tmp_path / "b.txt")
    assert streams_of(f"{tmp_path}/b.txt")[0].quick_digests["error"] == changed[-1]
