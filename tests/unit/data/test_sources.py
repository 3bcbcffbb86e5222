"""Which records the settings of ``data`` name: files, globs, lists, built-in sources, datasets."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config.schema.data_section import DataSection, LimitSection, SourceSection
from drawbar.data.cache import file_digest
from drawbar.data.sources import Records, open_records
from drawbar.errors import UserError


def opened(train: Any, sample_by: str = "line", **settings: Any) -> Records:
    return open_records(DataSection(train=train, sample_by=sample_by, **settings), "train")


def lines_of(train: Any, sample_by: str = "line") -> list[str]:
    return [record["text"] for record in opened(train, sample_by)]


def refused(train: Any, **settings: Any) -> UserError:
    """What is said before any record is asked for."""
    with pytest.raises(UserError) as caught:
        opened(train, **settings)
    return caught.value


@pytest.fixture
def poem(tmp_path: Path) -> str:
    path = tmp_path / "poem.txt"
    path.write_bytes(b"one\r\n  two\x0ctwo\n\n \t\nthree\nfour\n")
    return str(path)


def test_lines(poem: str) -> None:
    records = opened(poem)
    assert list(records) == [{"text": "one"}, {"text": "  two\x0ctwo"}, {"text": "three"}, {"text": "four"}]
    assert [records.where(i) for i in range(4)] == [f"{poem}:{line}" for line in (1, 2, 5, 6)]


def test_paragraphs(poem: str) -> None:
    records = opened(poem, "paragraph")
    assert list(records) == [{"text": "one\n  two\x0ctwo"}, {"text": "three\nfour"}]
    assert [records.where(i) for i in range(2)] == [f"{poem}:1", f"{poem}:5"]


def test_one_blank_line_parts_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\na\nb\n \nc\n")
    assert lines_of(f"{tmp_path}/a.txt", "paragraph") == ["a\nb", "c"]


def test_document(poem: str) -> None:
    records = opened(poem, "document")
    assert list(records) == [{"text": "one\n  two\x0ctwo\n\n \t\nthree\nfour\n"}]
    assert records.where(0) == poem


@given(lines=st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))))
def test_every_line_with_text_is_a_record(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    wanted = [line for line in lines if line.strip()]
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\n".join(["first", *lines]).encode())
    assert lines_of(str(path)) == ["first", *wanted]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\nb \\ud83d\\ude00"}\n\n{"text": "c", "n": [1, 2]}')
    records = opened(str(path))
    assert list(records) == [{"text": "a\nb 😀"}, {"text": "c", "n": [1, 2]}]
    assert records[0:1] == [{"text": "a\nb 😀"}]
    assert records.where(1) == f"{path}:3"


def test_globs_and_lists_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "folder.txt").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/deeper/d.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    assert lines_of(f"{tmp_path}/*.txt") == ["[x].txt", "a.txt", "b.txt"]
    assert lines_of(f"{tmp_path}/deep/**/*.txt") == ["deep/c.txt", "deep/deeper/d.txt"]
    assert lines_of([f"{tmp_path}/b.txt", f"{tmp_path}/[a].txt"]) == ["b.txt", "a.txt"]
    assert lines_of(f"{tmp_path}/[x].txt") == ["[x].txt"]  # a file of that very name goes before the pattern


def test_missing_file_suggests_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_text("a")
    error = refused(f"{tmp_path}/trian.txt")
    assert f"there is no file {tmp_path}/trian.txt" in error.what
    assert error.where == "data.train"
    assert error.remedy == f"did you mean {tmp_path}/train.txt?"
    assert "does not exist" in refused(f"{tmp_path}/nowhere/train.txt").what
    monkeypatch.chdir(tmp_path)
    assert refused("trian.txt").remedy == "did you mean train.txt?"
    assert refused("python_stdlb").remedy == "did you mean python_stdlib?"
    assert str(refused("zzz").remedy).endswith(f"python_stdlib; a relative path starts at the folder {tmp_path}")


def test_folder_suggests_a_glob(tmp_path: Path) -> None:
    assert f"{tmp_path}/*.txt" in str(refused(str(tmp_path)).remedy)
    (tmp_path / "b.jsonl").write_text("{}")
    assert f"{tmp_path}/*.jsonl" in str(refused(str(tmp_path)).remedy)
    (tmp_path / "a.csv.gz").write_bytes(b"")
    assert f"{tmp_path}/*.csv.gz" in str(refused(str(tmp_path)).remedy)


def test_glob_without_a_match(tmp_path: Path) -> None:
    assert "no file matches" in refused(f"{tmp_path}/*.txt").what


@pytest.mark.parametrize(
    ("name", "kind"), [("a.xlsx", ".xlsx"), ("a", "no extension"), ("a.parquet.gz", ".parquet.gz")]
)
def test_files_of_an_unknown_kind(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"a")
    error = refused(f"{tmp_path}/{name}")
    assert f"unknown format ({kind})" in error.what
    assert error.where == f"{tmp_path}/{name}"
    assert ".txt, .tsv, .csv, .json, .jsonl, .ndjson, .parquet, .arrow" in str(error.remedy)


def test_a_compressed_file_of_another_kind_is_told_how_to_unpack_it(tmp_path: Path) -> None:
    (tmp_path / "a b.txt.zst").write_bytes(b"a")
    assert f"zstd -d '{tmp_path}/a b.txt.zst'" in str(refused(f"{tmp_path}/a b.txt.zst").remedy)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read even by root")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    records = opened(f"{tmp_path}/a.txt")
    with pytest.raises(UserError, match="cannot read"):
        len(records)
    with pytest.raises(UserError, match="cannot read"):
        _ = records.digest(file_digest)


@pytest.fixture(scope="module")
def stdlib() -> dict[str, Records]:
    data = DataSection(train="python_stdlib", validation="python_stdlib", test="python_stdlib")
    return {split: open_records(data, split) for split in ("train", "validation", "test")}


def test_stdlib_splits_share_the_library(stdlib: dict[str, Records]) -> None:
    paths = {split: [record["path"] for record in records] for split, records in stdlib.items()}
    assert all(names == sorted(names) for names in paths.values())
    everything = [path for names in paths.values() for path in names]
    assert len(everything) == len(set(everything)) > 300
    assert {"json/decoder.py", "argparse.py"} <= set(everything)
    for split in ("validation", "test"):
        assert 0.01 < len(paths[split]) / len(everything) < 0.12


def test_stdlib_records_are_the_files(stdlib: dict[str, Records]) -> None:
    for records in stdlib.values():
        assert set(records[0]) == {"text", "path"}
        assert records[0]["text"] == Path(records.where(0)).read_text(encoding="utf-8")
        assert records.where(0).endswith(os.path.join("", *records[0]["path"].split("/")))


def test_stdlib_without_tests_and_packages(stdlib: dict[str, Records]) -> None:
    folders = {part for records in stdlib.values() for record in records for part in Path(record["path"]).parts}
    assert not folders & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def test_stdlib_joins_with_files(stdlib: dict[str, Records], poem: str) -> None:
    data = DataSection(validation=["python_stdlib", poem])
    assert len(open_records(data, "validation")) == len(stdlib["validation"]) + 4


def test_stdlib_split_of_a_file_never_changes(stdlib: dict[str, Records]) -> None:
    validation = {record["path"] for record in stdlib["validation"]}
    assert {"codecs.py", "functools.py", "traceback.py"} <= validation


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Three files: four numbers, three, and three."""
    for name, values in (("a", range(4)), ("b", range(4, 7)), ("c", range(7, 10))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {value}}}\n' for value in values))
    return tmp_path


