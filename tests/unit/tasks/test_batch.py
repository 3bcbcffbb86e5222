"""Batches: what a model is given, and how rows of different lengths become tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawbar.errors import UserError
from drawbar.tasks.batch import Batch, pad_and_stack

ROWS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=6)


def sample(number: int, **fields: object) -> dict[str, object]:
    return {"id": number, "ids": [number], **fields}


def test_inputs_are_what_forward_takes() -> None:
    tensors = {name: torch.ones(1) for name in ("input_ids", "labels", "position_ids", "segment_ids", "pixel_values")}
    batch = Batch(tensors, ids=[4])
    assert set(batch.inputs) == {"input_ids", "position_ids", "segment_ids", "pixel_values"}
    assert batch.inputs["input_ids"] is batch["input_ids"]
    assert batch.ids == [4]
    assert batch.packed
    assert not Batch({"input_ids": torch.ones(1)}, ids=[4]).packed


def test_a_batch_moves_as_a_whole() -> None:
    class OwnBatch(Batch):
        pass

    batch = OwnBatch({"a": torch.ones(2), "labels": torch.ones(2)}, ids=[1, 2])
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, OwnBatch)
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert moved.ids == [1, 2]
    assert batch["a"].device.type == "cpu"


@given(rows=ROWS, pad_token=st.integers(0, 99))
def test_padding_is_on_the_right_and_says_so(rows: list[list[int]], pad_token: int) -> None:
    samples = []
    for number, row in enumerate(rows):
        tokens = np.array(row, dtype=np.int32)
        fields = dict.fromkeys(
            ("input_ids", "labels", "segment_ids", "decoder_segment_ids", "token_type_ids", "decoder_input_ids"), tokens
        )
        samples.append(sample(number, **fields, attention_mask=np.ones_like(tokens)))
    batch = pad_and_stack(samples, {"input_ids": pad_token, "decoder_input_ids": pad_token})
    longest = max(map(len, rows))
    filling = {"input_ids": pad_token, "labels": -100, "segment_ids": -1, "token_type_ids": 0, "attention_mask": 0}
    filling |= {"decoder_segment_ids": -1, "decoder_input_ids": pad_token}
    assert set(batch) == set(filling)
    for name, fill in filling.items():
        for found, row in zip(batch[name].tolist(), rows, strict=True):
            content = [1] * len(row) if name == "attention_mask" else row
            assert found == content + [fill] * (longest - len(row))
    assert batch.ids == list(range(len(rows)))


def test_numbers_become_a_column() -> None:
    batch = pad_and_stack([sample(0, labels=1, score=0.5), sample(1, labels=2, score=1.5)])
    assert batch["labels"].tolist() == [1, 2]
    assert batch["score"].dtype == torch.float32
    assert batch["score"].shape == (2,)


def test_rows_of_several_samples_keep_all_ids() -> None:
    """A packed row holds several samples; what was one value a sample is a list in it, and is laid end to end."""
    rows = [{"ids": [4, 7], "input_ids": np.arange(3), "weight": [1.0, 2.0]}]
    rows += [{"ids": [1], "input_ids": np.arange(2), "weight": [3.0]}]
    batch = pad_and_stack(rows)
    assert batch.ids == [4, 7, 1]
    assert batch["weight"].tolist() == [1.0, 2.0, 3.0]
    assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]


def test_arrays_of_samples_are_padded_among_all_samples_of_the_batch() -> None:
    rows = [{"ids": [4, 7], "labels": [np.array([1]), np.array([2, 3])]}, {"ids": [1], "labels": [np.array([4, 5, 6])]}]
    assert pad_and_stack(rows)["labels"].tolist() == [[1, -100, -100], [2, 3, -100], [4, 5, 6]]


@pytest.mark.parametrize("values", [("text", "more"), (np.zeros((2, 3)), np.zeros((2, 4))), (1, np.zeros(2))])
def test_fields_that_cannot_be_stacked_are_refused(values: tuple[object, object]) -> None:
    with pytest.raises(UserError, match="the field 'odd' of the samples cannot become a tensor") as caught:
        pad_and_stack([sample(number, odd=value) for number, value in enumerate(values)])
    assert "define the task's collate" in str(caught.value.remedy)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_small_integers_become_int64(dtype: type) -> None:
    assert pad_and_stack([sample(0, input_ids=np.ones(2, dtype))])["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8])
def test_types_and_images_are_kept(dtype: type) -> None:
    image = np.zeros((3, 4, 4), dtype=dtype)
    batch = pad_and_stack([sample(0, pixels=image), sample(1, pixels=image)])
    assert batch["pixels"].shape == (2, 3, 4, 4)
    assert batch["pixels"].numpy().dtype == dtype
