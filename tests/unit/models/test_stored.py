"""A pretrained model built without weights and filled from its files is the one that from_pretrained gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from drawbar.config.schema.run_config import LoraSection
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.heads import HEADS, Head
from drawbar.models.huggingface import build_from_scratch, fit_embeddings, load_pretrained
from drawbar.models.lora import add_adapters
from drawbar.models.stored import _paths, build_meta_model, stored_tensors
from drawbar.runtime.safetensors_reader import parameters_on_meta
from exhaustive import some

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4}
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
FAMILIES: list[tuple[str, Head, dict[str, Any]]] = [
    ("llama", "causal_lm", LLAMA),
    ("llama", "causal_lm", {**LLAMA, "tie_word_embeddings": True}),
    ("gpt2", "causal_lm", GPT2),
    ("bert", "masked_lm", BERT),
    ("roberta", "masked_lm", BERT),
    ("t5", "seq2seq", T5),
    ("t5", "seq2seq", {**T5, "tie_word_embeddings": False}),
    ("bart", "seq2seq", BART),
    ("gpt_neox", "causal_lm", BERT),
    ("phi", "causal_lm", {**BERT, "partial_rotary_factor": 0.5}),
    ("qwen3", "causal_lm", {**LLAMA, "head_dim": 4}),
    ("glm", "causal_lm", {**LLAMA, "head_dim": 4}),
    ("mistral", "causal_lm", LLAMA),
]
VOCABULARY = 67


def saved(folder: Path, family: str, head: Head, fields: dict[str, Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    # small numbers, so that the special tokens of big vocabularies must not lie outside
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **tokens, **fields)
    model = HEADS[head].model_class.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # no two are equal, as zeros and ones are
    model.save_pretrained(folder, **options)
    return model


def filled(folder: Path, structure: nn.Module) -> nn.Module:
    tensors = stored_tensors(str(folder), structure)
    assert tensors is not None
    for name, parameter in dict(structure.named_parameters(remove_duplicate=False)).items():
        if parameter.is_meta:
            full = nn.Parameter(tensors[name].float(), requires_grad=parameter.requires_grad)
            for module in structure.modules():
                for leaf, present in module._parameters.items():
                    if present is parameter:
                        module._parameters[leaf] = full
    return structure


def ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    return {frozenset(group) for group in names.values()}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """They are one model: weights, ties, buffers, mode, configs, and what they compute, all bit for bit."""
    assert type(found) is type(expected)
    assert ties(found) == ties(expected)
    assert found.all_tied_weights_keys == expected.all_tied_weights_keys
    assert found.state_dict().keys() == expected.state_dict().keys()
    tensors = dict([*found.named_parameters(), *found.named_buffers()])
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert tensors.pop(name).equal(tensor), name
        assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
    assert not tensors
    assert [m.training for m in found.modules()] == [m.training for m in expected.modules()]
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.config._attn_implementation == expected.config._attn_implementation
    assert found.config.name_or_path == expected.config.name_or_path
    if expected.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    inputs = {"input_ids": torch.arange(24).view(2, 12) + 3}
    if expected.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(10).view(2, 5) + 3
    with torch.no_grad():
        assert found(**inputs).logits.equal(expected(**inputs).logits)


@pytest.mark.parametrize(
    ("family", "head", "fields"), some(FAMILIES, 7), ids=[f"{f[0]}-{n}" for n, f in enumerate(FAMILIES)]
)
def test_the_structure_filled_from_files_is_the_pretrained_model(
    tmp_path: Path, family: str, head: Head, fields: dict[str, Any]
) -> None:
    saved(tmp_path, family, head, fields, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    random_numbers = torch.get_rng_state()
    structure = build_meta_model(str(tmp_path), head)
    assert torch.get_rng_state().equal(random_numbers)
    assert all(parameter.is_meta for parameter in structure.parameters())
    assert not any(buffer.is_meta for buffer in structure.buffers())
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path), head))


def test_smaller_types_are_read_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "causal_lm", LLAMA).bfloat16().save_pretrained(tmp_path)
    structure = build_meta_model(str(tmp_path))
    tensors = stored_tensors(str(tmp_path), structure)
    assert tensors is not None
    assert {tensors.dtype(name) for name in tensors} == {torch.bfloat16}
    assert {parameter.dtype for parameter in structure.parameters()} == {torch.float32}
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path)))


def test_the_body_alone_has_names_without_its_prefix(tmp_path: Path) -> None:
    """As gpt2 is on the hub: ``h.0.attn``, and not ``transformer.h.0.attn``; the tied head is not there."""
    saved(tmp_path, "gpt2", "causal_lm", GPT2).transformer.save_pretrained(tmp_path)
    assert "h.0.ln_1.bias" in load_file(tmp_path / "model.safetensors")
    structure = build_meta_model(str(tmp_path))
    tensors = stored_tensors(str(tmp_path), structure)
    assert tensors is not None
    assert {"transformer.h.0.ln_1.bias", "lm_head.weight"} <= tensors.keys()
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path)))


def test_a_head_that_is_in_the_files_is_not_new(tmp_path: Path) -> None:
    saved(tmp_path, "bert", "sequence_classification", {**BERT, "num_labels": 3})
    structure = build_meta_model(str(tmp_path), "sequence_classification")
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path), "sequence_classification"))


def test_old_names_are_understood(tmp_path: Path) -> None:
    saved(tmp_path, "bert", "masked_lm", BERT)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    structure = build_meta_model(str(tmp_path), "masked_lm")
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path), "masked_lm"))


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_weights_that_are_tied_by_the_config_may_be_stored_twice(tmp_path: Path, family: str, differs: bool) -> None:
    head: Head = "causal_lm" if family == "llama" else "seq2seq"
    saved(tmp_path, family, head, {**(LLAMA if family == "llama" else T5), "tie_word_embeddings": True})
    weights = load_file(tmp_path / "model.safetensors")
    source = "model.embed_tokens.weight" if family == "llama" else "shared.weight"
    weights["lm_head.weight"] = weights[source] + differs
    if differs and family == "t5":
        weights["decoder.embed_tokens.weight"] = weights.pop(source)  # and the encoder's is that one, in another place
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    structure = build_meta_model(str(tmp_path), head)
    loaded = load_pretrained(str(tmp_path), head)
    ties = [model.lm_head.weight is model.get_input_embeddings().weight for model in (structure, loaded)]
    assert ties[0] == ties[1]  # of differing ones without their source, versions of transformers keep different ones
    assert differs or ties[0]
    assert_same(filled(tmp_path, structure), loaded)


def test_stored_buffers_are_loaded(tmp_path: Path) -> None:
    saved(tmp_path, "bart", "seq2seq", BART)
    weights = load_file(tmp_path / "model.safetensors")
    weights["final_logits_bias"] = torch.randn(1, VOCABULARY)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    structure = build_meta_model(str(tmp_path), "seq2seq")
    assert structure.final_logits_bias.equal(weights["final_logits_bias"])
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path), "seq2seq"))


def test_how_to_generate_comes_from_its_own_file_or_from_the_config(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2", "causal_lm", GPT2)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.25, "do_sample": True}))
    assert build_meta_model(str(tmp_path)).generation_config.temperature == 0.25
    assert_same(filled(tmp_path, build_meta_model(str(tmp_path))), load_pretrained(str(tmp_path)))
    (tmp_path / "generation_config.json").unlink()
    assert_same(filled(tmp_path, build_meta_model(str(tmp_path))), load_pretrained(str(tmp_path)))


def test_what_is_not_in_the_files_as_it_is_is_left_to_transformers(tmp_path: Path) -> None:
    bert, mixtral, llama = tmp_path / "bert", tmp_path / "mixtral", tmp_path / "llama"
    saved(bert, "bert", "masked_lm", BERT)
    saved(mixtral, "mixtral", "causal_lm", {**LLAMA, "num_local_experts": 2})
    saved(llama, "llama", "causal_lm", LLAMA)

    new_head = build_meta_model(str(bert), "token_classification", num_labels=5)
    assert new_head.classifier.out_features == 5
    assert stored_tensors(str(bert), new_head) is None

    assert stored_tensors(str(mixtral), build_meta_model(str(mixtral))) is None  # experts are stored one by one

    structure = build_meta_model(str(llama))
    structure.config.quantization_config = {"quant_method": "fp8"}
    assert stored_tensors(str(llama), structure) is None

    structure = build_meta_model(str(llama))
    assert stored_tensors(str(llama), structure) is not None
    structure.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert structure.lm_head.weight.shape == (VOCABULARY + 3, 16)
    assert stored_tensors(str(llama), structure) is None


@pytest.mark.parametrize("damage", ["no weights", "cut short", "no part", "no config", "no such head"])
def test_folders_are_refused_as_load_pretrained_does(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, "llama", "causal_lm", LLAMA, max_shard_size="8KB" if damage == "no part" else "1GB")
    head: Head = "causal_lm"
    match damage:
        case "no weights":
            (tmp_path / "model.safetensors").unlink()
        case "cut short":
            weights = tmp_path / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "no part":
            sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
        case "no config":
            (tmp_path / "config.json").unlink()
        case "no such head":
            head = "masked_lm"
    with pytest.raises(UserError) as expected:
        load_pretrained(str(tmp_path), head)
    with pytest.raises(UserError) as caught:
        build_meta_model(str(tmp_path), head)
    assert caught.value.where == expected.value.where == "task.model"
    assert caught.value.remedy == expected.value.remedy


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_from_scratch_have_structures_too(family: str) -> None:
    tokenizer = train_byte_bpe([], 257)
    fields = LLAMA if family == "llama" else GPT2
    torch.manual_seed(0)
    expected = build_from_scratch(family, fields, tokenizer)
    with parameters_on_meta():
        structure = build_from_scratch(family, fields, tokenizer)
        fit_embeddings(structure, tokenizer, resize=False)
    assert all(parameter.is_meta for parameter in structure.parameters())
    assert ties(structure) == ties(expected)
    buffers = dict(structure.named_buffers())
    assert all(buffers[name].equal(buffer) for name, buffer in expected.named_buffers())


def test_adapters_on_a_structure_are_without_values_too(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "causal_lm", LLAMA)
    with parameters_on_meta():
        structure = add_adapters(build_meta_model(str(tmp_path)), LoraSection())
    expected = add_adapters(load_pretrained(str(tmp_path)), LoraSection())
    assert all(parameter.is_meta for parameter in structure.parameters())
    assert {name: (p.shape, p.requires_grad) for name, p in structure.named_parameters()} == {
        name: (p.shape, p.requires_grad) for name, p in expected.named_parameters()
    }


def test_from_pretrained_itself_gives_a_structure(tmp_path: Path) -> None:
    """What a user's own task calls: its rotary frequencies must not be lost."""
    saved(tmp_path, "llama", "causal_lm", LLAMA)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    with parameters_on_meta():
        structure = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(parameter.is_meta for parameter in structure.parameters())
    buffers = dict(structure.named_buffers())
    assert len(buffers) > 0
    assert all(buffers[name].equal(buffer) for name, buffer in expected.named_buffers())
    assert_same(filled(tmp_path, structure), expected)


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
def test_files_of_the_hub_are_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--something"
    snapshot = repository / "snapshots" / ("0" * 40)
    saved(snapshot, "llama", "causal_lm", LLAMA, max_shard_size=shard_size)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert _paths("somebody/something", local_files_only=True) == sorted(snapshot.glob("model*.safetensors"))


@pytest.mark.parametrize(("family", "head", "fields"), [("llama", "causal_lm", LLAMA), ("bert", "masked_lm", BERT)])
def test_fields_of_the_task_are_set(tmp_path: Path, family: str, head: Head, fields: dict[str, Any]) -> None:
    saved(tmp_path, family, head, fields)
    wanted = {"_attn_implementation": "eager", "id2label": {0: "no", 1: "yes", 2: "perhaps"}}
    structure = build_meta_model(str(tmp_path), head, **wanted)
    assert structure.config._attn_implementation == "eager"
    assert structure.config.num_labels == 3
    assert_same(filled(tmp_path, structure), load_pretrained(str(tmp_path), head, **wanted))
