import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from drawbar.data import columns, encode
from drawbar.data.columns import FileValues, FolderStorage
from drawbar.data.dataset import EncodedDataset, encode_records, read_samples, write_samples
from drawbar.data.loader import SampleRows
from drawbar.data.packing import PackedRows, cached_plan_of_sources, plan_rows
from drawbar.data.sources import read_list

INTEGERS = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.one_of(st.booleans(), INTEGERS, st.floats(allow_nan=False, width=32))
TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)  # half characters of a surrogate pair, too
DTYPES = st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", ">i4"])


def array_fields(dims: int) -> st.SearchStrategy[Any]:
    shapes = arrays.array_shapes(min_dims=dims, max_dims=dims, min_side=0, max_side=3)
    numbers = {"min_value": -(2**31), "max_value": 2**31 - 1}

    def values(dtype: str) -> st.SearchStrategy[Any]:
        kind = np.dtype(dtype)
        elements = arrays.from_dtype(kind, allow_nan=False, **(numbers if dtype == "int64" else {}))
        return arrays.arrays(kind, shapes, elements=elements)

    return DTYPES.flatmap(values)


FIELD_KINDS: list[st.SearchStrategy[Any]] = [NUMBERS, TEXTS, array_fields(1), array_fields(3), st.lists(INTEGERS)]


@st.composite
def sample_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = draw(st.dictionaries(st.text(max_size=3).map("f".__add__), st.sampled_from(FIELD_KINDS), max_size=4))
    return draw(st.lists(st.fixed_dictionaries(dict(kinds)), min_size=1, max_size=7))


def on_disk(samples: list[dict[str, Any]], folder: Path) -> EncodedDataset:
    storage = FolderStorage(folder)
    about = write_samples(
        storage, read_list(samples, str), lambda sample: sample, progress=None, on_bad_record="error", workers=0
    )
    storage.close()
    return read_samples(FolderStorage(folder), about)


def check_equal(dataset: EncodedDataset, samples: list[dict[str, Any]]) -> None:
    assert len(dataset) == len(samples)
    for index, sample in enumerate(samples):
        item = dataset[index]
        assert (item.pop("id"), item.pop("ids")) == (index, [index])
        assert list(item) == list(dataset.fields)
        assert item.keys() == sample.keys()
        for name, value in sample.items():
            assert dataset.field_lengths(name)[index] == (len(value) if isinstance(value, np.ndarray | list) else 1)
            if isinstance(value, np.ndarray | list):
                assert item[name].dtype == dataset[0][name].dtype
                np.testing.assert_array_equal(item[name], value)
                assert item[name].shape == np.shape(value)
            else:
                assert type(item[name]) in (bool, int, float, str)
                assert item[name] == value


@given(samples=sample_lists(), chunk=st.integers(1, 4), block=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_what_comes_out_is_what_went_in(samples: list[dict[str, Any]], chunk: int, block: int) -> None:
    one_chunk = encode_records(samples, lambda sample: sample, describe=str)
    check_equal(one_chunk, samples)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_RECORDS", chunk)
        patch.setattr(columns, "BLOCK_VALUES", block)
        mapped = on_disk(samples, Path(folder))
        check_equal(mapped, samples)
        assert mapped.fingerprint == one_chunk.fingerprint
        assert mapped.fields == one_chunk.fields


def test_the_common_dtype_depends_on_no_order() -> None:
    values = [np.array([1], dtype) for dtype in ("int16", "uint16", "float32")]
    found = {
        encode_records([{"x": values[i]} for i in order], lambda sample: sample, describe=str)[0]["x"].dtype
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))
    }
    assert len(found) == 1


def size(folder: Path, column: int) -> int:
    """Bytes of the values of a column."""
    return sum(path.stat().st_size for path in folder.glob(f"{column:02d}*values.bin"))


TOKENS = np.arange(60_000, dtype=np.int32)
COMPLETION = np.where(np.arange(60_000) < 50_000, -100, TOKENS)


@pytest.mark.parametrize(
    ("labels", "most"),
    [
        (TOKENS, 0),
        (COMPLETION, 50_000 + 8),  # a byte for each ignored label, and where they are
        (TOKENS[::-1], 60_000 * 2 + 8),
    ],
)
def test_labels_are_stored_where_they_differ_from_the_tokens(tmp_path: Path, labels: np.ndarray, most: int) -> None:
    dataset = on_disk([{"input_ids": TOKENS, "labels": labels}], tmp_path)
    assert size(tmp_path, 0) == 60_000 * 2
    assert size(tmp_path, 1) <= most
    assert dataset[0]["input_ids"].dtype == dataset[0]["labels"].dtype == np.int32
    np.testing.assert_array_equal(dataset[0]["input_ids"], TOKENS)
    np.testing.assert_array_equal(dataset[0]["labels"], labels)


