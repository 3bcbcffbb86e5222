"""Activation checkpointing: the same gradients from less memory, whatever it is combined with."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _VersionWrapper
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import EveryKthBlock, LoraSection, ParallelSection
from drawbar.distributed.device_mesh import build_mesh
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.lora import add_adapters
from drawbar.models.packed import allow_packing
from drawbar.models.plans import plan_for
from drawbar.parallel.apply import checkpoint_activations
from drawbar.parallel.blocks import repeated_blocks
from drawbar.parallel.fsdp import shard
from drawbar.parallel.precision import keep_stream_in_bf16
from drawbar.parallel.tensor import tensor_parallel
from harness import run_ranks

CPU = torch.device("cpu")
NUMBERS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "attention_dropout": 0.1},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 2},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4, **NUMBERS},
    "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, **NUMBERS, "forced_eos_token_id": 2},
    "bert": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24},
}  # fmt: skip
"""Dropout is on: the backward pass must drop what the forward pass dropped."""
HEADS = {"t5": AutoModelForSeq2SeqLM, "bart": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}
KINDS = ["full", "selective", "attention", EveryKthBlock(every=2)]


def build(family: str, change: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """A tiny model, always the same, in training."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{"vocab_size": 99, "max_position_embeddings": 64, **SIZES[family]})
    model = HEADS.get(family, AutoModelForCausalLM).from_config(config).train()
    if change is not None:
        change(model)
    return model


def tokens(rows: int = 4, length: int = 12) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module, loss: Callable[[nn.Module], Tensor] | None = None) -> dict[str, Tensor]:
    """The loss, and all gradients by name, of a forward pass with dropout of one seed."""
    torch.manual_seed(2)
    found = model(input_ids=tokens(), labels=tokens()).loss if loss is None else loss(model)
    found.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in gradients.items()}
    return {"loss": found.detach(), **whole}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert len(wanted) > 1
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7, msg=name)


def kept_bytes(model: nn.Module, rows: int = 4) -> int:
    """What autograd keeps for the backward pass besides the parameters."""
    own = {p.data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens(rows), labels=tokens(rows), use_cache=False)
    return sum(seen.values())


def selectively_kept_bytes() -> int:
    """What selective checkpointing keeps, of all models."""
    gc.collect()
    kept = [found.val for found in gc.get_objects() if type(found) is _VersionWrapper]
    return sum(tensor.nbytes for tensor in kept if isinstance(tensor, Tensor))


def operations(model: nn.Module) -> int:
    """Additions and multiplications of a forward and a backward pass, matrix products alone."""
    with FlopCounterMode(display=False) as counter:
        backward(model)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("family", SIZES)
def test_gradients_and_names_stay_the_same(family: str, kind: Any) -> None:
    plain, model = build(family), build(family, lambda model: checkpoint_activations(model, kind))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_same(backward(model), backward(plain))


def test_bf16_gradients_stay_the_same() -> None:
    plain, model = build("gpt2"), build("gpt2", lambda model: checkpoint_activations(model, "selective"))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(backward(model), backward(plain))


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_less_is_kept(family: str) -> None:
    none, full, second = (
        kept_bytes(build(family, lambda m, k=kind: checkpoint_activations(m, k)))
        for kind in ("none", "full", EveryKthBlock(every=2))
    )
    assert full < 0.5 * none
    assert full < second < none


@pytest.mark.parametrize(("kind", "wanted"), [("none", 46), ("full", 2)])
def test_a_layer_keeps_what_the_documentation_says(kind: Any, wanted: float) -> None:
    """docs/strategies.md: bytes for each number of the hidden states, in bf16."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4}
    kept = {}
    for layers in (1, 3):
        config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config).train()
        keep_stream_in_bf16(model)
        checkpoint_activations(model, kind)
        with torch.autocast("cpu", torch.bfloat16):
            kept[layers] = kept_bytes(model, rows=6) - kept_bytes(model, rows=2)  # without copies of the weights
    assert (kept[3] - kept[1]) / 2 / (4 * 12 * 64) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("kind", "wanted"), [("selective", 23), ("attention", 2.25)])
def test_what_is_kept_of_a_layer_besides_its_input(kind: Any, wanted: float) -> None:
    """docs/strategies.md, as above; and for each head and token a number of fp32 that attention's backward needs."""
    config = AutoConfig.for_model(
        "llama", vocab_size=99, hidden_size=64, intermediate_size=172, num_attention_heads=4, num_hidden_layers=1
    )
    model = AutoModelForCausalLM.from_config(config).train()
    checkpoint_activations(model, kind)
    before = selectively_kept_bytes()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    assert loss.requires_grad
    assert (selectively_kept_bytes() - before) / (4 * 12 * 64) == wanted


def test_selective_multiplies_no_matrices_again() -> None:
    none, selective, full = (
        operations(build("llama", lambda m, k=kind: checkpoint_activations(m, k)))
        for kind in ("none", "selective", "full")
    )
    assert none == selective < full


