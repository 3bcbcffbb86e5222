"""Optimizers do the arithmetic that their configuration says, each parameter in exactly one of them."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from drawbar.config.schema.run_config import OptimSection
from drawbar.errors import UserError
from drawbar.optim.muon import Muon
from drawbar.optim.optimizers import build_optimizers

NAMES = ["adamw", "sgd", "adafactor", "muon"]


def tiny_llama(tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 5))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 7)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_exactly_one_optimizer(name: str, tied: bool) -> None:
    model = tiny_llama(tied)
    optimizers = build_optimizers(model, OptimSection(name=name))
    names = [n for optimizer in optimizers for n in names_of(optimizer)]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    model = small_net()
    before = model(torch.ones(1, 7)).square().sum().item()
    train(model, build_optimizers(model, OptimSection(name=name, lr=0.01, schedule="constant")), steps=20)
    assert model(torch.ones(1, 7)).square().sum().item() < before


def test_fused_adamw_is_the_same_adamw() -> None:
    config = OptimSection(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    fused, plain = small_net(), small_net()
    optimizers = build_optimizers(fused, config)
    assert optimizers[0].defaults["fused"] is True
    weights = [p for n, p in plain.named_parameters() if n in ("0.weight", "3.weight")]
    others = [p for n, p in plain.named_parameters() if n not in ("0.weight", "3.weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=False, foreach=False)
    train(fused, optimizers, steps=25)
    train(plain, [reference], steps=25)
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adamw_on_the_meta_device_is_not_fused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert build_optimizers(model, OptimSection())[0].defaults["fused"] is None


def test_sgd_is_plain_descent_with_decay_and_momentum() -> None:
    model = nn.Linear(3, 2)
    start = copy.deepcopy(model)
    gradient = torch.full((2, 3), 0.5)
    (optimizer,) = build_optimizers(model, OptimSection(name="sgd", lr=0.1, weight_decay=0.2))
    model.weight.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(model.weight, start.weight - 0.1 * (gradient + 0.2 * start.weight))
    assert build_optimizers(model, OptimSection(name="sgd", momentum=0.9))[0].defaults["momentum"] == 0.9


def test_muon_takes_the_matrices_inside_and_adamw_the_rest() -> None:
    muon, adamw = build_optimizers(tiny_llama(tied=False), OptimSection(name="muon"))
    assert isinstance(muon, Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert all(".self_attn." in name or ".mlp." in name for name in names_of(muon))
    assert len(names_of(muon)) == 7
    decayed, kept = adamw.param_groups
    assert decayed["param_names"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all("norm" in name for name in kept["param_names"])


def test_muon_finds_gpt2s_positions_and_tied_head() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    muon, adamw = build_optimizers(model, OptimSection(name="muon"))
    assert names_of(muon) == [
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert adamw.param_groups[0]["param_names"] == ["transformer.wte.weight", "transformer.wpe.weight"]


def test_muon_moves_a_matrix_about_as_far_as_adamw_would() -> None:
    model = nn.Linear(64, 256, bias=False)
    start = model.weight.detach().clone()
    (muon,) = build_optimizers(model, OptimSection(name="muon", lr=0.01, weight_decay=0.0))
    assert muon.defaults["momentum"] == 0.95
    torch.manual_seed(0)
    model.weight.grad = torch.randn_like(model.weight)
    muon.step()
    root_mean_square = (model.weight - start).square().mean().sqrt().item()
    # AdamW's updates have a root mean square of 0.2 to 0.4 learning rates (arXiv 2502.16982, section 2.2)
    assert math.isclose(root_mean_square, 0.2 * 0.01, rel_tol=0.25)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_muon_in_bf16_is_torchs_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(*shape, bias=False)
    theirs = copy.deepcopy(ours)
    config = OptimSection(name="muon", lr=0.01, weight_decay=0.1, muon_precision="bf16")
    (muon,) = build_optimizers(ours, config)
    reference = torch.optim.Muon(theirs.parameters(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        theirs.weight.grad = torch.randn_like(theirs.weight)
        ours.weight.grad = theirs.weight.grad.clone()
        muon.step()
        reference.step()
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize(("setting", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_muon_multiplies_in_the_format_that_it_is_told(setting: str, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 3, bias=False)
    (muon,) = build_optimizers(model, OptimSection(name="muon", muon_precision=setting))
    model.weight.grad = torch.randn_like(model.weight)
    with RecordProducts() as products:
        muon.step()
    assert products.dtypes == {dtype}


class RecordProducts(TorchDispatchMode):
    """The dtypes of all matrix products inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.update(argument.dtype for argument in args)
        return function(*args, **(kwargs or {}))


def test_muon_without_a_matrix_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no matrix for muon"):
        build_optimizers(nn.Embedding(4, 4), OptimSection(name="muon"))


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_a_round_trip(name: str) -> None:
    config = OptimSection(name=name, lr=0.01, momentum=0.9)
    straight, resumed = small_net(), small_net()
    optimizers = build_optimizers(straight, config)
    train(straight, optimizers, steps=3)
    train(straight, optimizers, steps=2)

    before = build_optimizers(resumed, config)
    train(resumed, before, steps=3)
    after = build_optimizers(resumed, config)
    for new, old in zip(after, before, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    train(resumed, after, steps=2)
    for expected, actual in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, actual)
