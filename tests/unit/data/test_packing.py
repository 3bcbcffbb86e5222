import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.packing import LabelPlacement, PackedRows, RowLayout, packed_lengths, plan_rows, split_tokens
from drawbar.errors import UserError
from drawbar.tasks.batch import pad_and_stack
from plans import plan_of

SEEDS = st.integers(0, 2**63 - 1)


def dataset(samples: list[dict[str, Any]]) -> EncodedDataset:
    return encode_records(samples, lambda sample: sample, describe=str)


def join(samples: EncodedDataset, numbers: list[int], targets: LabelPlacement) -> dict[str, Any]:
    """A row, with its arrays as lists."""
    row = RowLayout.of(samples, targets).join([samples[number] for number in numbers])
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def test_a_row_for_the_next_token() -> None:
    samples = dataset(
        [
            {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_weight": [0.0, 1.0, 1.0], "bytes": 11},
            {"input_ids": [8, 9], "labels": [8, 9], "loss_weight": [0.5, 0.5], "bytes": 4},
            {"input_ids": [3], "labels": [3], "loss_weight": [1.0], "bytes": 1},
        ]
    )
    assert join(samples, [2, 0, 1], "next_token") == {
        "ids": [2, 0, 1],
        "input_ids": [3, 5, 6, 7, 8, 9],
        "labels": [-100, -100, 6, 7, -100, 9],
        "loss_weight": [1.0, 0.0, 1.0, 1.0, 0.5, 0.5],
        "bytes": [1, 11, 4],
        "position_ids": [0, 0, 1, 2, 0, 1],
        "segment_ids": [0, 1, 1, 1, 2, 2],
    }
    assert samples[0]["labels"].tolist() == [5, 6, 7]  # the data set itself is left alone


def test_a_row_for_each_token() -> None:
    """The first token of a sample is a target like any other."""
    samples = dataset(
        [
            {"input_ids": [5, 6], "labels": [1, 0], "attention_mask": [1, 1], "token_type_ids": [0, 1]},
            {"input_ids": [7], "labels": [2], "attention_mask": [1], "token_type_ids": [1]},
        ]
    )
    assert join(samples, [0, 1], "token") == {
        "ids": [0, 1],
        "input_ids": [5, 6, 7],
        "labels": [1, 0, 2],
        "token_type_ids": [0, 1, 1],
        "position_ids": [0, 1, 0],
        "segment_ids": [0, 0, 1],
    }


@pytest.mark.parametrize("labels", [[1, 0, 2], [0.5, 1.5, 2.5]])
def test_a_row_for_whole_samples(labels: list[float]) -> None:
    tokens = [[5, 6], [7], [8, 9]]
    pairs = zip(tokens, labels, strict=True)
    samples = dataset([{"input_ids": ids, "labels": label} for ids, label in pairs])
    row = join(samples, [0, 2], "sample")
    assert row["labels"] == [labels[0], labels[2]]
    assert row["input_ids"] == [5, 6, 8, 9]
    assert row["segment_ids"] == [0, 0, 1, 1]


def test_a_row_for_whole_samples_with_arrays_for_labels() -> None:
    """As long as the tokens by chance, or not: they belong to the sample."""
    samples = dataset([{"input_ids": [5, 6], "labels": [1, 0]}, {"input_ids": [7], "labels": [1, 1]}])
    row = RowLayout.of(samples, "sample").join([samples[0], samples[1]])
    assert [labels.tolist() for labels in row["labels"]] == [[1, 0], [1, 1]]
    batch = pad_and_stack([row])
    assert batch["labels"].tolist() == [[1, 0], [1, 1]]


def test_a_row_with_a_decoder() -> None:
    samples = dataset(
        [
            {"input_ids": [5, 6], "labels": [1, 2, 3], "decoder_input_ids": [0, 1, 2], "attention_mask": [1, 1]},
            {"input_ids": [7, 8, 9], "labels": [4], "decoder_input_ids": [0], "attention_mask": [1, 1, 1]},
        ]
    )
    assert join(samples, [1, 0], "decoder") == {
        "ids": [1, 0],
        "input_ids": [7, 8, 9, 5, 6],
        "labels": [4, 1, 2, 3],
        "decoder_input_ids": [0, 0, 1, 2],
        "position_ids": [0, 1, 2, 0, 1],
        "segment_ids": [0, 0, 0, 1, 1],
        "decoder_segment_ids": [0, 1, 1, 1],
    }
    assert packed_lengths(samples, "decoder").tolist() == [3, 3]
    assert packed_lengths(samples, "next_token").tolist() == [2, 3]


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30), seed=SEEDS)
def test_neither_side_of_a_decoders_row_is_too_long(sizes: list[tuple[int, int]], seed: int) -> None:
    samples = dataset(
        [
            {"input_ids": [1] * tokens, "labels": [2] * targets, "decoder_input_ids": [3] * targets}
            for tokens, targets in sizes
        ]
    )
    rows = PackedRows(samples, plan_rows(packed_lengths(samples, "decoder"), 12, seed), "decoder")
    for index in range(len(rows)):
        row = rows.join(rows.read(index))
        assert max(len(row["input_ids"]), len(row["labels"])) <= 12
        assert len(row["decoder_segment_ids"]) == len(row["decoder_input_ids"]) == len(row["labels"])


