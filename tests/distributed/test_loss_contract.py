"""Acceptance: micro-batch size, accumulation, padding, packing and world size do not change the update.

The reference is a bare loop over single documents: no padding, no packing, no engine. It is fp32 too, so the two
differ by the order in which a few hundred numbers are added: about 1e-6 of the sum. The tolerance of 1e-5 leaves room
for that, while the smallest mistake in the contract, one target too many of a few hundred, is 500 times larger.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from drawbar.config.schema.run_config import DataSection, OptimSection, RunConfig, TrainSection
from drawbar.data.dataset import Sample, encode_records
from drawbar.data.loader import MicroBatch, MicroBatchSize, Rows, SampleRows, TrainLoader
from drawbar.data.packing import IGNORED_LABEL, PackedRows, plan_rows
from drawbar.data.prefetch import BatchMaker, Prefetcher
from drawbar.data.sampler import InOrder
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.tasks.batch import Batch
from exhaustive import params
from harness import run_ranks
from plans import plan_of, rows_of
from tiny import CPU, LENGTH, VOCABULARY, Numbers, tiny_config, tiny_task, unchecked_engine, vector

TOLERANCE = 1e-5
STEPS = 2


@dataclass(frozen=True)
class Document:
    """A document of random tokens; the first ``context`` of them are no targets, and the first token never is."""

    length: int
    context: int = 0

    @property
    def targets(self) -> int:
        return max(0, self.length - max(1, self.context))


@dataclass(frozen=True)
class Case:
    """A training of ``STEPS`` steps over these documents, in their order."""

    documents: tuple[Document, ...]
    global_batch: int = 4
    micro_batch: int = 2
    tokens: int | None = None
    """Most tokens of a micro-batch, padding included."""
    packed: bool = False
    padding: int = 0
    """Columns of padding that no row needs."""
    backwards: bool = False
    """Whether the rows of a micro-batch are collated in reverse order."""
    family: str = "llama"
    tied: bool = False
    optimizer: str = "sgd"
    clip: float | None = None
    seed: int = 0

    @property
    def config(self) -> RunConfig:
        # With a small eps AdamW's first update is the sign of the gradient, and magnifies rounding without bound.
        options: dict[str, Any] = {"momentum": 0.9, "lr": 0.5} if self.optimizer == "sgd" else {"eps": 0.01, "lr": 0.05}
        positions = {"n_positions": LENGTH + 7} if self.family == "gpt2" else {}  # for columns of padding, too
        return tiny_config(
            self.family,
            {"tie_word_embeddings": self.tied, **positions},
            data=DataSection(sequence_length=LENGTH, batching="packed" if self.packed else "padded"),
            optim=OptimSection(name=self.optimizer, schedule="constant", weight_decay=0.1, **options),
            train=TrainSection(global_batch=self.global_batch, steps=STEPS, gradient_clip=self.clip),
        )

    @property
    def records(self) -> list[dict[str, Any]]:
        chance = np.random.default_rng(self.seed)
        return [
            {"tokens": chance.integers(VOCABULARY, size=document.length), "context": document.context}
            for document in self.documents
        ]

    @property
    def rows(self) -> list[list[int]]:
        """The documents of each row."""
        lengths = np.array([document.length for document in self.documents])
        capacity = int(lengths.max()) + 8
        return rows_of(plan_rows(lengths, capacity, self.seed)) if self.packed else [[i] for i in range(len(lengths))]


@dataclass(frozen=True)
class Update:
    """What ``STEPS`` steps reported, and what they did to the weights."""

    losses: list[float]
    norms: list[float]
    before: NDArray[np.float32]
    after: NDArray[np.float32]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    document = st.one_of(
        st.builds(Document, length=st.integers(2, 8)),
        st.builds(Document, length=st.integers(30, 40)),
        st.builds(Document, length=st.integers(2, 12), context=st.integers(0, 12)),
    )
    return Case(
        documents=tuple(draw(st.lists(document, min_size=1, max_size=11))),
        global_batch=draw(st.integers(1, 8)),
        micro_batch=draw(st.integers(1, 4)),
        tokens=draw(st.sampled_from([None, None, 16, 50])),
        packed=draw(st.booleans()),
        padding=draw(st.sampled_from([0, 0, 1, 7])),
        backwards=draw(st.booleans()),
        family=draw(st.sampled_from(["llama", "gpt2"])),
        tied=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        clip=draw(st.sampled_from([None, 0.1, 1e6])),
        seed=draw(st.integers(0, 2**32)),
    )


FOUR = (Document(5), Document(12), Document(3), Document(9))
HARD_CASES = (
    Case(FOUR, micro_batch=1),
    Case(FOUR, micro_batch=1, clip=0.1),
    Case(FOUR, clip=0.1, optimizer="adamw", tied=True),
    Case(FOUR, clip=1e6, padding=7, backwards=True, family="gpt2", tied=True),
    Case((*FOUR, *FOUR), packed=True, micro_batch=1, tied=True),
    Case(FOUR[:1]),  # fewer rows than ranks: the others run a padding micro-batch
    Case((*FOUR, Document(7)), global_batch=8, micro_batch=1),  # five rows for two or three ranks
    Case((*FOUR, Document(7)), global_batch=4),  # the epoch ends with a global batch of one row
    Case((Document(8, context=8), Document(6, context=6), *FOUR[:2])),  # the first rank's rows have no targets
    Case((*FOUR[:2], Document(8, context=8), Document(6, context=6)), clip=0.1),  # nor the last rank's
    Case((Document(40), Document(2), Document(2), Document(2)), micro_batch=1),  # 39 targets against 1 + 1 + 1
    Case((Document(40), Document(40), *FOUR), global_batch=6, micro_batch=6, tokens=40),  # two forwards, or one
    Case((Document(3, context=3), Document(2, context=1), Document(40, context=39)), micro_batch=1),  # two targets
)


@settings(max_examples=40, deadline=None)
@given(case=cases())
@example(case=HARD_CASES[0])
@example(case=HARD_CASES[2])
@example(case=HARD_CASES[4])
def test_one_process(case: Case) -> None:
    with Distributed(RankInfo(), CPU, timeout=60) as world:
        check(case, train(case, world))


@pytest.mark.parametrize("processes", params([2, 3], often=[3]))
def test_several_processes(processes: int) -> None:
    """Many cases in one group of processes, which costs more to start than all of them to run."""
    chosen = [*HARD_CASES, *drawn(25)]
    of_ranks = run_ranks(train_all, processes, chosen)
    # the smallest failing case is the one to look at, so that one is shown
    for case, *updates in sorted(zip(chosen, *of_ranks, strict=True), key=lambda item: len(item[0].documents)):
        for update in updates:
            check(case, update)
            np.testing.assert_array_equal(update.after, updates[0].after)


def drawn(count: int) -> list[Case]:
    """Random cases, others in every run of the tests."""
    found: list[Case] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def train_all(chosen: list[Case]) -> list[Update]:
    """On one rank of several."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        return [train(case, world) for case in chosen]