def test_nothing_is_read_before_a_record_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no JSON")
    records = opened(f"{tmp_path}/a.jsonl")
    assert len(records.digest(file_digest)) == 32
    with pytest.raises(UserError, match="not valid JSON"):
        _ = records[0]


def test_an_empty_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    assert "it is empty" in refused(f"{tmp_path}/*.parquet").what


def test_records_know_their_source(numbers: Path) -> None:
    both = SourceSection(files=[f"{numbers}/c.jsonl", f"{numbers}/a.jsonl"], weight=0.5)
    records = opened([both, SourceSection(files=f"{numbers}/b.jsonl", weight=2.0)])
    assert [record["n"] for record in records] == [7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    assert [stream.weight for stream in records.streams] == [0.5, 2.0]
    reading = records.reading()
    assert [number for number, _, _ in reading] == list(range(10))
    assert (reading.counts, reading.total, reading.bad) == ([7, 3], 10, [])


def test_records_can_be_sent_to_another_process(numbers: Path) -> None:
    records = opened(f"{numbers}/*.jsonl")
    assert list(pickle.loads(pickle.dumps(records))) == list(records)


@pytest.mark.parametrize("limit", [1, 4, 6, 10, 11])
def test_limit_counts_over_all_sources(numbers: Path, limit: int) -> None:
    files = [f"{numbers}/{name}.jsonl" for name in "abc"]
    records = opened(files, limit=LimitSection(train=limit))
    assert [record["n"] for record in records] == list(range(10))[:limit]
    data = DataSection(validation=files, limit=LimitSection(train=limit))
    assert len(open_records(data, "validation")) == 10


def test_rename(numbers: Path) -> None:
    source = f"{numbers}/a.jsonl"
    assert opened(source, rename={"label": "n"})[0] == {"label": 0}
    assert opened(SourceSection(files=source, rename={"own": "n"}), rename={"label": "n"})[0] == {"own": 0}
    assert opened(source, rename={"x": "n", "y": "n"})[0] == {"x": 0, "y": 0}
    (numbers / "two.jsonl").write_text('{"a": 1, "b": 2}')
    assert opened(f"{numbers}/two.jsonl", rename={"a": "b", "b": "a"})[0] == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("rename", "what", "remedy"),
    [
        ({"x": "c"}, "no column 'c'", "the columns are: 'a', 'b'"),
        ({"a": "b"}, "a column 'a' already", "rename 'a' too"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, rename: dict[str, str], what: str, remedy: str) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for data, where in (
        (DataSection(train=f"{tmp_path}/a.csv", rename=rename), "data.rename"),
        (DataSection(train=[SourceSection(files=f"{tmp_path}/a.csv", rename=rename)]), "data.train.0.rename"),
    ):
        with pytest.raises(UserError) as caught:
            len(open_records(data, "train"))
        assert what in caught.value.what
        assert remedy in str(caught.value.remedy)
        assert caught.value.where == where


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (SourceSection(), "names no data"),
        (SourceSection(files=[]), "names no data"),
        (SourceSection(files="a.jsonl", dataset="x"), "files and dataset"),
        (SourceSection(files="a.jsonl", split="train"), "belong to a dataset"),
        (SourceSection(files="a.jsonl", columns=["a"]), "only .tsv and .csv"),
        (SourceSection(files="a.jsonl", columns=["a", "a"]), "two columns are named 'a'"),
        (SourceSection(parallel={"x": "*.jsonl", "y": "a.jsonl"}), "is a pattern"),
        (SourceSection(parallel={"x": "a.jsonl", "y": "nope"}), "there is no file nope"),
        (SourceSection(dataset="./nope"), "there is no folder"),
        (SourceSection(dataset="a.jsonl"), "is a file"),
        ([SourceSection(files="a.jsonl", weight=1.0), "b.jsonl"], "some sources have a weight"),
    ],
)
def test_sources_that_cannot_be(numbers: Path, monkeypatch: pytest.MonkeyPatch, source: Any, what: str) -> None:
    monkeypatch.chdir(numbers)
    error = refused(source)
    assert what in error.what
    assert str(error.where).startswith("data.train")


