"""A ``ModelParallelPlan`` for each architecture. Its tensor parallelism is ours for the families of ``_OWN``, else that
of transformers' own plan; stages of a pipeline and blocks of sequence parallelism are ours (``_STAGES``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from drawbar.parallel.model_plan import ModelParallelPlan, PipelinePlan, Style
from drawbar.util.module_patterns import matching

_HUGGINGFACE: dict[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
}
"""transformers' names for the styles. A plan with others is refused: they shard experts, or need transformers' code."""

_DIVISIBLE_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"),
)
"""Config fields that the tensor-parallel degree must divide."""


@dataclass(frozen=True)
class _Family:
    """Patterns of module names, relative to the base model, as in transformers' own plans."""

    tensor: Mapping[str, Style]
    fused: Mapping[str, int] = field(default_factory=dict)
    divided_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _layers(prefix: str, colwise: str, rowwise: str) -> dict[str, Style]:
    """The styles of modules by name: ``prefix`` with each name of ``colwise`` and ``rowwise`` (separated by spaces)."""
    styles: dict[str, Style] = {prefix + name: "colwise" for name in colwise.split()}
    return styles | {prefix + name: "rowwise" for name in rowwise.split()}


_GPT2 = _Family(
    {
        "h.*.attn.c_attn": "fused_colwise",
        **_layers("h.*.", "mlp.c_fc", "attn.c_proj mlp.c_proj"),
    },
    fused={"h.*.attn.c_attn": 3},
    divided_attributes={"h.*.attn": ("split_size", "num_heads")},
)
_BERT = _Family(
    _layers(
        "encoder.layer.*.",
        "attention.self.query attention.self.key attention.self.value intermediate.dense",
        "attention.output.dense output.dense",
    ),
    divided_attributes={"encoder.layer.*.attention.self": ("num_attention_heads", "all_head_size")},
)
_BART = _Family(
    {
        **_layers("*.layers.*.", "fc1", "fc2"),
        **_layers("*.layers.*.self_attn.", "q_proj k_proj v_proj", "out_proj"),
        **_layers("decoder.layers.*.encoder_attn.", "q_proj k_proj v_proj", "out_proj"),
    },
    divided_attributes={"*.layers.*.self_attn": ("num_heads",), "decoder.layers.*.encoder_attn": ("num_heads",)},
)
_T5 = _Family(
    {
        **_layers("*.block.*.layer.*.SelfAttention.", "q k v", "o"),
        **_layers("*.block.*.layer.*.EncDecAttention.", "q k v", "o"),
        **_layers("*.block.*.layer.*.DenseReluDense.", "wi wi_0 wi_1", "wo"),
        "*.block.*.layer.*.SelfAttention.relative_attention_bias": "head_bias",
    },
    divided_attributes={
        f"*.block.*.layer.*.{name}": ("n_heads", "inner_dim") for name in ("SelfAttention", "EncDecAttention")
    },
)
_OWN = {
    "gpt2": _GPT2,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    **dict.fromkeys(("bart", "mbart"), _BART),
    **dict.fromkeys(("t5", "mt5"), _T5),
}

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "glm")
_STAGES = {
    "gpt2": PipelinePlan(
        blocks="transformer.h",
        embedding="transformer.wte",
        before=("transformer.wpe", "transformer.drop"),
        after=("transformer.ln_f",),
    ),
    **dict.fromkeys(
        _LLAMA_LIKE, PipelinePlan(blocks="model.layers", embedding="model.embed_tokens", after=("model.norm",))
    ),
    "phi": PipelinePlan(
        blocks="model.layers",
        embedding="model.embed_tokens",
        before=("model.embed_dropout",),
        after=("model.final_layernorm",),
    ),
    "gpt_neox": PipelinePlan(
        blocks="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        before=("gpt_neox.emb_dropout",),
        after=("gpt_neox.final_layer_norm",),
    ),
}

_UNFIT = frozenset({"esmc", "neomme", "qwen3_5_text", "olmo_hybrid", "gemma3n_text"})
"""Families whose layers do not fit transformers' plan for them, as it is read here: they fail in the first forward or
backward."""

_TENSOR_FAMILIES = ", ".join(sorted({*_OWN, *_LLAMA_LIKE, "phi", "gpt_neox"}))
_PIPELINE_FAMILIES = ", ".join(sorted(_STAGES))


def plan_for(model: nn.Module) -> ModelParallelPlan:
    """How the model can be sharded. It must not be sharded yet, and must have its adapters injected, if any.

    Returns:
        A plan whose ``tensor`` or ``pipeline`` is None with the reason, where the model cannot be split that way.
    """
    if not isinstance(model, PreTrainedModel):
        what = f"{type(model).__name__} is no model of transformers"
        return ModelParallelPlan(
            tensor_refusal=f"{what}: no plan shards its layers; these families have one: {_TENSOR_FAMILIES}",
            pipeline_refusal=f"{what}: no plan divides it into stages; these families have one: {_PIPELINE_FAMILIES}",
        )
    plan = _with_adapters(model, _tensor_plan(model))
    family = model.config.model_type
    stages = _STAGES.get(family)
    if stages is None:
        choice = f"these decoder-only families can be: {_PIPELINE_FAMILIES}"
        return replace(
            plan,
            sequence_refusal=f"the activations of {family} cannot be cut along the sequence; {choice}",
            pipeline_refusal=f"{family} cannot be cut into stages; {choice}",
        )
    plan = replace(plan, sequence_blocks=stages.blocks)
    if stages.head not in dict(model.named_modules()):
        return replace(
            plan, pipeline_refusal=f"a {type(model).__name__} cannot be cut into stages: only language models can be"
        )
    return replace(plan, pipeline=stages)