def train(case: Case, world: Distributed) -> Update:
    """The engine's update, by the loader and the collate of a real run."""
    torch.manual_seed(case.seed)
    engine = unchecked_engine(tiny_task(case.config), case.config, world, STEPS)
    samples = encode_records(case.records, lambda record: engine.task.encode(record, True), describe=str)

    def collate(rows: list[Sample]) -> Batch:
        return pad_further(engine.task.collate(rows[::-1] if case.backwards else rows), case.padding)

    rows: Rows = PackedRows(samples, plan_of(case.rows), "next_token") if case.packed else SampleRows(samples)
    loader = TrainLoader(
        rows,
        InOrder(len(rows)),
        global_batch=case.global_batch,
        micro_batch=MicroBatchSize(rows=case.micro_batch, tokens=case.tokens),
        ranks=world.dp_ranks,
        prefetcher=Prefetcher(BatchMaker(collate)),
    )
    before = vector(engine).numpy()
    results = [engine.train_step(micro_batches) for _, micro_batches in loader.steps(0, STEPS)]
    losses, norms = [float(result.loss) for result in results], [float(result.grad_norm) for result in results]
    return Update(losses, norms, before, vector(engine).numpy())


def pad_further(batch: Batch, columns: int) -> Batch:
    fill = {"labels": IGNORED_LABEL, "segment_ids": -1}
    padded = {name: functional.pad(rows, (0, columns), value=fill.get(name, 0)) for name, rows in batch.items()}
    return Batch(padded, batch.ids)


