"""Shards of one process: nothing travels, and all else is as on many. Autocast decides what is computed in 16 bits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSeq2SeqLM, T5Config

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import LoraSection, ParallelSection
from drawbar.distributed.device_mesh import build_mesh
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.parallel.ddp import gradient_sync
from drawbar.parallel.fsdp import free_gathered, prepare_sharded_generate, prepare_unused_units, shard
from exhaustive import some
from tiny import CPU, random_step, tiny_config, tiny_engine

FSDP = ParallelSection(strategy="fsdp")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
}
T5 = T5Config(vocab_size=32, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, decoder_start_token_id=0)


def train(name: str, parallel: ParallelSection, precision: str, **sections: Any) -> dict[str, np.ndarray]:
    """Losses, gradient norms and the weights after some steps."""
    family, fields = MODELS[name]
    config = tiny_config(family, fields, precision=precision, parallel=parallel, **sections)
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(parallel, 1)) as world:
        engine = tiny_engine(config, world)
        results = [engine.train_step(random_step(engine, seed)) for seed in range(3)]
        found = {"loss": np.array([float(result.loss) for result in results])}
        found["norm"] = np.array([float(result.grad_norm) for result in results])
        return {**found, **{key: tensor.numpy().copy() for key, tensor in engine.state().model.items()}}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", some(MODELS, 3))
def test_computes_what_one_process_computes(name: str, precision: str) -> None:
    """Bit by bit, in 16 bits as well: matrices are gathered as autocast casts them, and all else in fp32."""
    expected = train(name, ParallelSection(strategy="single"), precision)
    found = train(name, FSDP, precision)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []


def test_adapters_and_recomputation_too() -> None:
    options: dict[str, Any] = {"activation_checkpointing": "full"}
    lora = LoraSection(rank=4)
    expected = train("llama", ParallelSection(strategy="single", **options), "bf16", lora=lora)
    found = train("llama", ParallelSection(strategy="fsdp", **options), "bf16", lora=lora)
    assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []


class Mixed(nn.Module):
    """A block of a matrix and a norm; or with numbers of its own besides, as experts and state spaces have them."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.own = nn.Parameter(torch.full((4, 4), 1 / 3)) if own else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.own is None else hidden + self.own.exp().sum()
        return hidden + self.linear(self.norm(hidden))


class Model(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Mixed(own) for _ in range(2))
        self.head = nn.Linear(4, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("own", [False, True])
def test_what_is_gathered_in_16_bits(own: bool) -> None:
    """The matrices that autocast casts, unless a block has others. Nothing is gathered inside of a block."""
    model, found = Model(own), {}

    def look(module: nn.Module, inputs: Any) -> None:
        found.update({name: p.dtype for name, p in model.named_parameters() if not hasattr(p, "placements")})

    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(FSDP, 1)) as world:
        world.ensure_process_group()
        shard(model, build_mesh(ParallelDims.of(FSDP, 1), CPU)["dp_shard"], FSDP, "bf16")
        model.blocks[0].norm.register_forward_pre_hook(look)
        model.head.register_forward_pre_hook(look)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.arange(4)).dtype == torch.bfloat16
    wrapped = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert wrapped == {"", "blocks.0", "blocks.1", "head"}
    halves = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    assert halves == {"head.weight", "head.bias"} | (
        set() if own else {"blocks.0.linear.weight", "blocks.0.linear.bias"}
    )
    assert {"embedding.weight", "blocks.0.norm.weight", "blocks.0.linear.weight"} <= found.keys()


