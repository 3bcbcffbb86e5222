"""Context parallelism on CUDA: the losses of one device, with the kernels that torch's ring is made for."""

from typing import Any

import pytest
import torch

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import OptimSection, ParallelSection, RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.tasks.batch import Batch
from harness import run_ranks
from tiny import random_batch, random_step, tiny_config, tiny_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

STEPS = 6
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
# the flash kernel takes heads of 8 numbers at least
FIELDS = {
    "llama": {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 8192},
    "gpt2": {"n_embd": 64, "n_positions": 256},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama replicated": ("llama", {"strategy": "ddp"}),
    "llama in shards": ("llama", {"strategy": "fsdp"}),
    "llama computed again": ("llama", {"strategy": "fsdp", "activation_checkpointing": "full"}),
    "llama computed again in part": ("llama", {"strategy": "fsdp", "activation_checkpointing": "selective"}),
    "gpt2 replicated": ("gpt2", {"strategy": "ddp"}),
}


def configured(family: str, parallel: dict[str, Any], precision: str) -> RunConfig:
    return tiny_config(
        family,
        FIELDS[family],
        optim=OptimSection(name="adamw", lr=0.01, eps=0.01, schedule="constant"),
        precision=precision,
        device="cuda",
        parallel=ParallelSection(**parallel),
    )


def long_step(engine: Engine) -> list[MicroBatch[Batch]]:
    """Two micro-batches of two rows, repeated to 200 tokens: each rank then has targets in both of its pieces."""
    step = random_step(engine, seed=1)
    for micro in step:
        for name, tensor in micro.batch.items():
            micro.batch[name] = stretched(tensor, 200)
    return step


def stretched(tensor_BL: torch.Tensor, length: int) -> torch.Tensor:
    return tensor_BL.repeat(1, 1 + length // tensor_BL.shape[1])[:, :length]


def trace(config: RunConfig, world: Distributed) -> list[float]:
    """Losses of some steps on one batch, and that of an evaluation after them."""
    engine = tiny_engine(config, world)
    results = [engine.train_step(long_step(engine)) for _ in range(STEPS)]
    evaluated = engine.eval_step(random_batch(engine.task, rows=2, seed=9))
    engine.close()
    return [*(float(result.loss) for result in results), float(evaluated.loss)]


def on_two_gpus() -> dict[tuple[str, str], list[float]]:
    place = RankInfo.from_environment()
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    found = {}
    for name, (family, parallel) in CASES.items():
        for precision in TOLERANCES:
            config = configured(family, {**parallel, "context": 2}, precision)
            with Distributed(place, device, 120, ParallelDims.of(config.parallel, 2)) as world:
                found[name, precision] = trace(config, world)
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], list[float]]:
    return run_ranks(on_two_gpus, 2, timeout=600)[0]


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_gpu(found: dict[tuple[str, str], list[float]], name: str, precision: str) -> None:
    single = configured(CASES[name][0], {"strategy": "single"}, "fp32")
    wanted = trace(single, Distributed(RankInfo(), torch.device("cuda", 0), timeout=60))
    assert wanted[STEPS - 1] < wanted[0] - 0.1
    assert found[name, precision] == pytest.approx(wanted, rel=TOLERANCES[precision])


def test_a_long_sequence_takes_less_memory() -> None:
    """The largest part of what 2 x 8192 tokens need are activations, and each of two ranks has half of the tokens."""
    peaks = run_ranks(peaks_of_both, 2, timeout=600)
    for whole, cut in peaks:
        assert cut < 0.65 * whole


def peaks_of_both() -> tuple[int, int]:
    place = RankInfo.from_environment()
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    peaks = []
    for degree in (1, 2):
        config = configured("llama", {"strategy": "ddp", "context": degree}, "bf16")
        with Distributed(place, device, 120, ParallelDims.of(config.parallel, 2)) as world:
            engine = tiny_engine(config, world)
            steps = random_step(engine, seed=1, micro_batches=1)
            for name, tensor in steps[0].batch.items():
                steps[0].batch[name] = stretched(tensor, 8192)
            torch.cuda.reset_peak_memory_stats(device)
            engine.train_step(steps)
            peaks.append(torch.cuda.max_memory_allocated(device))
            engine.close()
    return peaks[0], peaks[1]