@cache
def reference(case: Case) -> Update:
    """The same update on paper: documents one by one, the sum over all of them, one backward."""
    torch.manual_seed(case.seed)
    model = tiny_task(case.config).build_model()
    optim = case.config.optim
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=0.9)
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, eps=optim.eps)

    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    losses, norms = [], []
    for documents in global_batches(case):
        loss_sum = torch.stack([loss_of(model, case.records[number]) for number in documents]).sum()
        loss = loss_sum / max(1, sum(case.documents[number].targets for number in documents))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return Update(losses, norms, before, torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy())


def loss_of(model: torch.nn.Module, record: dict[str, Any]) -> torch.Tensor:
    """The sum of the loss over one document's targets."""
    tokens = torch.tensor(record["tokens"])
    logits = model(input_ids=tokens[None]).logits[0]
    first = max(1, record["context"])
    return functional.cross_entropy(logits[first - 1 : -1], tokens[first:], reduction="sum")


def global_batches(case: Case) -> list[list[int]]:
    """The documents of each step: rows in their order, epoch after epoch; the last batch of an epoch may be short."""
    starts = range(0, len(case.rows), case.global_batch)
    epoch = [list(chain(*case.rows[start : start + case.global_batch])) for start in starts]
    return (epoch * STEPS)[:STEPS]


def check(case: Case, update: Update) -> None:
    expected = reference(case)
    np.testing.assert_array_equal(update.before, expected.before, err_msg=str(case))
    np.testing.assert_allclose(update.losses, expected.losses, rtol=TOLERANCE, err_msg=str(case))
    np.testing.assert_allclose(update.norms, expected.norms, rtol=TOLERANCE, err_msg=str(case))
    change = expected.after - expected.before
    # A weight itself is rounded to 1.2e-7 of its size in each step, however small its change.
    rounding = STEPS * 1.2e-7 * np.linalg.norm(expected.after)
    error = np.linalg.norm(update.after - expected.after)
    assert error <= TOLERANCE * np.linalg.norm(change) + rounding, case


class SmallUnits(Numbers):
    """A task whose units are worth a hundredth each, as a user may weigh examples."""

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch) / 100

    def num_targets(self, batch: Batch) -> float:
        return super().num_targets(batch) / 100


def test_the_scale_of_the_weights_does_not_matter() -> None:
    case = HARD_CASES[0]
    torch.manual_seed(case.seed)
    with Distributed(RankInfo(), CPU, timeout=60) as world:
        task = SmallUnits(case.config)
        engine = unchecked_engine(task, case.config, world, STEPS)
        samples = encode_records(case.records, lambda record: task.encode(record, True), describe=str)
        batches = [task.collate([samples[number] for number in documents]) for documents in global_batches(case)]
        before = vector(engine).numpy()
        results = [engine.train_step([MicroBatch(batch)]) for batch in batches]
        losses, norms = [float(result.loss) for result in results], [float(result.grad_norm) for result in results]
        check(case, Update(losses, norms, before, vector(engine).numpy()))


def test_a_batch_without_targets_has_no_loss() -> None:
    case = dataclasses.replace(HARD_CASES[0], documents=(Document(4, context=4),))
    with Distributed(RankInfo(), CPU, timeout=60) as world:
        update = train(case, world)
    assert update.losses == [0.0, 0.0]
    assert update.norms == [0.0, 0.0]
    assert np.isfinite(update.after).all()
