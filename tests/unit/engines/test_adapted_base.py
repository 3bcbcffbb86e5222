"""The base under LoRA, read from its files: the same run bit by bit, and no fp32 copy of it in the host's memory."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from drawbar.config.schema.run_config import CausalLMConfig, LoraSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines import local_model
from drawbar.runtime.seed import rng_bytes
from harness import run_ranks
from memory import memory
from tiny import ARCHITECTURES, CPU, Numbers, random_step, tiny_config, tiny_engine, unchecked_engine

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""25 million weights in linear layers."""
SMALL = ARCHITECTURES["llama"]
MIB = 2**20
M_MMAP_THRESHOLD = -3


def save(folder: Path, dtype: torch.dtype, fields: dict[str, Any], family: str = "llama") -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, vocab_size=257, **fields)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="100MB")


def adapting(folder: Path, precision: str, **lora: Any) -> RunConfig:
    config = tiny_config(precision=precision, lora=LoraSection(**lora))
    return config.model_copy(update={"task": CausalLMConfig(model=str(folder))})


def trained(config: RunConfig) -> tuple[Any, ...]:
    """Base and names of parameters of a new engine, the numbers drawn until then, and what two steps make of it."""
    engine = tiny_engine(config)
    drawn = rng_bytes()
    losses = [engine.train_step(random_step(engine, seed)).loss.item() for seed in range(2)]
    tensors = dict([*engine.module.named_parameters(), *engine.module.named_buffers()])
    trains = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    return engine.base, engine.parts.model.cross_entropy, drawn, losses, trains, tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "fields", "lora"),
    [
        ("llama", SMALL, {}),
        ("llama", {**SMALL, "tie_word_embeddings": True}, {"modules": "linear"}),
        ("llama", SMALL, {"train": ["norm", "lm_head"]}),
        ("gpt2", ARCHITECTURES["gpt2"], {"dropout": 0.1}),
        ("gpt2", ARCHITECTURES["gpt2"], {"dora": True, "base": "int8"}),
        ("llama", SMALL, {"dora": True, "modules": ["linear", "embed_tokens"], "dropout": 0.1}),
        ("llama", SMALL, {"dora": True, "base": "nf4"}),
    ],
)
def test_a_base_read_tensor_by_tensor_is_the_one_that_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    fields: dict[str, Any],
    lora: dict[str, Any],
    dtype: torch.dtype,
    precision: str,
) -> None:
    save(tmp_path, dtype, fields, family)
    config = adapting(tmp_path, precision, **lora)
    with monkeypatch.context() as patch:
        patch.setattr(local_model, "build_model", None)  # it is read
        *read, here = trained(config)
    monkeypatch.setattr(local_model, "_read_adapted", lambda *_: None)
    *built, expected = trained(config)
    assert read == built
    assert here.keys() == expected.keys()
    for name, tensor in expected.items():
        assert here[name].dtype == tensor.dtype, name
        assert torch.equal(here[name], tensor), name


def test_a_model_of_ones_own_is_built(tmp_path: Path) -> None:
    save(tmp_path, torch.float32, SMALL)
    config = adapting(tmp_path, "fp32")

    class Own(Numbers):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.lm_head.weight.data.zero_()
            return model

    engine = unchecked_engine(Own(config), config, Distributed(RankInfo(), CPU, timeout=60))
    assert not engine.module.lm_head.weight.any()


def highest(folder: str) -> int:
    """How far this process's memory rises while it builds the large model."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)  # freed memory goes back at once
    tiny_engine(adapting(Path(folder) / "small", "bf16"))  # whatever is loaded once is there afterwards
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    tiny_engine(adapting(Path(folder) / "large", "bf16"))
    return memory("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process took")
def test_the_base_is_never_in_memory_in_fp32(tmp_path: Path) -> None:
    save(tmp_path / "small", torch.bfloat16, SMALL)
    save(tmp_path / "large", torch.bfloat16, LARGE)
    weights = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert weights > 48 * MIB
    (taken,) = run_ranks(highest, 1, str(tmp_path))
    largest = 512 * 2048 * 4
    assert weights < taken < weights + 2 * largest + 8 * MIB < 1.5 * weights
