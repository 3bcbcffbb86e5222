"""Every name of a plan is one of the model's, and what cannot be cut says why."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from drawbar.config.schema.run_config import LoraSection
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models.heads import Head
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.lora import add_adapters
from drawbar.models.plans import plan_for

TOKENIZER = train_byte_bpe([], 257)
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    "max_position_embeddings": 32,
}
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "glm": {**LLAMA, "head_dim": 4, "num_key_value_heads": 2},
    **{family: {**LLAMA, "num_key_value_heads": 2} for family in ("llama", "mistral", "qwen2", "qwen3", "phi")},
    "gpt_neox": LLAMA,
}
MODELS: list[tuple[str, dict[str, Any], Head]] = [
    *((family, fields, "causal_lm") for family, fields in DECODERS.items()),
    *((family, LLAMA, "masked_lm") for family in ("bert", "roberta", "xlm-roberta", "camembert")),
    *((family, T5, "seq2seq") for family in ("t5", "mt5")),
    *((family, BART, "seq2seq") for family in ("bart", "mbart")),
]


def build(family: str, fields: dict[str, Any], head: Head = "causal_lm") -> nn.Module:
    return build_from_scratch(family, fields, TOKENIZER, head)


def unmatched(patterns: Iterable[str], model: nn.Module) -> set[str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return {
        pattern
        for pattern in patterns
        if not any(re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) for name in names)
    }


@pytest.mark.parametrize(("family", "fields", "head"), MODELS)
def test_a_tensor_plan_names_modules_of_the_model(family: str, fields: dict[str, Any], head: Head) -> None:
    model = build(family, fields, head)
    plan = plan_for(model)
    assert plan.tensor is not None
    optional = ("q_layernorm", "k_layernorm", ".wi", ".wi_0", ".wi_1")  # as the config says
    missing = {name for name in unmatched(plan.tensor, model) if not name.endswith(optional)}
    assert missing == set()
    assert unmatched(plan.fused, model) == set()
    assert unmatched(plan.divided_attributes, model) == set()
    names = dict(model.named_modules(remove_duplicate=False))
    assert plan.tensor[next(name for name, m in names.items() if m is model.get_output_embeddings())] == "vocabulary"
    assert plan.tensor[next(name for name, m in names.items() if m is model.get_input_embeddings())] == "embedding"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "encoder_attention_heads": 4}
    assert plan.divisible_sizes.items() & heads.items()


def test_every_use_of_a_shared_embedding_is_cut() -> None:
    for family, fields, prefix in (("t5", T5, ""), ("bart", BART, "model.")):
        plan = plan_for(build(family, fields, "seq2seq"))
        assert plan.tensor is not None
        embeddings = {name for name, style in plan.tensor.items() if style == "embedding"}
        assert embeddings == {f"{prefix}{name}" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")}


@pytest.mark.parametrize("family", DECODERS)
def test_a_pipeline_plan_names_all_that_a_decoder_has(family: str) -> None:
    model = build(family, DECODERS[family])
    stages = plan_for(model).pipeline
    assert stages is not None
    named = {stages.blocks, stages.embedding, *stages.before, *stages.after, stages.head}
    assert unmatched(named, model) == set()
    parts = {name for name, _ in model.base_model.named_children()}
    inside = {name.rpartition(".")[2] for name in named - {stages.head}}
    assert parts - inside <= {"rotary_emb"}  # which has no weights, and is needed in each stage


def test_adapters_are_cut_like_the_layers_that_they_adapt() -> None:
    model = add_adapters(build("llama", DECODERS["llama"]), LoraSection(rank=2, modules=["q_proj", "o_proj"]))
    plan = plan_for(model)
    assert plan.tensor is not None
    q_proj, o_proj = "model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.o_proj"
    assert {name: style for name, style in plan.tensor.items() if name.startswith((f"{q_proj}.", f"{o_proj}."))} == {
        f"{q_proj}.base_layer": "colwise",
        f"{q_proj}.lora_B.*": "colwise",
        f"{o_proj}.base_layer": "rowwise",
        f"{o_proj}.lora_A.*": "rowwise",
    }


def test_an_activation_function_with_parameters_sees_a_shard() -> None:
    plan = plan_for(build("apertus", {**DECODERS["llama"], "hidden_act": "xielu"}))
    assert plan.tensor is not None
    assert plan.tensor["model.layers.*.mlp.act_fn"] == "replicated"
    assert "model.layers.*.mlp.act_fn" not in (plan_for(build("llama", DECODERS["llama"])).tensor or {})


def test_the_adapter_of_packed_layers_is_packed_too() -> None:
    plan = plan_for(add_adapters(build("gpt2", GPT2), LoraSection(rank=2, modules=["c_attn"])))
    name = "transformer.h.*.attn.c_attn"
    assert plan.fused == {name: 3, f"{name}.base_layer": 3, f"{name}.lora_B.*": 3}


@pytest.mark.parametrize(
    ("make", "tensor", "pipeline"),
    [
        (lambda: nn.Linear(2, 2), "Linear is no model of transformers.*bart, bert, camembert", "Linear is no model"),
        (lambda: build("gptj", {**GPT2, "rotary_dim": 4}), "", "gptj cannot be cut into stages.*glm, gpt2, gpt_neox"),
        (lambda: build("bert", LLAMA, "masked_lm"), "", "bert cannot be cut into stages; these decoder-only families"),
        (
            lambda: build("llama", DECODERS["llama"], "sequence_classification"),
            "",
            "a LlamaForSequenceClassification cannot be cut into stages: only language models",
        ),
        (lambda: build("opt", OPT), "the layers of opt cannot be cut: no plan", "opt cannot be cut into stages"),
        (
            lambda: build("cohere", {**DECODERS["llama"], "use_qk_norm": True}),
            "the layers of cohere cannot be cut: its plan does not fit them",
            "cohere cannot",
        ),
        (
            lambda: add_adapters(build("gpt2", GPT2), LoraSection(rank=2, modules=["wpe", "c_proj"])),
            "the adapter of an embedding cannot be cut: transformer.wpe",
            "",
        ),
        (
            lambda: build("mixtral", {**DECODERS["llama"], "num_local_experts": 2}),
            "the layers of mixtral cannot be cut: its plan has styles that are not known here",
            "mixtral cannot",
        ),
    ],
)
def test_what_cannot_be_cut_says_why(make: Any, tensor: str, pipeline: str) -> None:
    plan = plan_for(make())
    assert (plan.tensor is None) == bool(plan.tensor_refusal)
    assert (plan.pipeline is None) == bool(pipeline)
    if tensor:
        assert re.match(tensor, plan.tensor_refusal)
    assert re.match(pipeline, plan.pipeline_refusal)


def test_sequences_are_cut_between_the_blocks_of_decoders_alone() -> None:
    assert plan_for(build("llama", DECODERS["llama"], "sequence_classification")).sequence_blocks == "model.layers"
    plan = plan_for(build("bert", LLAMA, "masked_lm"))
    assert plan.sequence_blocks is None
    assert "bert cannot be cut along the sequence; these decoder-only families" in plan.sequence_refusal
