import os
import subprocess
import sys
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.errors import UserError

DOCUMENTS = st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=9), min_size=1, max_size=9)


def encoded(records: list[Any], encode: Any = lambda record: record, **options: Any) -> EncodedDataset:
    return encode_records(records, encode, describe=lambda i: f"file:{i + 1}", **options)


def refused(records: list[Any], encode: Any = lambda record: record) -> UserError:
    with pytest.raises(UserError) as caught:
        encoded(records, encode)
    return caught.value


def ids(*documents: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": document} for document in documents]


def test_one_none_or_several_samples_from_a_record() -> None:
    def encode(record: dict[str, Any]) -> Any:
        return {0: None, 1: {"input_ids": [7]}}.get(record["n"], [{"input_ids": [7, 8]}] * record["n"])

    dataset = encoded([{"n": n} for n in (0, 1, 3, 0)], encode)
    assert len(dataset) == 4
    assert dataset.record_of.tolist() == [1, 2, 2, 2]
    assert dataset.lengths.tolist() == [1, 2, 2, 2]
    assert dataset.dropped == 2
    assert [dataset[i]["id"] for i in range(4)] == [0, 1, 2, 3]
    assert [dataset[i]["ids"] for i in range(4)] == [[0], [1], [2], [3]]


def test_an_empty_list_is_a_dropped_record() -> None:
    assert encoded([{"a": 1}, {"a": 2}], lambda record: [] if record["a"] == 1 else record).dropped == 1


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], np.int32),
        ([1, 2**40], np.int64),
        ([0.5], np.float32),
        ([True], np.bool_),
        (np.array([1, 2]), np.int64),
        (torch.tensor([1, 2]), np.int64),
        (torch.tensor([0.5]), np.float32),
        ([[1, 2], [3, 4]], np.int32),
    ],
)
def test_arrays(value: Any, dtype: type) -> None:
    field = encoded([{"x": value}])[0]["x"]
    assert isinstance(field, np.ndarray)
    assert field.dtype == dtype
    assert field.tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize("value", [3, 0.25, True, "text", np.int64(3), np.array(4), torch.tensor(5)])
def test_scalars(value: Any) -> None:
    field = encoded([{"label": value}])[0]["label"]
    assert type(field) in (int, float, bool, str)
    assert field == value


def test_any_mapping_is_a_sample() -> None:
    assert encoded([{}], lambda record: UserDict(input_ids=[1, 2])).lengths.tolist() == [2]


def test_progress_reaches_the_end() -> None:
    calls: list[tuple[int, int]] = []
    encoded([{"a": 1}] * 1000, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (1000, 1000)
    assert len(calls) > 2
    assert calls == sorted(calls)


@given(documents=DOCUMENTS)
def test_fingerprint_is_a_function_of_the_samples(documents: list[list[int]]) -> None:
    assert encoded(ids(*documents)).fingerprint == encoded(ids(*documents)).fingerprint


@given(documents=DOCUMENTS, data=st.data())
def test_fingerprint_changes_with_any_token(documents: list[list[int]], data: st.DataObject) -> None:
    before = encoded(ids(*documents)).fingerprint
    document = data.draw(st.integers(0, len(documents) - 1))
    token = data.draw(st.integers(0, len(documents[document]) - 1))
    documents[document][token] += 1
    assert encoded(ids(*documents)).fingerprint != before


def test_fingerprint_sees_order_borders_names_and_types() -> None:
    variants: list[list[dict[str, Any]]] = [
        ids([1, 2], [3]),
        ids([3], [1, 2]),
        ids([1], [2, 3]),
        ids([1, 2, 3]),
        [{"labels": [1, 2]}, {"labels": [3]}],
        [{"input_ids": np.array([1, 2])}, {"input_ids": np.array([3])}],
        [{"input_ids": [1, 2], "bytes": 4}, {"input_ids": [3], "bytes": 5}],
        [{"input_ids": [1, 2], "bytes": 5}, {"input_ids": [3], "bytes": 4}],
        [{"input_ids": [1, 2], "bytes": "4"}, {"input_ids": [3], "bytes": "5"}],
        [{"input_ids": [1, 2], "bytes": "45"}, {"input_ids": [3], "bytes": ""}],
        [{"input_ids": [1, 2], "bytes": 4.0}, {"input_ids": [3], "bytes": 5.0}],
        [{"a": 1, "b": 2}],
        [{"a": 2, "b": 1}],
        [{"a": 1}],
        [{"a": True}],
        [{"x": np.array([1, 0], dtype=np.int32)}],
        [{"x": np.array([1], dtype=np.int64)}],
        [{"x": np.array([[1, 0]], dtype=np.int32)}],
        [{"x": np.array([[1], [0]], dtype=np.int32)}],
    ]
    assert len({encoded(samples).fingerprint for samples in variants}) == len(variants)
    assert encoded([{"a": 1, "b": 2}]).fingerprint == encoded([{"b": 2, "a": 1}]).fingerprint


def test_fingerprint_is_the_same_in_another_process() -> None:
    program = (
        "from drawbar.data.dataset import encode_records\n"
        "records = [{'input_ids': [1, 2], 'labels': [1, 2], 'bytes': 7, 'name': 'é', 'x': 0.1}]\n"
        "print(encode_records(records, lambda r: r, describe=str).fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_failing_encode_names_the_record() -> None:
    error = refused([{"text": "a"}, {"txt": "b"}], lambda record: {"n": len(record["text"])})
    assert "KeyError: 'text'" in error.what
    assert error.where == "file:2"
    assert isinstance(error.__cause__, KeyError)


def test_a_user_error_of_encode_is_kept() -> None:
    def encode(record: dict[str, Any]) -> None:
        raise UserError("no such column", remedy="set task.text_column")

    error = refused([{}], encode)
    assert (error.what, error.where, error.remedy) == ("no such column", "file:1", "set task.text_column")


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (7, "encode returned int"),
        ("text", "encode returned str"),
        ((1, 2), "encode returned tuple"),
        ([{"a": 1}, [2]], "encode returned list"),
        ({"id": 4}, "'id'"),
        ({"input_ids": [1], "segment_ids": [0]}, "'segment_ids'"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"input_ids": 3}, "input_ids"),
        ({"a": None}, "'a'"),
        ({"a": {"b": 1}}, "'a'"),
        ({"a": ["b", "c"]}, "'a' of a sample is a list of texts"),
        ({"a": 2**70}, "OverflowError"),
        ({"a": 1, "truncated": [1]}, "'truncated'"),
        ({"a": "1"}, "'a' of a sample is a text; in the samples before it, it is a number"),
        ({"a": [1]}, "an array of 1 dims"),
        ({"b": 1}, "no field 'a'"),
        ({"a": 1, "b": 1}, "has a field 'b'"),
        ([{"a": 1}, {}], "no field 'a'"),
        ({"a": [[1], [2, 3]]}, "inhomogeneous"),
    ],
)
def test_wrong_results_of_encode(result: Any, what: str) -> None:
    error = refused([{"a": 1}, {"a": 2}], lambda record: result if record["a"] == 2 else record)
    assert what in error.what
    assert error.where == "file:2"
    assert error.remedy