class CalledOperators(TorchDispatchMode):
    """Counts the calls of each operator inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "times"), [("none", 1), ("full", 2), ("attention", 1), ("selective", 1)])
def test_how_often_attention_is_computed(kind: Any, times: int) -> None:
    model = build("llama", lambda m: checkpoint_activations(m, kind))
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.0  # with it, torch has no kernel for CPUs
    with CalledOperators() as operators:
        backward(model)
    assert operators.calls["_scaled_dot_product_flash_attention_for_cpu"] == 3 * times


def test_every_third_block() -> None:
    model = build("llama", lambda model: checkpoint_activations(model, EveryKthBlock(every=3)))
    kinds = [type(block) for _, block in repeated_blocks(model)]
    assert kinds[1] is kinds[2] is not kinds[0]


def test_evaluation_and_generation_are_left_alone() -> None:
    plain, model = build("llama").eval(), build("llama", lambda model: checkpoint_activations(model, "full")).eval()
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens(), **options), plain.generate(tokens(), **options))
    assert len(calls) == 5  # with a cache: one forward for each token
    backward(model)
    assert len(calls) == 6
    backward(model.train())
    assert len(calls) == 8


def test_adapters() -> None:
    def adapt(model: nn.Module) -> None:
        torch.manual_seed(3)
        add_adapters(model, LoraSection(rank=2, dropout=0.1))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)

    plain = build("llama", adapt)
    model = build("llama", lambda model: (adapt(model), checkpoint_activations(model, "full")))
    assert_same(backward(model), backward(plain))


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_packed_rows(family: str) -> None:
    segments = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3] * 4)
    batch = {"input_ids": tokens(), "labels": tokens(), "segment_ids": segments}
    if family == "bart":
        batch |= {"decoder_input_ids": tokens(), "decoder_segment_ids": segments}

    def pack(model: nn.Module) -> None:
        allow_packing(model, per_sample=False)

    plain = build(family, pack)
    model = build(family, lambda model: (pack(model), checkpoint_activations(model, "selective")))
    assert_same(backward(model, lambda m: m(**batch).loss), backward(plain, lambda m: m(**batch).loss))


class Own(nn.Module):
    """A user's model: blocks in a list, which hold lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x_BH: Tensor) -> Tensor:
        x_BH = self.first(x_BH)
        for block in self.blocks:
            x_BH = block(x_BH)
        return x_BH


def test_blocks_of_any_model() -> None:
    model = Own()
    assert [name for name, _ in repeated_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    inputs = torch.ones(2, 4)
    wanted = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    checkpoint_activations(model, EveryKthBlock(every=2))
    assert [name for name, _ in repeated_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    found = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_a_copy_of_a_block_computes_with_its_own_weights() -> None:
    """``nn.DataParallel`` makes copies that share everything but the weights."""
    model = Own()
    checkpoint_activations(model, "full")
    copy = model.blocks[0]._replicate_for_data_parallel()
    copy._modules = {name: nn.Identity() for name in copy._modules}
    assert torch.equal(copy(torch.ones(2, 4, requires_grad=True)), torch.ones(2, 4))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Linear has no repeated blocks"):
        checkpoint_activations(nn.Linear(2, 2), "full")
    checkpoint_activations(nn.Linear(2, 2), "none")


def spread(model: nn.Module, dims: ParallelDims, kind: Any) -> nn.Module:
    """In the order of ``parallel.apply``."""
    mesh = build_mesh(dims, CPU)
    if dims.tp > 1:
        tensor_parallel(model, plan_for(model), mesh["tp"])
    checkpoint_activations(model, kind)
    if dims.dp_shard > 1:
        shard(model, mesh["dp_shard"], ParallelSection(strategy="fsdp"), "fp32")
    return DistributedDataParallel(model) if dims.dp_replicate > 1 else model


def compare_over_ranks(kinds: list[Any]) -> None:
    """Gradients under tensor parallelism, FSDP2 and DDP, against those without checkpointing. Every rank has the same
    tokens and draws the same random numbers."""
    for dims in (ParallelDims(tp=2), ParallelDims(dp_shard=2), ParallelDims(dp_replicate=2)):
        with Distributed(RankInfo.from_environment(), CPU, timeout=60, dims=dims):
            with CalledOperators() as plain:
                wanted = backward(spread(build("llama"), dims, "none"))
            for kind in kinds:
                with CalledOperators() as operators:
                    assert_same(backward(spread(build("llama"), dims, kind)), wanted)
                reduces_again = operators.calls["all_reduce"] - plain.calls["all_reduce"]
                assert reduces_again == (3 if dims.tp > 1 and kind == "full" else 0)  # one for each layer


@pytest.mark.exhaustive
def test_with_other_ranks() -> None:
    run_ranks(compare_over_ranks, 2, KINDS[:3])