def _tensor_plan(model: PreTrainedModel) -> ModelParallelPlan:
    config: Any = model.config
    kind = config.model_type
    family = _OWN.get(kind)
    if family is None:
        theirs = _plan_of_transformers(model)
        unknown = set(theirs.values()) - set(_HUGGINGFACE)
        unfit = kind in _UNFIT or (kind == "cohere" and config.use_qk_norm)
        if not theirs or unknown or unfit:
            why = f"its plan has styles that are not known here ({', '.join(sorted(unknown))})"
            if not theirs:
                why = "no plan"
            elif unfit:
                why = "its plan does not fit them"
            return ModelParallelPlan(
                tensor_refusal=f"the layers of {kind} cannot be cut: {why}; these families can be: {_TENSOR_FAMILIES}"
            )
        known = {name: _HUGGINGFACE[style] for name, style in theirs.items()}
        family = _Family({**_norms_of_heads(known), **_activations(model.base_model, known), **known})
    base = next(name for name, module in model.named_modules() if module is model.base_model)
    prefix = f"{base}." if base else ""
    return ModelParallelPlan(
        tensor={**{prefix + name: style for name, style in family.tensor.items()}, **_vocabulary(model)},
        fused={prefix + name: parts for name, parts in family.fused.items()},
        divided_attributes={prefix + name: attributes for name, attributes in family.divided_attributes.items()},
        divisible_sizes=_divisible_sizes(config),
    )


def _plan_of_transformers(model: PreTrainedModel) -> dict[str, str]:
    """Styles by names relative to the base model, without the token embedding, which gets ours (``_vocabulary``)."""
    base: Any = model.base_model
    embedding = model.get_input_embeddings()
    plan = getattr(base.config, "base_model_tp_plan", None) or {}
    ours = {name for name, module in base.named_modules() if module is embedding}
    return {name: style for name, style in plan.items() if name not in ours}


def _norms_of_heads(styles: Mapping[str, Style]) -> dict[str, Style]:
    """Styles for query and key norms, which a plan may lack (Phi's does): each rank norms only its own heads."""
    attentions = [name.removesuffix(".q_proj") for name, style in styles.items() if style == "colwise"]
    return {f"{name}.{norm}": "replicated" for name in attentions for norm in ("q_layernorm", "k_layernorm")}


def _activations(base: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Styles for activation functions with parameters (XIELU, of Apertus), which plans lack: between a column- and a
    row-parallel layer, they see only a rank's shard."""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == "rowwise"}
    patterns = {f"{parent}.{name}": None for parent in parents for name in ("act_fn", "act", "activation_fn")}
    return {
        pattern: "replicated"
        for pattern in patterns
        if any(list(module.parameters()) for _, module, _ in matching(base.named_modules(), {pattern: None}))
    }


def _divisible_sizes(config: Any) -> dict[str, int]:
    found = {name: getattr(config, name, None) for name in _DIVISIBLE_FIELDS}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def _vocabulary(model: PreTrainedModel) -> dict[str, Style]:
    """The token embedding, wherever it is used, and the layer that scores the vocabulary."""
    weight = _weight(model.get_input_embeddings())
    head = model.get_output_embeddings()
    styles: dict[str, Style] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding) and module.weight is weight:
            styles[name] = "embedding"
        elif module is head and isinstance(_base(module), nn.Linear):
            styles[name] = "vocabulary"
    return styles


def _base(module: nn.Module) -> nn.Module:
    """The layer itself, without the adapter around it."""
    return getattr(module, "base_layer", module)


def _weight(module: nn.Module) -> Any:
    return _base(module).weight


def _with_adapters(model: nn.Module, plan: ModelParallelPlan) -> ModelParallelPlan:
    """The plan with styles for low-rank adapters: shards A or B, whichever has the sharded dimension."""
    if plan.tensor is None:
        return plan
    embeddings = [name for name, module in model.named_modules() if len(getattr(module, "lora_embedding_A", ()))]
    if embeddings:
        return replace(plan, tensor=None, tensor_refusal=f"the adapter of an embedding cannot be cut: {embeddings[0]}")
    tensor, fused = dict(plan.tensor), dict(plan.fused)
    for pattern, style in plan.tensor.items():
        if not any(hasattr(module, "lora_A") for _, module, _ in matching(model.named_modules(), {pattern: None})):
            continue
        tensor[f"{pattern}.base_layer"] = style
        part = "lora_A" if style.startswith("rowwise") else "lora_B"
        tensor[f"{pattern}.{part}.*"] = style
        if pattern in fused:
            fused[f"{pattern}.base_layer"] = fused[f"{pattern}.lora_B.*"] = fused[pattern]
    return replace(plan, tensor=tensor, fused=fused)
