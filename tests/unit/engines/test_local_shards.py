"""The host memory of a copy of an engine's shards: as large as they are, and used again."""

import gc

import pytest
import torch

from drawbar.engines.local_shards import LocalShards, ShardCopier, _HostMemory, rounded_bytes
from drawbar.runtime.safetensors_reader import TensorBox
from tiny import random_step, tiny_config, tiny_engine


def boxes(own: LocalShards) -> list[TensorBox]:
    return [*own.model, *own.optimizer]


def memory_of(own: LocalShards) -> torch.UntypedStorage:
    """The one piece of memory that all shards lie in."""
    storages = {box.data.untyped_storage().data_ptr(): box.data.untyped_storage() for box in boxes(own)}
    assert len(storages) == 1
    return storages.popitem()[1]


def test_a_copy_takes_one_piece_of_memory_that_is_used_again() -> None:
    engine = tiny_engine(tiny_config())
    copier = ShardCopier(engine, engine.world)
    assert not copier.copy().optimizer
    places = set()
    for seed in range(3):
        engine.train_step(random_step(engine, seed))
        own = copier.copy()
        memory = memory_of(own)
        assert own.nbytes() <= memory.nbytes() < own.nbytes() + 64 * len(boxes(own))
        places.add(memory.data_ptr())
        state = engine.state()
        engine.train_step(random_step(engine, seed + 10))  # a copy shares nothing with the run
        for shards, wanted in ((own.model, state.model), (own.optimizer, state.optimizer)):
            assert {shard.name for shard in shards} == wanted.keys() - own.tied.keys()
            for shard in shards:
                assert torch.equal(shard.data, wanted[shard.name]), shard.name
    assert len(places) == 1


class Runtime:
    """What is page-locked, as CUDA's runtime would know it."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert start not in self.locked
        self.locked[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0


def test_exactly_the_memory_of_the_shards_is_page_locked_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    memory = _HostMemory(torch.device("cuda"))
    for shape in ((3, 2**20), (3, 2**20), (5, 1024)):
        memory.begin(rounded_bytes(4 * 3) + rounded_bytes(4 * shape[0] * shape[1]))
        small, large = memory.tensor((3,), torch.float32), memory.tensor(shape, torch.float32)
        assert runtime.locked == {small.data_ptr(): 64 + 4 * shape[0] * shape[1]}
        assert large.data_ptr() == small.data_ptr() + 64
    del memory
    gc.collect()
    assert not runtime.locked
