"""Acceptance: a state that is saved in parts under one strategy goes on under any other as if nothing had happened.

Each case trains three steps and saves. Each reader loads that, and makes the next five: its losses are those of one
process that was never interrupted. What it has loaded is, tensor by tensor, what was saved. `make test` reads
some of them by themselves and by one other; `make test-all` reads all by all, or by one process.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.read import PartFiles, open_snapshot
from drawbar.checkpoint.tensor_index import PartRecord
from drawbar.checkpoint.write import write_part
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import OptimSection, ParallelSection, TrainSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.engines.local_shards import ShardCopier
from drawbar.engines.results import EngineState
from exhaustive import asked, params
from harness import run_ranks
from parts_writing import begin_parts, commit_parts
from tiny import CPU, random_step, tiny_config, tiny_engine, vector

LAST_SAVED, LAST = 3, 8
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "fsdp on two": (2, {"strategy": "fsdp"}),
    "fsdp on four": (4, {"strategy": "fsdp"}),
    "fsdp and tensor": (4, {"strategy": "fsdp", "tensor": 2}),
    "pipeline and ddp": (4, {"strategy": "ddp", "pipeline": 2}),
    "zero 2": (2, {"strategy": "deepspeed", "zero_stage": 2}),
    "zero 3": (2, {"strategy": "deepspeed", "zero_stage": 3}),
}
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"strategy": "deepspeed", "zero_stage": 0}),
    "zero 1 and tensor": (2, {"strategy": "deepspeed", "zero_stage": 1, "tensor": 2}),
    "pipeline of deepspeed": (2, {"strategy": "deepspeed", "zero_stage": 1, "pipeline": 2}),
    "fsdp with replicas": (4, {"strategy": "fsdp", "replicate": 2}),
    "pipeline and fsdp": (4, {"strategy": "fsdp", "pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved"}),
}
"""What holds its state in other ways still; read by one process and by itself."""
NAMES = list(CASES)
OFTEN = ("fsdp on two", "fsdp and tensor")
OTHER = {name: NAMES[(number + 4) % len(NAMES)] for number, name in enumerate(NAMES)}
"""For each case, one that reads it; every case reads one."""
PAIRS = params(
    [*product(CASES, CASES), *product(FURTHER, ["single"]), *((name, name) for name in FURTHER)],
    [(saver, reader) for saver in OFTEN for reader in (saver, OTHER[saver])],
)
EVERY = {**CASES, **FURTHER}
GPT2 = {"gpt2 on two": (2, {"strategy": "ddp", "tensor": 2}), "gpt2 on four": (4, {"strategy": "fsdp", "tensor": 2})}
"""A model whose fused layers tensor parallelism stores in another order."""
GPT2_PAIRS = params(product(("gpt2 alone", *GPT2), ("gpt2 alone", *GPT2)), [("gpt2 on two", "gpt2 alone")])


def engine_of(name: str, world: Distributed, seed: int) -> Engine:
    family = "gpt2" if name.startswith("gpt2") else "llama"
    fields = {"tie_word_embeddings": True, **({} if family == "gpt2" else {"num_hidden_layers": 4})}
    _, parallel = {**EVERY, **GPT2, "gpt2 alone": (1, {"strategy": "single"})}[name]
    config = tiny_config(
        family,
        fields,
        optim=OptimSection(lr=0.01, schedule="constant"),
        train=TrainSection(steps=LAST, gradient_clip=0.5),
        parallel=ParallelSection(**parallel),
    )
    world.set_dims(ParallelDims.of(config.parallel, world.size))
    return tiny_engine(config, world, seed)


def joined(name: str) -> Distributed:
    info = RankInfo.from_environment()
    _, parallel = {**EVERY, **GPT2, "gpt2 alone": (1, {"strategy": "single"})}[name]
    return Distributed(info, CPU, 60, ParallelDims.of(ParallelSection(**parallel), info.world_size))


def steps(engine: Engine, first: int, last: int) -> list[float]:
    """Losses of steps of four micro-batches, dealt out over the data-parallel ranks."""
    ranks = engine.world.dp_ranks
    batches = (random_step(engine, seed, micro_batches=4)[ranks.rank :: ranks.size] for seed in range(first, last + 1))
    return [float(engine.train_step(micro_batches).loss) for micro_batches in batches]


def save_all(folder: str, names: list[str]) -> list[list[float]]:
    """In the folder of each case: the state in parts, and, for comparison, as ``Engine.state`` gathers it."""
    return [save(Path(folder) / name, name) for name in names]


def save(folder: Path, name: str) -> list[float]:
    with joined(name) as world:
        engine = engine_of(name, world, seed=0)
        losses = steps(engine, 1, LAST_SAVED)
        own = ShardCopier(engine, world).copy()
        whole = engine.state()
        directory = CheckpointDirectory(folder)
        if world.is_rank0:
            begin_parts(directory, LAST_SAVED)
        world.barrier("making the folder")
        record = write_part(directory.folder_of_parts(LAST_SAVED), world.rank, own.model, own.optimizer, own.tied)
        written = world.all_gather(sum(shard.data.nbytes for shard in own.model + own.optimizer))
        records = world.all_gather(record.to_json())
        if world.is_rank0:
            commit_parts(directory, LAST_SAVED, map(PartRecord.from_json, records), own.values, {})
            torch.save((dict(whole.model), dict(whole.optimizer), written), folder / "whole.pt")
        world.barrier("saving")
        engine.close()
        return losses


def resume_all(folder: str, pairs: list[tuple[str, str]]) -> list[tuple[list[float], list[str]]]:
    return [resume(Path(folder) / saver, reader) for saver, reader in pairs]


def resume(folder: Path, reader: str) -> tuple[list[float], list[str]]:
    """The losses that follow, and the names of tensors that were not loaded as they had been saved."""
    with joined(reader) as world:
        engine = engine_of(reader, world, seed=1)
        saved = open_snapshot(folder / step_name(LAST_SAVED))
        engine.load(EngineState(saved.model, saved.optimizer, saved.state))
        state = engine.state()
        different = []
        if world.is_rank0:
            model, optimizer, _ = torch.load(folder / "whole.pt")
            found = {**state.model, **state.optimizer}
            wanted = {**model, **optimizer}
            different = [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
            different += [name for name in found if name not in wanted]
        losses = steps(engine, LAST_SAVED + 1, LAST)
        engine.close()
        return losses, different


def on_ranks(function: Any, size: int, *arguments: Any) -> list[Any]:
    """What the last rank returns (it has a pipeline's loss), and the first."""
    return [function(*arguments)] if size == 1 else run_ranks(function, size, *arguments, timeout=500)


class Matrix:
    """The saves, and what came of each reading of them."""

    def __init__(self, folder: Path, sizes: dict[str, int], pairs: list[tuple[str, str]]) -> None:
        self.folder = folder
        self.resumed: dict[tuple[str, str], tuple[list[float], list[str]]] = {}
        by_size = {size: [name for name in sizes if sizes[name] == size] for size in sorted(set(sizes.values()))}
        for size, names in by_size.items():
            on_ranks(save_all, size, str(folder), names)
        for size, names in by_size.items():
            chosen = [pair for pair in pairs if pair[1] in names]
            ranks = on_ranks(resume_all, size, str(folder), chosen)
            for pair, first, last in zip(chosen, ranks[0], ranks[-1], strict=True):
                self.resumed[pair] = last[0], first[1]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    sizes = {name: size for name, (size, _) in EVERY.items()}
    pairs = [pair for pair in asked(request, "saver", "reader") if pair[0] in EVERY]
    return Matrix(tmp_path_factory.mktemp("matrix"), sizes, pairs)


@pytest.fixture(scope="module")
def of_gpt2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    sizes = {name: size for name, (size, _) in GPT2.items()} | {"gpt2 alone": 1}
    pairs = [pair for pair in asked(request, "saver", "reader") if pair[0] in sizes]
    return Matrix(tmp_path_factory.mktemp("gpt2"), sizes, pairs)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, list[float]]:
    """The losses of one process after the step of the save."""
    found = {}
    for name in ("single", "gpt2 alone"):
        with joined(name) as world:
            found[name] = steps(engine_of(name, world, seed=0), 1, LAST)[LAST_SAVED:]
    return found


