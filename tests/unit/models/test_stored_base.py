"""A base stored in fewer bits: torchao's formats bit by bit, and steps that are those of peft on what it unpacks to."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torchao.quantization import Int8Tensor, to_nf4
from torchao.quantization.granularity import PerRow
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drawbar.config.schema.run_config import CausalLMConfig, LoraSection, ParallelSection, RunConfig
from drawbar.engines import local_model
from drawbar.engines.engine import Engine
from drawbar.models.lora import adapted_layers, as_stored, describe_adapters, merged
from drawbar.models.stored_base import FORMS, PackedConv1D, PackedLinear, pack, pack_int8, pack_nf4, shapes, unpack_nf4
from tiny import ARCHITECTURES, random_step, tiny_config, tiny_engine

FORM = pytest.mark.parametrize("form", list(FORMS))


def by_torchao(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What is left of a weight of (outputs, inputs)."""
    match form:
        case "nf4":
            blocks = weight.numel() // 64
            group = next(size for size in range(256, 0, -1) if 256 % size == 0 and blocks % size == 0)
            return to_nf4(weight.contiguous(), 64, group).get_original_weight()
        case "int8":
            return Int8Tensor.from_hp(weight.contiguous(), PerRow()).dequantize()
        case _:
            return weight.bfloat16().float()


@pytest.mark.parametrize("size", [(300, 256), (128, 64), (64, 3 * 64), (1, 128)])
def test_formats_are_those_of_torchao(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[0, 3] = 1.5  # an outlier
    for form in FORMS:
        ours = FORMS[form].unpack(*FORMS[form].pack(weight)).view(size)
        assert torch.equal(ours, by_torchao(weight, form)), form


def test_bytes_of_a_weight() -> None:
    weight = torch.randn(256, 256)
    taken = {form: sum(part.nbytes for part in FORMS[form].pack(weight)) for form in FORMS}
    blocks = weight.numel() // 64
    assert taken == {
        "bf16": 2 * 256**2,
        "int8": 256**2 + 4 * 256,
        "nf4": 256**2 // 2 + blocks + 4 * blocks // 256 + 4 + 64,
    }


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_blocks_without_variety(value: float) -> None:
    """Pruned weights have blocks of zeros, for which torchao divides 0 by 0; and all scales may be equal."""
    weight = torch.full((4, 64), value)
    assert torch.equal(unpack_nf4(*pack_nf4(weight)).view(4, 64), weight)
    codes, scales = pack_int8(torch.zeros(2, 64))
    assert not (codes * scales).any()
    some = torch.randn(256, 64)
    some[7] = 0
    some[9] *= 50  # scales are rounded in steps of this one's share
    assert not unpack_nf4(*pack_nf4(some))[7].any()


def save(folder: Path, family: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, vocab_size=257, **ARCHITECTURES[family], **fields), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return model


def adapting(folder: Path, precision: str = "fp32", **lora: Any) -> RunConfig:
    config = tiny_config(precision=precision, lora=LoraSection(modules="linear", **lora))
    return config.model_copy(update={"task": CausalLMConfig(model=str(folder))})


def start_adapters(engine: Engine) -> None:
    """B is zero at first, and A then has no gradient."""
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))