def test_no_data() -> None:
    for data in (DataSection(), DataSection(validation=[])):
        with pytest.raises(UserError, match=r"no validation data[\s\S]*data.validation=FILE"):
            open_records(data, "validation")
    with pytest.raises(UserError, match=r"data.train=FILE"):
        open_records(DataSection(validation_share=0.5), "validation")


def test_digest_is_of_contents_and_settings_not_of_paths(numbers: Path) -> None:
    a, b, c = (f"{numbers}/{name}.jsonl" for name in "abc")
    digest = opened([a, b]).digest(file_digest)
    os.rename(a, f"{numbers}/moved.jsonl")
    assert opened([f"{numbers}/moved.jsonl", b]).digest(file_digest) == digest
    os.rename(f"{numbers}/moved.jsonl", a)
    share = DataSection(train=[a, b], validation_share=0.5)
    others = [
        opened([b, a]).digest(file_digest),
        opened([a, c]).digest(file_digest),
        opened([a]).digest(file_digest),
        opened([SourceSection(files=[a, b])]).digest(file_digest),
        opened([a, b], limit=LimitSection(train=3)).digest(file_digest),
        opened([a, b], rename={"x": "n"}).digest(file_digest),
        opened([a, b], on_bad_record="skip").digest(file_digest),
        open_records(share, "train").digest(file_digest),
        open_records(share, "validation").digest(file_digest),
    ]
    assert len({digest, *others}) == len(others) + 1
    assert opened([a, b], sample_by="document", columns=["x"], limit=LimitSection(test=3)).digest(file_digest) == digest


def test_digest_knows_what_text_and_tables_are_read_as(tmp_path: Path) -> None:
    for name in ("a.txt", "a.tsv", "a.csv"):
        (tmp_path / name).write_text("a\n1\n")
    digests = {opened(f"{tmp_path}/a{suffix}").digest(file_digest) for suffix in (".txt", ".tsv", ".csv")}
    digests |= {opened(f"{tmp_path}/a.txt", sample_by).digest(file_digest) for sample_by in ("paragraph", "document")}
    digests |= {opened(f"{tmp_path}/a.csv", columns=["x"]).digest(file_digest)}
    assert len(digests) == 6


