"""Pretrained weights: safetensors alone, exactly as they were saved, in fp32, once in memory."""

import gzip
import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, T5Config, T5Model

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.huggingface import fit_embeddings, load_pretrained
from drawbar.models.stored import build_meta_model, stored_tensors
from harness import run_ranks
from memory import memory
from tiny import ARCHITECTURES

FIELDS = {"vocab_size": 257, **ARCHITECTURES["llama"]}


def save(
    folder: Path, tied: bool = False, shard_size: str = "5GB", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**FIELDS, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(str(folder), max_shard_size=shard_size)
    return model


def assert_equal(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    tensors = expected.state_dict()
    assert found.state_dict().keys() == tensors.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensors[name].float()), name


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_those_that_were_saved(tied: bool, shard_size: str, tmp_path: Path) -> None:
    saved = save(tmp_path, tied, shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    model = load_pretrained(str(tmp_path))
    assert_equal(model, saved)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_smaller_types_become_fp32(tmp_path: Path) -> None:
    saved = save(tmp_path, dtype=torch.bfloat16)
    assert_equal(load_pretrained(str(tmp_path)), saved)


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.trace,)


def test_files_that_need_unpickling_are_refused(tmp_path: Path) -> None:
    saved = save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    trace = tmp_path / "unpickled"
    torch.save({**saved.state_dict(), "trap": Trap(str(trace))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"safetensors[\s\S]*task.model"):
        load_pretrained(str(tmp_path))
    assert not trace.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    saved = save(tmp_path)
    trace = tmp_path / "unpickled"
    torch.save({"trap": Trap(str(trace))}, tmp_path / "pytorch_model.bin")
    assert_equal(load_pretrained(str(tmp_path)), saved)
    assert not trace.exists()


@pytest.mark.parametrize("damage", ["no weights", "no config", "cut short", "no folder"])
def test_a_folder_without_a_model_is_refused(damage: str, tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    match damage:
        case "no weights":
            weights.unlink()
        case "no config":
            (tmp_path / "config.json").unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "no folder":
            shutil.rmtree(tmp_path)
    with pytest.raises(UserError) as caught:
        load_pretrained(str(tmp_path))
    assert caught.value.where == "task.model"
    assert caught.value.remedy
    assert str(tmp_path) in caught.value.what


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n".encode()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("model.safetensors", LFS, "is a Git LFS pointer"),
        ("model.safetensors", gzip.compress(b"weights", mtime=0), "is a gzip file"),
        ("model.safetensors", b"<html><body>Sign in</body></html>", "is a page of HTML"),
        ("model.safetensors", pickle.dumps({"weight": 1}), "is a pickle"),
        ("config.json", LFS, "is a Git LFS pointer"),
        ("generation_config.json", LFS, "is a Git LFS pointer"),
        ("adapter_config.json", b"{}", "holds adapters"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_of_a_model_that_is_something_else_is_named(
    name: str, content: bytes, what: str, sharded: bool, tmp_path: Path
) -> None:
    saved = save(tmp_path)
    (tmp_path / name).write_bytes(content)
    if name.startswith("adapter"):
        (tmp_path / "config.json").unlink()
    with pytest.raises(UserError) as caught:
        stored_tensors(str(tmp_path), saved) if sharded else load_pretrained(str(tmp_path))
    assert what in caught.value.what
    assert str(tmp_path) in caught.value.what
    assert caught.value.where == "task.model"


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    T5Model(T5Config(vocab_size=99, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"t5 is no causal language model[\s\S]*task.model"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    "field",
    [
        {"hidden_size": "wide"},
        {"hidden_size": 32},
        {"num_attention_heads": 0},
        {"model_type": "llamma"},
        {"hidden_act": "x"},
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused(field: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **field}))
    with pytest.raises(UserError) as caught:
        load_pretrained(str(tmp_path))
    assert caught.value.where == "task.model"
    assert caught.value.remedy


def test_weights_that_are_not_there_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path).model.save_pretrained(str(tmp_path))  # without the output head
    with caplog.at_level(logging.WARNING, logger="drawbar"):
        load_pretrained(str(tmp_path))
    assert "lm_head.weight" in caplog.text


@pytest.mark.parametrize("part_by_part", [False, True])
def test_weights_without_a_place_are_named(
    part_by_part: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    tensors |= {name: torch.zeros(4) for name in ("score.weight", "model.layers.1.self_attn.rotary_emb.inv_freq")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="drawbar"):
        if part_by_part:
            stored_tensors(str(tmp_path), build_meta_model(str(tmp_path)))
        else:
            load_pretrained(str(tmp_path))
    (said,) = set(caplog.messages)
    assert said.endswith("they are left out: model.layers.2.mlp.up_proj.weight")


def load_and_measure(folder: str) -> tuple[int, int]:
    """Bytes of the model, and how far the memory of this process rose at its highest while it was loaded."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = memory("VmRSS")
    model = load_pretrained(folder)
    highest = memory("VmHWM")
    for parameter in model.parameters():
        parameter.data.add_(0)  # all of it is in memory, and can be written
    return sum(parameter.nbytes for parameter in model.parameters()), max(highest, memory("VmHWM")) - before


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process took")
def test_there_is_one_copy_in_memory(tmp_path: Path) -> None:
    fields = {**FIELDS, "vocab_size": 50_000, "hidden_size": 512}
    AutoModelForCausalLM.from_config(LlamaConfig(**fields)).save_pretrained(str(tmp_path))
    ((size, growth),) = run_ranks(load_and_measure, 1, str(tmp_path))
    assert size > 200e6
    assert growth > 0.9 * size  # it was measured at all
    assert growth < 1.6 * size


def embeddings(model: torch.nn.Module) -> int:
    return model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_change_only_when_asked(tied: bool, tmp_path: Path) -> None:
    model = save(tmp_path, tied)
    before = model.get_input_embeddings().weight.detach().clone()
    larger, smaller = train_byte_bpe(["abab"] * 9, 259), train_byte_bpe([], 257)

    fit_embeddings(model, smaller, resize=False)
    assert embeddings(model) == 257
    with pytest.raises(UserError, match=r"259 tokens[\s\S]*257[\s\S]*task.resize_embeddings=true"):
        fit_embeddings(model, larger, resize=False)
    assert embeddings(model) == 257

    fit_embeddings(model, larger, resize=True)
    assert embeddings(model) == model.config.vocab_size == model.lm_head.out_features == 259
    assert torch.equal(model.get_input_embeddings().weight[:257], before)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_spare_embeddings_are_kept(tmp_path: Path) -> None:
    """Many models have more rows than tokens, for a round number: they still fit."""
    model = save(tmp_path)
    tokenizer = train_byte_bpe([], 257)
    model.resize_token_embeddings(320)
    fit_embeddings(model, tokenizer, resize=False)
    assert embeddings(model) == 320
    fit_embeddings(model, tokenizer, resize=True)
    assert embeddings(model) == 257
