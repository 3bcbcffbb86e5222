import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.sources import Records, open_records
from drawbar.errors import UserError


def lines_of(spec: str | list[str], sample_by: str = "line") -> list[str]:
    return [record["text"] for record in open_records(spec, "train", sample_by)]


def refused(spec: str, sample_by: str = "line") -> UserError:
    with pytest.raises(UserError) as caught:
        open_records(spec, "train", sample_by)
    return caught.value


@pytest.fixture
def poem(tmp_path: Path) -> str:
    path = tmp_path / "poem.txt"
    path.write_bytes(b"one\r\n  two\x0ctwo\n\n \t\nthree\nfour\n")
    return str(path)


def test_lines(poem: str) -> None:
    records = open_records(poem, "train", "line")
    assert list(records) == [{"text": "one"}, {"text": "  two\x0ctwo"}, {"text": "three"}, {"text": "four"}]
    assert [records.where(i) for i in range(4)] == [f"{poem}:{line}" for line in (1, 2, 5, 6)]


def test_paragraphs(poem: str) -> None:
    records = open_records(poem, "train", "paragraph")
    assert list(records) == [{"text": "one\n  two\x0ctwo"}, {"text": "three\nfour"}]
    assert [records.where(i) for i in range(2)] == [f"{poem}:1", f"{poem}:5"]


def test_one_blank_line_parts_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\na\nb\n \nc\n")
    assert lines_of(f"{tmp_path}/a.txt", "paragraph") == ["a\nb", "c"]


def test_document(poem: str) -> None:
    records = open_records(poem, "train", "document")
    assert list(records) == [{"text": "one\n  two\x0ctwo\n\n \t\nthree\nfour\n"}]
    assert records.where(0) == poem


@given(lines=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))))
def test_every_line_with_text_is_a_record(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    wanted = [line for line in lines if line.strip()]
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\n".join(["first", *lines]).encode())
    assert lines_of(str(path)) == ["first", *wanted]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\nb \\ud83d\\ude00"}\n\n{"text": "c", "n": [1, 2]}')
    records = open_records(str(path), "train", "line")
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
    assert "python_stdlib" in str(refused("zzz").remedy)


def test_folder_suggests_a_glob(tmp_path: Path) -> None:
    assert f"{tmp_path}/*.txt" in str(refused(str(tmp_path)).remedy)
    (tmp_path / "a.jsonl").write_text("{}")
    assert f"{tmp_path}/*.jsonl" in str(refused(str(tmp_path)).remedy)


def test_glob_without_a_match(tmp_path: Path) -> None:
    assert "no file matches" in refused(f"{tmp_path}/*.txt").what


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", b"", "it is empty"),
        ("a.jsonl", b"", "it is empty"),
        ("a.txt", b"\n \n\t\n", "only blank lines"),
        ("a.jsonl", b"\n\n", "only blank lines"),
        ("a.csv", b"a,b", ".txt, .jsonl"),
        ("a", b"a", "no extension"),
    ],
)
@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
def test_files_without_records(tmp_path: Path, name: str, content: bytes, what: str, sample_by: str) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(f"{tmp_path}/{name}", sample_by)
    assert what in str(error)
    assert error.where == f"{tmp_path}/{name}"


@pytest.mark.parametrize(
    ("name", "content", "line", "what"),
    [
        ("a.txt", b"good\ncaf\xe9\n", 2, "not UTF-8 text: byte 0xe9 at offset 8"),
        ("a.jsonl", b'{}\n{"a": "\xff"}', 2, "not UTF-8"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2,}\n', 3, "not valid JSON"),
        ("a.jsonl", b'{"a":\n1}', 1, "not valid JSON"),
        ("a.jsonl", b"{}\n[1]", 2, "holds a JSON list, not an object"),
        ("a.jsonl", b"7", 1, "holds a JSON int"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, 1, "cannot be read"),
        ("a.jsonl", b'{}\n{"a": ' + b"1" * 5000 + b"}", 2, "cannot be read"),
        ("a.jsonl", b'{}\n{"a": ["x\\uD83Dy"]}', 2, "half of a surrogate pair (\\ud83d)"),
    ],
)
def test_broken_content_names_the_line(tmp_path: Path, name: str, content: bytes, line: int, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(f"{tmp_path}/{name}")
    assert what in error.what
    assert error.where == f"{tmp_path}/{name}:{line}"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read even by root")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    assert "cannot read" in refused(f"{tmp_path}/a.txt").what


@pytest.fixture(scope="module")
def stdlib() -> dict[str, Records]:
    return {split: open_records("python_stdlib", split, "line") for split in ("train", "validation", "test")}


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
    assert len(open_records(["python_stdlib", poem], "validation", "line")) == len(stdlib["validation"]) + 4


def test_stdlib_split_of_a_file_never_changes(stdlib: dict[str, Records]) -> None:
    validation = {record["path"] for record in stdlib["validation"]}
    assert {"codecs.py", "functools.py", "traceback.py"} <= validation