class OneBlock(Model):
    """Its second block is for nothing."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.embedding(tokens)))


def test_gradients_that_are_reduced_once_a_step() -> None:
    """They are those of one process, also with a block that no micro-batch uses."""
    parallel = ParallelSection(strategy="fsdp", reshard=False)
    plain = OneBlock(own=False)
    model = deepcopy(plain)

    def accumulate(synchronizing: Callable[[bool], AbstractContextManager[None]], model: nn.Module) -> None:
        for tokens, last in ((torch.arange(4), False), (torch.arange(4, 8), True)):
            with synchronizing(last), torch.autocast("cpu", dtype=torch.bfloat16):
                model(tokens).float().square().sum().backward()

    accumulate(lambda last: nullcontext(), plain)
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(parallel, 1)) as world:
        world.ensure_process_group()
        shard(model, build_mesh(ParallelDims.of(parallel, 1), CPU)["dp_shard"], parallel, "bf16")
        prepare_unused_units(model)
        accumulate(partial(gradient_sync, model, gathers_once=True), model)
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) == (found.grad is None)
            assert found.grad is None or torch.equal(found.grad.full_tensor(), expected.grad)


def test_the_outermost_inference_frees_what_was_gathered() -> None:
    model = Model(own=False)
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(FSDP, 1)) as world:
        world.ensure_process_group()
        shard(model, build_mesh(ParallelDims.of(FSDP, 1), CPU)["dp_shard"], FSDP, "fp32")
        with torch.no_grad(), free_gathered(model):
            with free_gathered(model):
                model(torch.arange(4))
            kept = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert kept == {
            "embedding.weight",
            "head.weight",
            "head.bias",
        }  # what lies outside of blocks, and the last unit
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "parallel", "is_freed"),
    [
        ({}, FSDP, True),
        ({"tie_word_embeddings": True}, FSDP, False),  # the head needs it
        ({}, ParallelSection(strategy="fsdp", reshard=False), False),
    ],
)
def test_an_embedding_is_whole_in_its_forward_alone(
    fields: dict[str, Any], parallel: ParallelSection, is_freed: bool
) -> None:
    """While a model trains; in an evaluation, it is kept from one batch to the next."""
    found: list[bool] = []
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(parallel, 1)) as world:
        engine = tiny_engine(tiny_config("llama", fields, parallel=parallel), world)
        embedding, blocks = engine.module.get_input_embeddings(), engine.module.model.layers

        def look(*_: Any) -> None:
            found.append(not isinstance(embedding.weight, DTensor))

        blocks[0].register_forward_pre_hook(look)
        blocks[0].register_full_backward_hook(look)
        step = random_step(engine, seed=0)
        for _ in range(2):
            engine.train_step(step)
            assert found == [not is_freed] * 4  # two micro-batches
            found.clear()
            with engine.evaluating():
                engine.eval_step(step[0].batch)
                look()
            assert found == [True] * 2
            found.clear()
            assert isinstance(embedding.weight, DTensor)


def test_a_sharded_encoder_decoder_writes_the_same() -> None:
    """``generate`` calls the encoder by itself."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(T5).eval()
    tokens = torch.arange(2, 12).reshape(2, 5)
    expected = model.generate(tokens, max_new_tokens=5)
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(FSDP, 1)) as world:
        world.ensure_process_group()
        shard(model, build_mesh(ParallelDims.of(FSDP, 1), CPU)["dp_shard"], FSDP, "fp32")
        prepare_sharded_generate(model)
        for _ in range(2):
            assert torch.equal(model.generate(tokens, max_new_tokens=5), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.tensor(1.0), "odd, which has no dimension"), (torch.zeros(0, 2), "odd, which has no el")],
)
def test_a_parameter_without_a_dimension_or_elements_is_refused(value: torch.Tensor, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("odd", nn.Parameter(value))
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(FSDP, 1)) as world:
        world.ensure_process_group()
        with pytest.raises(UserError, match=message):
            shard(model, build_mesh(world.dims, CPU)["dp_shard"], FSDP, "fp32")


def test_a_parameter_that_gloo_cannot_send_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    eight_bits = torch.zeros(4, 2).to(torch.float8_e4m3fn)
    model.register_parameter("scales", nn.Parameter(eight_bits, requires_grad=False))
    with Distributed(RankInfo(), CPU, 60, ParallelDims.of(FSDP, 1)) as world:
        world.ensure_process_group()
        with pytest.raises(UserError, match=r"gloo cannot send its dtype, torch\.float8_e4m3fn"):
            shard(model, build_mesh(world.dims, CPU)["dp_shard"], FSDP, "fp32")