SHARED = [{"n": number % 200, "text": "x"} for number in range(400)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_validation_share_keeps_equal_records_on_one_side(tmp_path: Path, kind: str) -> None:
    for name, rows in (("a", SHARED[:300]), ("b", SHARED[300:])):
        if kind == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")

    def sides(order: str) -> list[list[int]]:
        data = DataSection(train=[f"{tmp_path}/{name}.{kind}" for name in order], validation_share=0.2)
        return [[record["n"] for record in open_records(data, split)] for split in ("train", "validation")]

    train, validation = sides("ab")
    assert sorted(train + validation) == sorted(row["n"] for row in SHARED)
    assert not set(train) & set(validation)
    assert 20 < len(set(validation)) < 60
    assert [set(side) for side in sides("ba")] == [set(train), set(validation)]
    assert [record["n"] for record in SHARED if record["n"] in set(validation)] == validation


def test_validation_share_beside_validation_data(poem: str) -> None:
    assert "both say" in refused(poem, validation=poem, validation_share=0.5).what
    data = DataSection(train="nowhere", test=poem, validation_share=0.5)
    assert len(open_records(data, "test")) == 4


def test_validation_share_without_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    data = DataSection(train=f"{tmp_path}/a.txt", validation_share=1e-9)
    assert len(open_records(data, "train")) == 1
    with pytest.raises(UserError, match=r"too few records[\s\S]*data.validation_share"):
        len(open_records(data, "validation"))


def test_nothing_but_bad_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x\ny\n")
    with pytest.raises(UserError, match=r"all 2 are bad; the first: .*a.jsonl:1"):
        len(opened(f"{tmp_path}/a.jsonl", on_bad_record="skip"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset in the layout of the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "films").mkdir()
    for split, rows in (("train", 7), ("test", 2)):
        table = pa.table({"text": [f"{split} {n}" for n in range(rows)], "label": list(range(rows))})
        pq.write_table(table, tmp_path / "films" / f"{split}.parquet", row_group_size=3)
    return tmp_path / "films"


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_in_a_folder(folder: Path, streaming: bool) -> None:
    source = SourceSection(dataset=str(folder), rename={"sentence": "text"})
    records = opened(source, streaming=streaming)
    assert list(records) == [{"label": number, "sentence": f"train {number}"} for number in range(7)]
    assert records.where(2) == f"{folder}/train, row 3"
    (stream,) = records.streams
    assert [located.record["label"] for located in stream.read(1, 2, 1)] == [3, 5]
    assert [located.record for located in pickle.loads(pickle.dumps(stream)).read()] == list(records)
    test = open_records(DataSection(test=source, streaming=streaming), "test")
    assert len(test) == 2
    other = SourceSection(dataset=str(folder), split="test")
    assert opened(other, streaming=streaming)[1] == {"text": "test 1", "label": 1}
    assert opened(other, streaming=streaming).digest(file_digest) != opened(source, streaming=streaming).digest(
        file_digest
    )


def test_dataset_that_was_moved_or_changed(folder: Path) -> None:
    before = opened(SourceSection(dataset=str(folder))).digest(file_digest)
    moved = folder.rename(folder.parent / "moved")
    (moved / ".cache").mkdir()
    (moved / ".cache" / "a").write_text("hidden")
    assert opened(SourceSection(dataset=str(moved))).digest(file_digest) == before
    (moved / "train.parquet").rename(moved / "validation.parquet")
    assert opened(SourceSection(dataset=str(moved))).digest(file_digest) != before


def test_dataset_without_such_a_split(folder: Path) -> None:
    records = opened(SourceSection(dataset=str(folder), split="tset"))
    with pytest.raises(UserError, match=r'cannot load the dataset.*"tset"[\s\S]*data.train[\s\S]*split'):
        len(records)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_dataset_that_is_damaged(folder: Path, name: str, streaming: bool) -> None:
    (folder / "train.parquet").rename(folder / name).write_bytes(b"no table")
    with pytest.raises(UserError, match=r"cannot load the dataset"):
        len(opened(SourceSection(dataset=str(folder)), streaming=streaming))


def test_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    Dataset.from_list([{"a": 1}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"files: FOLDER/\*.arrow"):
        len(opened(SourceSection(dataset=f"{tmp_path}/saved")))
    assert list(opened(f"{tmp_path}/saved/*.arrow")) == [{"a": 1}]


def test_splits_that_were_saved_to_disk(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    DatasetDict({"train": Dataset.from_list([{"a": 1}])}).save_to_disk(saved)
    for source in (SourceSection(dataset=str(saved)), str(saved)):
        with pytest.raises(UserError, match="as save_to_disk writes them") as caught:
            len(opened(source))
        assert f"name the files of a split: {saved}/train/*.arrow" in str(caught.value)


def test_dataset_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(UserError) as caught:
        len(opened([SourceSection(dataset="nobody/nothing")]))
    assert "cannot be reached" in caught.value.what
    assert caught.value.where == "data.train.0"
