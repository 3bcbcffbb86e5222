"""What ranks send one another in a step, counted by collective, and the formulas of docs/strategies.md."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from harness import run_ranks
from tiny import CPU, random_batch, random_step, tiny_config, tiny_engine

pytestmark = pytest.mark.exhaustive

FSDP = [
    *((ParallelSection(strategy="fsdp", reshard=reshard), p) for reshard in (True, False) for p in ("fp32", "bf16")),
    (ParallelSection(strategy="fsdp", reduce_dtype="bf16"), "bf16"),
]
REPLICAS = [
    (ParallelSection(strategy="ddp"), "fp32"),
    (ParallelSection(strategy="ddp", reduce_dtype="bf16"), "fp32"),
    (ParallelSection(strategy="zero1"), "fp32"),
]
TENSOR = (ParallelSection(tensor=2), "fp32")
Sent = dict[str, list[int]]
"""The bytes of each collective, by its name; only those of more than 64 bytes."""


@dataclass(frozen=True)
class Counted:
    """One way of sharing the model."""

    steps: dict[int, Sent]
    """What a step sends, by its number of micro-batches."""
    evaluation: Sent
    """The same of an evaluation of two batches."""
    shapes: dict[str, list[int]]
    """Those of the parameters."""
    norms: list[float]
    """Of the gradients of each step."""


class CountedCollectives(TorchDispatchMode):
    """Notes the collectives that are called inside, each with the size of its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            size = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            if size > 64:
                self.sent.setdefault(func._opname, []).append(size)
        return func(*args, **(kwargs or {}))


def count(parallel: ParallelSection, precision: str) -> Counted:
    config = tiny_config("llama", {"num_hidden_layers": 3}, precision=precision, parallel=parallel)
    with Distributed(RankInfo.from_environment(), CPU, 60, ParallelDims.of(parallel, 2)) as world:
        engine = tiny_engine(config, world)
        engine.train_step(random_step(engine, 0))  # in the first, DDP has not yet seen the order of the gradients
        steps, norms = {}, []
        for micro_batches in (1, 3):
            with CountedCollectives() as collectives:
                norms.append(float(engine.train_step(random_step(engine, 1, micro_batches)).grad_norm))
            steps[micro_batches] = collectives.sent
        with CountedCollectives() as collectives, engine.evaluating():
            for seed in range(2):
                engine.eval_step(random_batch(engine.task, 2, seed))
        shapes = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}
        return Counted(steps, collectives.sent, shapes, norms)


def count_all() -> list[Counted]:
    return [count(*case) for case in [*FSDP, *REPLICAS, TENSOR]]


@pytest.fixture(scope="module")
def counted() -> dict[int, Counted]:
    """By the number of the case."""
    return dict(enumerate(run_ranks(count_all, 2)[0]))


def numbers(shapes: Iterable[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize("case", range(len(FSDP)), ids=[f"{p.reshard} {p.reduce_dtype} {dtype}" for p, dtype in FSDP])
def test_fsdp_sends_what_the_documentation_says(case: int, counted: dict[int, Counted]) -> None:
    parallel, precision = FSDP[case]
    shapes = counted[case].shapes
    g, r = (4 if dtype == "fp32" else 2 for dtype in (precision, parallel.reduce_dtype))
    units = [shape for name, shape in shapes.items() if ".layers." in name or name == "lm_head.weight"]
    n, u = numbers(shapes.values()), numbers(shape for shape in units if precision == "fp32" or len(shape) > 1)
    last = numbers([shapes["lm_head.weight"]])
    gathered = g * u + 4 * (n - u) + (0 if parallel.reshard is False else g * (u - last))
    for micro_batches, sent in counted[case].steps.items():
        times = 1 if parallel.reshard is False else micro_batches
        assert sum(sent["_allgather_base_"]) == pytest.approx(times * gathered, rel=0.05)
        assert sum(sent["_reduce_scatter_base_"]) == pytest.approx(times * r * n, rel=0.05)
        assert sent.keys() == {"_allgather_base_", "_reduce_scatter_base_"}
    # two batches gather what is freed after each, and the rest once
    assert sum(counted[case].evaluation["_allgather_base_"]) == pytest.approx(gathered, rel=0.05)


def test_gradients_in_bf16_are_nearly_the_same(counted: dict[int, Counted]) -> None:
    in_fp32, in_bf16 = (counted[FSDP.index(case)].norms for case in (FSDP[1], FSDP[-1]))
    assert in_fp32 == pytest.approx(in_bf16, rel=1e-2)
    assert in_fp32 != in_bf16


@pytest.mark.parametrize("case", range(len(REPLICAS)), ids=[f"{p.strategy} {p.reduce_dtype}" for p, _ in REPLICAS])
def test_replicas_send_nothing_until_the_last_micro_batch(case: int, counted: dict[int, Counted]) -> None:
    parallel, _ = REPLICAS[case]
    found = counted[len(FSDP) + case]
    n, used = numbers(found.shapes.values()), 4 * len(found.shapes)
    for sent in found.steps.values():
        assert sum(sent["allreduce_"]) == used + (2 if parallel.reduce_dtype == "bf16" else 4) * n
        # each rank sends its part of the parameters in one piece
        parts = sent.get("broadcast_", [])
        assert (len(parts), sum(parts)) == ((2, 4 * n) if parallel.strategy == "zero1" else (0, 0))
    assert found.evaluation == {}


def test_tensor_parallelism_sums_activations_four_times_a_layer(counted: dict[int, Counted]) -> None:
    """And once after the embedding, once before the head: queries, keys and values share the sum of their gradients."""
    sizes = counted[len(FSDP) + len(REPLICAS)].steps[1]["all_reduce"]
    assert sizes.count(max(sizes)) == 4 * 3 + 2