def test_samples_of_other_fields_in_a_later_chunk() -> None:
    error = refused([{"a": 1}] * 256 + [{"b": 1}])
    assert error.where == "file:257"
    assert "'a'" in error.what
    error = refused([{"a": [1]}] * 256 + [{"a": [[1]]}])
    assert error.where == "file:257"
    assert "2 dims" in error.what


def test_bad_records_are_skipped_and_counted() -> None:
    def encode(record: dict[str, Any]) -> Any:
        if record["n"] == 1:
            raise UserError("label out of range", where="labels.txt:7")
        return {"x": 6 // (record["n"] - 2)}

    dataset = encoded([{"n": n} for n in (0, 1, 2, 3)] + [{}], encode, on_bad_record="skip")
    assert dataset.record_of.tolist() == [0, 3]
    assert dataset.skipped_count == 3
    assert dataset.dropped == 0
    expected = [
        "labels.txt:7: label out of range",
        "file:3: the task's encode failed on a record: ZeroDivisionError: integer division or modulo by zero",
        "file:5: the task's encode failed on a record: KeyError: 'n'",
    ]
    for found, begin in zip(dataset.skipped, expected, strict=True):
        assert found.startswith(begin)
    assert f"({__file__}:" in dataset.skipped[1]  # the line of the user's code


def test_only_the_first_messages_of_skipped_records_are_kept() -> None:
    dataset = encoded([{"n": n} for n in range(2500)], lambda record: {"x": 1 // (1 - min(record["n"], 1))},
                      on_bad_record="skip")  # fmt: skip
    assert len(dataset) == 1
    assert dataset.skipped_count == 2499
    assert len(dataset.skipped) == 1000
    assert dataset.skipped[-1].startswith("file:1001:")


def test_all_records_skipped() -> None:
    with pytest.raises(UserError, match=r"dropped all 2 records; the first: file:1: .*KeyError: 'n'"):
        encoded([{}, {}], lambda record: record["n"], on_bad_record="skip")


def test_truncated_samples_are_counted_and_not_stored() -> None:
    dataset = encoded([{"a": 1, "truncated": 1}, {"a": 1, "truncated": False}, {"a": 1}, {"a": 1, "truncated": True}])
    assert dataset.truncated == 2
    assert dataset.fields == {"a": "scalar"}


def test_fields_and_their_lengths() -> None:
    dataset = encoded([{"x": [[1, 2]] * n, "y": "text", "z": 0.5} for n in (3, 0, 1)], lambda record: {
        **record, "x": np.zeros((len(record["x"]), 2))})  # fmt: skip
    assert dataset.fields == {"x": "array", "y": "scalar", "z": "scalar"}
    assert dataset.field_lengths("x").tolist() == [3, 0, 1]
    assert dataset.field_lengths("y").tolist() == [1, 1, 1]
    assert dataset.lengths.tolist() == [1, 1, 1]


def test_fields_of_several_dtypes_are_promoted() -> None:
    dataset = encoded([{"x": [], "y": 1}, {"x": [1], "y": 2}, {"x": [2**40], "y": 0.5}])
    assert [dataset[i]["x"].dtype for i in range(3)] == [np.int64] * 3
    assert [dataset[i]["y"] for i in range(3)] == [1.0, 2.0, 0.5]
    assert type(dataset[0]["y"]) is float


def test_what_an_item_holds_may_be_changed() -> None:
    dataset = encoded([{"x": [1, 2]}])
    dataset[0]["x"][:] = 7
    assert dataset[0]["x"].tolist() == [1, 2]


def test_iteration_ends() -> None:
    assert [sample["a"] for sample in encoded([{"a": 1}, {"a": 2}])] == [1, 2]  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        encoded([{"a": 1}])[-1]


def test_no_samples_at_all() -> None:
    assert "dropped all 2 records" in refused([{}, {}], lambda record: None).what
    assert "all 0 records" in refused([]).what