@torch.no_grad()
def lose_bits(model: nn.Module, form: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and "lm_head" not in name:
            turned = isinstance(module, Conv1D)
            kept = by_torchao(module.weight.t() if turned else module.weight, form)
            module.weight.copy_(kept.t() if turned else kept)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("form", "lora"),
    [*((form, {}) for form in FORMS), *((form, {"dora": True}) for form in (None, "nf4")), ("int8", {"rslora": True})],
)
def test_steps_are_those_of_peft_on_the_unpacked_weights(
    tmp_path: Path, family: str, form: str | None, lora: dict[str, bool]
) -> None:
    base = save(tmp_path, family)
    if form is not None:
        lose_bits(base, form)
    engine = tiny_engine(adapting(tmp_path, base=form, rank=4, **lora))
    start_adapters(engine)
    targets = sorted({name.rpartition(".")[2] for name in adapted_layers(engine.module)})
    reference = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=targets,
            fan_in_fan_out=family == "gpt2",
            **{f"use_{name}": value for name, value in lora.items()},
        ),
    )
    ours = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    theirs = {n.removeprefix("base_model.model."): p for n, p in reference.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        if "magnitude" in name:
            torch.testing.assert_close(ours[name], parameter, rtol=1e-6, atol=0)
        parameter.data.copy_(ours[name])
    decayed, others = ([p for p in theirs.values() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for seed in range(5):
        micro_batches = random_step(engine, seed, micro_batches=3, rows=1)
        optimizer.zero_grad()
        total, targets_of_all = torch.zeros(()), 0
        for micro in micro_batches:
            batch = micro.batch
            logits = reference(batch["input_ids"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            total = total + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            targets_of_all += int((labels != -100).sum())
        (total / targets_of_all).backward()
        optimizer.step()
        loss = engine.train_step(micro_batches).loss.item()
        assert loss == pytest.approx((total / targets_of_all).item(), rel=1e-5)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "parallel"),
    [
        *((form, {}) for form in FORMS),
        ("nf4", {"activation_checkpointing": "full"}),
        ("int8", {"activation_checkpointing": "selective"}),
        pytest.param("nf4", {"compile": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_in_bf16_they_are_those_of_a_base_that_was_unpacked(
    tmp_path: Path, form: str, parallel: dict[str, Any]
) -> None:
    base = save(tmp_path / "whole", "llama")
    lose_bits(base, form)
    base.save_pretrained(tmp_path / "unpacked")
    found = []
    for config in (adapting(tmp_path / "whole", "bf16", base=form), adapting(tmp_path / "unpacked", "bf16")):
        engine = tiny_engine(config.model_copy(update={"parallel": ParallelSection(strategy="single", **parallel)}))
        start_adapters(engine)
        found.append([engine.train_step(random_step(engine, seed)).loss.item() for seed in range(3)])
    assert found[0] == pytest.approx(found[1], rel=2e-3 if parallel.get("compile") else 1e-6)


@FORM
def test_what_is_packed_and_what_is_not(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")
    config = adapting(tmp_path, base=form, train=["layers.1.mlp.up_proj"])
    read = tiny_engine(config)
    plain = tiny_engine(adapting(tmp_path, train=["layers.1.mlp.up_proj"]))
    assert read.base == plain.base  # the original's digest
    packed = {name for name, module in read.module.named_modules() if isinstance(module, PackedLinear)}
    linear = {name for name, module in plain.module.named_modules() if type(module) is nn.Linear}
    assert packed == {n for n in linear if "lora_" not in n} - {"lm_head", "model.layers.1.mlp.up_proj"}
    assert shapes(read.module) == shapes(plain.module)
    assert describe_adapters(read.module) == describe_adapters(plain.module)
    monkeypatch.setattr(local_model, "_read_adapted", lambda *_: None)
    built = tiny_engine(config)
    assert built.base == read.base
    for name, tensor in built.module.named_parameters():
        assert torch.equal(tensor, read.module.get_parameter(name)), name


def test_a_weight_that_does_not_fit_in_blocks_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, "llama", head_dim=1)  # 16 inputs, 4 heads of 1: 64; and 2 of 1: 32
    engine = tiny_engine(adapting(tmp_path, base="nf4"))
    attention = engine.module.model.layers[0].self_attn
    assert type(attention.q_proj.base_layer) is PackedLinear
    assert type(attention.k_proj.base_layer) is nn.Linear


def test_fp32_is_kept_in_a_run_in_bf16(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    for base, dtype in ((None, torch.bfloat16), ("fp32", torch.float32)):
        engine = tiny_engine(adapting(tmp_path, "bf16", base=base))
        assert engine.module.model.layers[0].mlp.up_proj.base_layer.weight.dtype == dtype


@FORM
def test_no_unpacked_weight_is_kept_for_the_backward_pass(form: str) -> None:
    layer = nn.Linear(64, 256).requires_grad_(False)
    pack(layer, form, layer.weight.detach())
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert sum(tensor.nbytes for tensor in kept) == sum(part.nbytes for part in layer.parts)


@FORM
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_those_of_the_unpacked_base(tmp_path: Path, family: str, form: str) -> None:
    base = save(tmp_path, family)
    pretrained = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    plain = tiny_engine(adapting(tmp_path)).module
    lose_bits(base, form)
    expected = base.state_dict()
    stored = as_stored(plain, LoraSection(base=form), pretrained)
    assert len(stored) == len(list(stored)) == len(pretrained)
    engine = tiny_engine(adapting(tmp_path, base=form))
    assert any(isinstance(module, PackedLinear | PackedConv1D) for module in engine.module.modules())
    whole = merged(engine.module).state_dict()  # B is zero
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name
        assert torch.equal(whole[name], tensor), name
