"""Models are saved as transformers itself saves them, though no more than a file of weights is in memory."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from drawbar.models.saving import save_transformers
from drawbar.runtime.safetensors_reader import parameters_on_meta

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[type[PreTrainedModel], object]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    "tied llama": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2, tied": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "bert, with a tied bias": (BertForMaskedLM, BertConfig(**BERT)),
    "t5, with tied encoder and decoder": (T5ForConditionalGeneration, T5Config(**T5)),
    # its experts are one tensor in the model, and two for each expert in the files
    "mixtral": (MixtralForCausalLM, MixtralConfig(**LLAMA, num_local_experts=3, num_experts_per_tok=2)),
}


def files(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("largest", ["12KB", "5GB"])
@pytest.mark.parametrize("name", MODELS)
def test_the_files_are_those_of_save_pretrained(name: str, largest: str, tmp_path: Path) -> None:
    model_type, config = MODELS[name]
    torch.manual_seed(0)
    model = model_type(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=largest)
    values = model.state_dict()
    with parameters_on_meta():
        meta_boxes = model_type(config)
    (tmp_path / "ours").mkdir()
    save_transformers(meta_boxes, values.__getitem__, tmp_path / "ours", torch.float32, largest)

    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "theirs")
    assert len(theirs) > 1 or largest == "5GB"
    if name == "mixtral":  # which keeps experts that were one tensor in one file, however large
        ours, theirs = (
            {"all": {key: tensor for tensors in found.values() for key, tensor in tensors.items()}}
            for found in (ours, theirs)
        )
    assert {file: set(tensors) for file, tensors in ours.items()} == {
        file: set(tensors) for file, tensors in theirs.items()
    }
    for file, tensors in theirs.items():
        assert [key for key, tensor in tensors.items() if not torch.equal(tensor, ours[file][key])] == []
    texts = {path.name for path in (tmp_path / "theirs").glob("*.json")}
    assert {path.name for path in (tmp_path / "ours").glob("*.json")} == texts
    for text in texts - ({"model.safetensors.index.json"} if name == "mixtral" else set()):
        assert json.loads((tmp_path / "ours" / text).read_text()) == json.loads(
            (tmp_path / "theirs" / text).read_text()
        )


def test_the_weights_of_one_file_are_in_memory(tmp_path: Path) -> None:
    with parameters_on_meta():
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    living: set[str] = set()
    most = 0

    def read(name: str) -> Tensor:
        nonlocal most
        tensor = torch.zeros(model.state_dict()[name].shape)
        living.add(name)
        weakref.finalize(tensor, living.discard, name)
        most = max(most, sum(sizes[one] for one in living))
        return tensor

    save_transformers(model, read, tmp_path, torch.float32, "16KB")
    assert len(files(tmp_path)) > 3
    assert most <= 16_000 + max(sizes.values()) < sum(sizes.values()) / 2
