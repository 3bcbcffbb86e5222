"""Acceptance: a model too large for one rank is built and loaded with little more memory than the rank's part takes."""

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.read import read_snapshot
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import (
    CausalLMConfig,
    DataSection,
    OptimSection,
    ParallelSection,
    RunConfig,
    TrainSection,
)
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.runtime.safetensors_reader import parameters_on_meta
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task_context import TaskContext
from harness import run_ranks
from memory import memory

pytestmark = pytest.mark.exhaustive

MIB = 2**20
CPU = torch.device("cpu")
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 4096}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
M_MMAP_THRESHOLD = -3
SLACK = 12 * MIB
"""For Python's own objects, and for freed memory that the allocator keeps."""


def shapes(folder: Path) -> dict[str, torch.Size]:
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def numbers(shape: torch.Size, first: int) -> torch.Tensor:
    """Every row and every column differs from its neighbours, and from those of other tensors."""
    return ((torch.arange(shape.numel(), dtype=torch.float32) + first) % 997).view(shape)


def save(folder: Path, fields: dict[str, int]) -> None:
    """A Llama in several files, and a checkpoint of it with other numbers."""
    LlamaConfig(num_attention_heads=8, **fields).save_pretrained(folder)
    model = {name: numbers(shape, first) for first, (name, shape) in enumerate(shapes(folder).items())}
    weight_map = {name: f"{number * 4 // len(model)}.safetensors" for number, name in enumerate(model)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in model.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for tensor in model.values():
        tensor.add_(1)
    CheckpointDirectory(folder / "checkpoints").write(Snapshot(1, model, {}, {}, {}))


def saved(folder: Path) -> Mapping[str, torch.Tensor]:
    return read_snapshot(folder / "checkpoints" / "step-00000001").model


def build(folder: Path, parallel: ParallelSection, world: Distributed) -> Engine:
    config = RunConfig(
        task=CausalLMConfig(model=str(folder)),
        data=DataSection(sequence_length=32),
        train=TrainSection(steps=1),
        optim=OptimSection(),
        precision="fp32",
        device="cpu",
        parallel=parallel,
    )
    task = CausalLM(TaskContext(config, train_byte_bpe([], 257)))
    return build_engine(task, config, world, total_steps=1)


def load_and_measure(folder: str, parallel: ParallelSection) -> dict[str, int]:
    """Bytes of this rank's parameters, and how far its memory rises at its highest in building and in loading."""
    # freed memory goes back at once, as it does by itself for tensors of more than 32 MiB
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    place = RankInfo.from_environment()
    with Distributed(place, CPU, 60, ParallelDims.of(parallel, place.world_size)) as world:
        # whatever Python and torch load once is there afterwards
        engine = build(Path(folder) / "small", parallel, world)
        check_values(engine, 0.0)
        engine.load_model(saved(Path(folder) / "small"))
        check_values(engine, 1.0)

        before = forget_highest()
        engine = build(Path(folder) / "large", parallel, world)
        building = memory("VmHWM") - before

        before = forget_highest()
        engine.load_model(saved(Path(folder) / "large"))
        loading = memory("VmHWM") - before
        own = sum(local(parameter).nbytes for parameter in engine.module.parameters())
    return {"own": own, "building": building, "loading": loading}


def check_values(engine: Engine, more: float) -> None:
    for first, (name, parameter) in enumerate(engine.module.named_parameters()):
        whole = engine._state._full(name, parameter)
        assert whole.equal(numbers(whole.shape, first) + more), name


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.ds_tensor


def forget_highest() -> int:
    """Bytes in use; what was more than that counts no longer."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process took")
def test_each_rank_needs_room_for_its_own_part(tmp_path: Path) -> None:
    save(tmp_path / "small", SMALL)
    save(tmp_path / "large", LARGE)
    sizes = [4 * math.prod(shape) for shape in shapes(tmp_path / "large").values()]
    assert sum(sizes) > 90 * MIB
    for tensor in (1, 2):
        for measured in run_ranks(load_and_measure, 4, str(tmp_path), ParallelSection(strategy="fsdp", tensor=tensor)):
            assert sum(sizes) / 4 <= measured["own"] < sum(sizes) / 4 + MIB
            # it was measured at all, and is far from the whole model
            assert measured["own"] <= measured["building"] < measured["own"] + max(sizes) + SLACK < sum(sizes) / 2
            assert measured["loading"] < max(sizes) + SLACK
    zero_3 = ParallelSection(strategy="deepspeed", zero_stage=3)
    for measured in run_ranks(load_and_measure, 4, str(tmp_path), zero_3):
        # weights, fp32 weights, gradients, a copy while they are put in order: of one process, sixteen times this
        assert measured["building"] < 5 * measured["own"] + max(sizes) + SLACK < 1.5 * sum(sizes)
        assert measured["loading"] < 3 * max(sizes) + SLACK
