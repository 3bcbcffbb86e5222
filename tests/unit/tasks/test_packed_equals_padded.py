"""Packing changes the shape of a batch, and nothing else: no document sees another."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from drawbar.data.dataset import encode_records
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.models.packed import allow_packing
from drawbar.tasks.batch import Batch
from plans import plan_of
from tiny import LENGTH, VOCABULARY, Numbers, tiny_config, tiny_task

FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])
TIED = pytest.mark.parametrize("tied", [False, True])


def parts(family: str, tied: bool = False) -> tuple[Numbers, torch.nn.Module]:
    torch.manual_seed(0)
    task = tiny_task(tiny_config(family, {"tie_word_embeddings": tied}))
    model = task.build_model()
    allow_packing(model, per_sample=False)
    return task, model


def loss_and_gradients(task: Numbers, model: torch.nn.Module, batch: Batch) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = task.loss(task.forward(model, batch), batch)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@FAMILIES
@TIED
def test_loss_and_gradients_are_those_of_padded_rows(family: str, tied: bool) -> None:
    """In fp32, without dropout. Sums of 200 terms in another order differ by 1e-6."""
    task, model = parts(family, tied)
    chance = np.random.default_rng(1)
    records = [
        {"tokens": chance.integers(VOCABULARY, size=length), "context": context}
        for length, context in [(30, 0), (2, 0), (17, 5), (9, 9), (1, 0), (25, 0), (3, 1), (40, 39)]
    ]
    samples = encode_records(records, lambda record: task.encode(record, True), describe=str)
    plan = plan_rows(samples.lengths, LENGTH, seed=0)
    packed = PackedRows(samples, plan, "next_token")
    assert 1 < len(packed) < len(samples) - 2
    padded_batch = task.collate([samples[number] for number in range(len(samples))])
    packed_batch = task.collate([packed.join(packed.read(number)) for number in range(len(packed))])
    assert task.num_targets(packed_batch) == task.num_targets(padded_batch) == 29 + 1 + 12 + 0 + 0 + 24 + 2 + 1

    padded_loss, padded_gradients = loss_and_gradients(task, model, padded_batch)
    packed_loss, packed_gradients = loss_and_gradients(task, model, packed_batch)
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)
    assert (packed_gradients - padded_gradients).norm() <= 1e-5 * padded_gradients.norm()


def packed_row(task: Numbers, documents: list[list[int]]) -> Batch:
    records = [{"tokens": tokens, "context": 0} for tokens in documents]
    samples = encode_records(records, lambda record: task.encode(record, True), describe=str)
    rows = PackedRows(samples, plan_of([range(len(samples))]), "next_token")
    row = rows.join(rows.read(0))
    return task.collate([row])


def document_losses(task: Numbers, model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The loss of each document of a packed row."""
    logits: Any = task.forward(model, batch).logits
    labels, segments = batch["labels"][0, 1:], batch["segment_ids"][0, 1:]
    losses = functional.cross_entropy(logits[0, :-1], labels, ignore_index=-100, reduction="none")
    return [losses[segments == segment].sum() for segment in range(int(segments.max()) + 1)]


@FAMILIES
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_document_does_not_see_the_others(family: str, changed: int) -> None:
    task, model = parts(family)
    documents = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
    before = document_losses(task, model, packed_row(task, documents))
    documents[changed] = [token + 100 for token in documents[changed]]
    after = document_losses(task, model, packed_row(task, documents))
    for number in range(3):
        if number == changed:
            assert abs(after[number] - before[number]) > 0.01
        else:
            assert after[number].item() == pytest.approx(before[number].item(), rel=1e-6)


@FAMILIES
@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_the_gradient_of_a_document_stays_in_it(family: str, chosen: int) -> None:
    """Its loss does not depend on the embedding of any token that only the others hold."""
    task, model = parts(family)
    documents = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
    document_losses(task, model, packed_row(task, documents))[chosen].backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    moved = {int(row) for row in gradient.abs().sum(dim=1).nonzero()}
    assert moved == set(documents[chosen][:-1])  # the last token is a target, and no input of one
