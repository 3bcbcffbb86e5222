"""What is said of a sample that cannot be stored: whose fault it is, in which field of which record."""

from typing import Any

import numpy as np
import pytest
import torch

from drawbar.data.encode import encode_chunk
from drawbar.errors import UserError


def fault_of(sample: Any) -> UserError:
    """The error for a task whose encode gives this sample."""
    chunk = encode_chunk(lambda record: sample, iter([(0, "data.jsonl:7", {"text": "a"})]), False, float("inf"))
    assert chunk.fatal is not None
    return chunk.fatal


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ([[1, 2], [3]], "ValueError"),
        (2**70, "OverflowError"),
        (torch.zeros(2, requires_grad=True), "RuntimeError"),
        (torch.zeros(2, dtype=torch.bfloat16), "TypeError"),
    ],
)
def test_a_field_that_cannot_be_stored_is_named(value: Any, cause: str) -> None:
    fault = fault_of({"input_ids": [1, 2], "extra": value})
    assert f"the field 'extra' of a sample cannot be stored: {cause}" in fault.what
    assert fault.where == "data.jsonl:7"
    assert "encode failed" not in fault.what


def test_a_field_of_texts_is_still_said_to_be_one() -> None:
    assert "the field 'words' of a sample is a list of texts" in fault_of({"words": np.array(["a", "b"])}).what


def test_encode_itself_failed() -> None:
    def encode(record: dict[str, Any]) -> Any:
        return record["txet"]

    chunk = encode_chunk(encode, iter([(0, "data.jsonl:7", {"text": "a"})]), False, float("inf"))
    assert chunk.fatal is not None
    assert "encode failed on a record: KeyError: 'txet'" in chunk.fatal.what