def test_a_large_number_makes_room_for_all(tmp_path: Path) -> None:
    samples = [{"input_ids": [number] * 300} for number in (7, 70_000, 8, -1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_RECORDS", 1)
        dataset = on_disk(samples, tmp_path)
    assert size(tmp_path, 0) == 4 * 300 * 4
    check_equal(dataset, samples)


@st.composite
def labelled_samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Tokens, and labels that are a few of them, or are of other lengths and kinds."""
    samples = []
    for tokens in draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=7)):
        alike = [draw(st.sampled_from([token, token, -100, 70_000])) for token in tokens]
        other = draw(st.lists(st.integers(0, 3), max_size=6))
        samples.append({"input_ids": tokens, "labels": draw(st.sampled_from([alike, alike, alike, other]))})
    if draw(st.integers(0, 4)) == 0:
        samples[-1]["labels"] = [float(label) for label in samples[-1]["labels"]]
    return samples


@pytest.mark.exhaustive
@given(samples=labelled_samples(), chunk=st.integers(1, 4), block=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_labels_of_any_kind_come_back(samples: list[dict[str, Any]], chunk: int, block: int) -> None:
    # under another name, every value is stored
    plain = encode_records([{"labels": sample["labels"]} for sample in samples], lambda sample: sample, describe=str)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_RECORDS", chunk)
        patch.setattr(columns, "BLOCK_VALUES", block)
        dataset = on_disk(samples, Path(folder))
        check_equal(dataset, samples)
        found = np.concatenate([*dataset.columns["labels"].blocks(), np.empty(0, dataset.columns["labels"].dtype)])
        np.testing.assert_array_equal(found, np.concatenate([plain[i]["labels"] for i in range(len(plain))]))
        assert dataset.columns["labels"].dtype == plain.columns["labels"].dtype


def test_labels_are_not_taken_for_numbers_that_round_to_them() -> None:
    sample = {"input_ids": np.array([2.0**53]), "labels": np.array([2**53 + 1])}
    dataset = encode_records([sample], lambda sample: sample, describe=str)
    assert dataset[0]["labels"].tolist() == [2**53 + 1]


def test_the_fingerprint_does_not_depend_on_how_samples_are_stored() -> None:
    """It is what checkpoints say."""
    samples = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "x": 2, "name": "a", "picture": np.ones((2, 2), np.uint8)},
        {"input_ids": [300], "labels": [300], "x": 1.5, "name": "b", "picture": np.ones((1, 2), np.uint8)},
    ]
    assert (
        encode_records(samples, lambda sample: sample, describe=str).fingerprint == "ea4c516ad70208d89530e5c7db9251d2"
    )


def test_values_stay_in_their_file(tmp_path: Path) -> None:
    """Nor are they mapped: what is mapped and looked at is memory of the process."""
    dataset = on_disk([{"x": [1, 2, 3]}, {"x": [4]}], tmp_path)
    assert isinstance(dataset.columns["x"].values, FileValues)
    dataset[0]["x"][:] = 7
    assert dataset[0]["x"].tolist() == [1, 2, 3]


def test_samples_without_fields() -> None:
    dataset = encode_records([{}, {}], lambda sample: sample, describe=str)
    assert [dataset[0], dataset[1]] == [{"id": 0, "ids": [0]}, {"id": 1, "ids": [1]}]


def test_files_are_read_by_slices_and_by_indices_as_arrays_are(tmp_path: Path) -> None:
    expected = np.arange(24, dtype=np.int64).reshape(8, 3)
    storage = FolderStorage(tmp_path)
    storage.append("x", expected.tobytes())
    found = storage.values("x", expected.dtype, 3)
    assert found.shape == expected.shape
    for part in (slice(2, 5), slice(6, 20), slice(3, 3), slice(None), np.array([7, 0, 0, 2]), np.array([], dtype=int)):
        assert np.array_equal(found[part], expected[part])


def test_what_grows_with_the_samples_stays_in_the_files(tmp_path: Path) -> None:
    """The process that trains holds none of it: neither of the samples nor of the plan of their rows."""
    records = [{"input_ids": [1] * (1 + number % 5), "labels": [1] * (1 + number % 5)} for number in range(50)]
    reading = read_list(records, str)
    storage = FolderStorage(tmp_path)
    about = write_samples(storage, reading, lambda record: record, progress=None, on_bad_record="error", workers=0)
    samples = read_samples(storage, about)
    assert samples.tokens == sum(len(record["input_ids"]) for record in records)
    for column in samples.columns.values():
        assert {type(part) for part in (column.values, column.shapes, column.ends)} == {FileValues}
    assert not isinstance(SampleRows(samples).lengths, np.ndarray)
    options = {"of_samples": samples.fingerprint, "placement": "next_token", "cache": tmp_path / "cache", "timeout": 60}
    plan, _ = cached_plan_of_sources(lambda: samples.lengths, [50], 8, 0, **options)
    rows, plain = (PackedRows(samples, one, "next_token") for one in (plan, plan_rows(samples.lengths, 8, 0)))
    assert {type(part) for part in (plan.samples, plan.ends, rows.lengths)} == {FileValues}
    assert rows.lengths[:].tolist() == plain.lengths[:].tolist()
    assert rows.fingerprint == plain.fingerprint