def check_losses(found: list[float], wanted: list[float]) -> None:
    assert max(wanted) > 1.01 * min(wanted)  # equal traces are no accident
    assert max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True)) <= 1e-5


@pytest.mark.parametrize(("saver", "reader"), PAIRS)
def test_any_to_any(matrix: Matrix, uninterrupted: dict[str, list[float]], saver: str, reader: str) -> None:
    losses, different = matrix.resumed[saver, reader]
    assert different == []
    check_losses(losses, uninterrupted["single"])


@pytest.mark.parametrize(("saver", "reader"), GPT2_PAIRS)
def test_fused_layers(of_gpt2: Matrix, uninterrupted: dict[str, list[float]], saver: str, reader: str) -> None:
    losses, different = of_gpt2.resumed[saver, reader]
    assert different == []
    check_losses(losses, uninterrupted["gpt2 alone"])


@pytest.mark.parametrize("name", EVERY)
def test_each_element_is_written_once_and_as_it_is(matrix: Matrix, name: str) -> None:
    """As ``Engine.state`` gathers it; of a tied weight, one name."""
    folder = matrix.folder / name / step_name(LAST_SAVED)
    assert problems(folder) == []
    saved = open_snapshot(folder)
    model, optimizer, written = torch.load(matrix.folder / name / "whole.pt")
    assert saved.model.keys() == model.keys()
    assert saved.optimizer.keys() == optimizer.keys()
    for key, tensor in (*model.items(), *optimizer.items()):
        found = (saved.model if key in model else saved.optimizer)[key]
        assert found.dtype == tensor.dtype, key
        assert torch.equal(found, tensor), key
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.values(), *optimizer.values())}
    assert sum(written) == sum(unique.values())
    assert all(share > 0 for share in written)


@pytest.mark.parametrize("name", ["ddp", "fsdp on four", "zero 2", "zero 3"])
def test_ranks_write_about_equally_much(matrix: Matrix, name: str) -> None:
    _, _, written = torch.load(matrix.folder / name / "whole.pt")
    assert max(written) <= 1.1 * min(written)


def test_a_load_reads_each_block_once(tmp_path: Path) -> None:
    """Though many tensors share a block: they are read in the order of the files."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 11, "tie_word_embeddings": True}
    config = tiny_config("llama", fields, parallel=ParallelSection(strategy="single"))
    engine = tiny_engine(config)
    engine.train_step(random_step(engine, seed=1))
    directory = CheckpointDirectory(tmp_path)
    own = ShardCopier(engine, engine.world).copy()
    record = write_part(begin_parts(directory, 1), 0, own.model, own.optimizer, own.tied)
    commit_parts(directory, 1, [record], own.values, {})
    files = PartFiles(tmp_path / step_name(1))
    resumed = tiny_engine(config, seed=1)
    resumed.load(EngineState(files.model, files.optimizer, own.values))
    assert torch.equal(vector(resumed), vector(engine))
    sizes = [file.size for file in record.files]
    assert min(sizes) > 4 * 2**20
    assert files.bytes_read <= sum(sizes)