def test_the_fields_of_samples_come_in_the_order_of_the_ids() -> None:
    samples = dataset([{"input_ids": [1] * (number + 1), "labels": number, "score": number / 2} for number in range(6)])
    rows = PackedRows(samples, plan_of([[0, 3], [1, 4], [2], [5]]), "sample")
    batch = pad_and_stack([rows.join(rows.read(index)) for index in (1, 3, 0, 2)])
    assert batch.ids == [1, 4, 5, 0, 3, 2]
    assert batch["labels"].tolist() == batch.ids
    assert batch["score"].tolist() == [number / 2 for number in batch.ids]
    assert batch["segment_ids"].tolist()[0] == [0, 0, 1, 1, 1, 1, 1]
    assert batch["segment_ids"].tolist()[3] == [0, 0, 0, -1, -1, -1, -1]


def test_each_sample_of_a_row_is_varied_by_itself() -> None:
    rows = PackedRows(dataset([{"input_ids": [1, 2]}, {"input_ids": [3]}]), plan_of([[0, 1]]), "next_token")
    row = rows.join(
        [{**sample, "input_ids": np.append(sample["input_ids"], 10 * sample["id"])} for sample in rows.read(0)]
    )
    assert row["input_ids"].tolist() == [1, 2, 0, 3, 10]
    assert row["segment_ids"].tolist() == [0, 0, 0, 1, 1]


def test_a_field_that_the_layout_does_not_know_is_refused() -> None:
    """Labels that ``augment`` adds would be lost in silence."""
    rows = PackedRows(dataset([{"input_ids": [1, 2]}]), plan_of([[0]]), "token")
    with pytest.raises(UserError, match="the task's augment adds labels, which its encode does not give"):
        rows.join([{**sample, "labels": sample["input_ids"]} for sample in rows.read(0)])


def test_positions_of_the_task_are_kept() -> None:
    samples = dataset([{"input_ids": [1, 2], "position_ids": [2, 3]}, {"input_ids": [3], "position_ids": [2]}])
    assert join(samples, [0, 1], "token")["position_ids"] == [2, 3, 2]


@given(documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=30), seed=SEEDS)
def test_packing_keeps_every_token_and_every_target(documents: list[list[int]], seed: int) -> None:
    base = dataset([{"input_ids": tokens, "labels": tokens} for tokens in documents])
    packed = PackedRows(base, plan_rows(base.lengths, 24, seed), "next_token")
    found: dict[int, list[int]] = {}
    targets = 0
    for index in range(len(packed)):
        row = packed.join(packed.read(index))
        assert len(row["input_ids"]) == packed.lengths[index]
        targets += int((row["labels"][1:] != -100).sum())
        for segment, sample in enumerate(row["ids"]):
            mine = row["segment_ids"] == segment
            found[sample] = row["input_ids"][mine].tolist()
            assert row["position_ids"][mine].tolist() == list(range(len(found[sample])))
    assert [found[sample] for sample in range(len(documents))] == documents
    assert targets == sum(len(tokens) - 1 for tokens in documents)


def test_packed_fingerprint_sees_base_and_plan() -> None:
    base = dataset([{"input_ids": [token]} for token in (1, 2, 3)])
    other = dataset([{"input_ids": [token]} for token in (1, 2, 4)])
    plans = [plan_of(rows) for rows in ([[0, 1], [2]], [[0], [1, 2]], [[0], [1], [2]], [[2], [0, 1]])]
    found = {PackedRows(base, plan, "next_token").fingerprint for plan in plans}
    found.add(PackedRows(other, plans[0], "next_token").fingerprint)
    assert len(found | {base.fingerprint}) == 6
    assert PackedRows(base, plans[0], "next_token").fingerprint in found


@pytest.mark.parametrize(
    ("samples", "targets", "what"),
    [
        ([{"pixels": [1, 2]}], "sample", "no input_ids"),
        ([{"input_ids": [1, 2], "labels": 1}], "next_token", "not one for each token"),
        ([{"input_ids": [1], "labels": 1}], "token", "not one for each token"),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}],
            "next_token",
            "sample 1 has 1 values of 'labels' for 2 tokens",
        ),
        ([{"input_ids": [1, 2], "labels": 1, "boxes": [1, 2, 3]}], "sample", "sample 0 has 3 values of 'boxes'"),
        (
            [{"input_ids": [1, 2], "labels": [1], "decoder_input_ids": [0, 1]}],
            "decoder",
            "sample 0 has 2 values of 'decoder_input_ids' for 1 labels",
        ),
        ([{"input_ids": [1, 2]}], "decoder", "no sequence of labels"),
        ([{"input_ids": [1, 2], "labels": 1}], "decoder", "no sequence of labels"),
    ],
)
def test_samples_that_cannot_be_packed(samples: list[dict[str, Any]], targets: LabelPlacement, what: str) -> None:
    base = dataset(samples)
    with pytest.raises(UserError, match=what) as caught:
        PackedRows(base, plan_of([index] for index in range(len(base))), targets)
    assert caught.value.where == "data.batching"
    assert caught.value.remedy == "set data.batching=grouped, or padded"


@given(tokens=st.lists(st.integers(0, 99), max_size=60), length=st.integers(2, 20))
def test_split_makes_every_token_but_the_first_a_target_once(tokens: list[int], length: int) -> None:
    windows = split_tokens(np.arange(len(tokens)), length)
    targets = [place for window in windows for place in window[1:].tolist()]
    assert targets == list(range(1, len(tokens)))
    assert all(2 <= len(window) <= length for window in windows)
    assert all(window[0] == before[-1] for before, window in itertools.pairwise(windows))
