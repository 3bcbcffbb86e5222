import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from drawbar.data import columns, encode
from drawbar.data.columns import FolderStorage
from drawbar.data.dataset import EncodedDataset, encode_records, read_samples, write_samples
from drawbar.data.reading import read_list

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


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    dataset = on_disk([{"x": [1, 2, 3]}, {"x": [4]}], tmp_path)
    values = dataset.columns["x"].values
    assert isinstance(values.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 7


def test_samples_without_fields() -> None:
    dataset = encode_records([{}, {}], lambda sample: sample, describe=str)
    assert [dataset[0], dataset[1]] == [{"id": 0, "ids": [0]}, {"id": 1, "ids": [1]}]
