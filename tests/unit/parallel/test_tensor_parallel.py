"""A model that is cut over tensor-parallel ranks computes what it computes on one: loss, gradients, logits, texts."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.device_mesh import build_mesh
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.heads import Head
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.loss_head import give_loss_head, ops_after_head
from drawbar.models.plans import plan_for
from drawbar.parallel.apply import checkpoint_activations
from drawbar.parallel.chunked_loss import PLAIN, LossTargets, LossTerms, chunked_cross_entropy
from drawbar.parallel.fsdp import shard
from drawbar.parallel.styles import cross_entropy_sum, sharded_logits
from drawbar.parallel.tensor import FusedLayout, check_degree, fused_layouts, tensor_parallel
from drawbar.parallel.weights import broadcast_shards, full_tensor, materialize, named_tensors
from drawbar.runtime.safetensors_reader import parameters_on_meta
from harness import run_ranks

CPU = torch.device("cpu")
TOKENIZER = train_byte_bpe([], 258)
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
BERT = {name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"} | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    "max_position_embeddings": 32,
    "init_std": 0.3,
    "dropout": 0.0,
}


@dataclass(frozen=True)
class Case:
    family: str
    fields: dict[str, Any]
    head: Head = "causal_lm"
    vocabulary: int = 258
    lora: tuple[str, ...] = ()
    """The names of the layers that get adapters."""

    @property
    def name(self) -> str:
        tied = {True: " tied", False: " untied", None: ""}[self.fields.get("tie_word_embeddings")]
        lora = f" with adapters on {', '.join(self.lora)}" if self.lora else ""
        return f"{self.family}{tied} {self.head}, {self.vocabulary} tokens{lora}"


CASES = [
    Case("llama", {**LLAMA, "tie_word_embeddings": True}),
    Case("llama", {**LLAMA, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    Case("llama", LLAMA, "sequence_classification"),
    Case("gpt2", GPT2),
    Case("gpt2", GPT2, vocabulary=261),
    Case("bert", BERT, "masked_lm"),
    Case("bert", BERT, "masked_lm", vocabulary=261),
    Case("bert", BERT, "token_classification"),
    Case("roberta", BERT, "sequence_classification"),
    Case("roberta", BERT, "masked_lm"),
    Case("t5", T5, "seq2seq"),
    Case("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "seq2seq", vocabulary=261),
    Case("bart", BART, "seq2seq"),
    Case("glm", {**LLAMA, "head_dim": 4, "attention_bias": True}),
    Case("mistral", {**LLAMA, "sliding_window": 4, "head_dim": 4}),
    Case("qwen2", LLAMA),
    Case("qwen3", {**LLAMA, "head_dim": 4}),
    Case("phi", {**LLAMA, "qk_layernorm": True}),
    Case("gpt_neox", {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}),
    Case("llama", LLAMA, lora=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    Case("gpt2", GPT2, lora=("c_attn", "mlp.c_proj")),
]

TIED, CLASSIFIER, ODD, ADAPTED = CASES[0], CASES[2], CASES[4], CASES[-1]
SEQUENCES = [
    TIED,
    CASES[3],
    *(case for case in CASES if case.family in ("glm", "qwen3", "phi", "gpt_neox") or case.lora),
]
LOSS_HEADS = [TIED, ODD, Case("bert", BERT, "masked_lm", vocabulary=261), Case("gemma2", {**LLAMA, "head_dim": 4})]
SHARDED = [TIED, ODD, Case("t5", T5, "seq2seq", vocabulary=261), ADAPTED]


def build(case: Case) -> nn.Module:
    labels = {"num_labels": 3} if case.head.endswith("classification") else {}
    model = build_from_scratch(
        case.family, {**case.fields, "vocab_size": case.vocabulary}, TOKENIZER, case.head, **labels
    )
    if case.lora:
        config = LoraConfig(
            r=2, target_modules=list(case.lora), init_lora_weights=False, fan_in_fan_out=case.family == "gpt2"
        )
        inject_adapter_in_model(config, model)
    return model.train()


def filled(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = build(case)
    for parameter in model.parameters():  # biases and norms too: none may be neutral
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


TERMS = LossTerms(label_smoothing=0.1, z_loss=0.01)


def inputs(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Three rows of 7 tokens, the last ends early."""
    chance = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(1, case.vocabulary, (3, 7), generator=chance)
    tokens_BL[2, 5:] = TOKENIZER.pad_token_id
    found = {"input_ids": tokens_BL, "attention_mask": (tokens_BL != TOKENIZER.pad_token_id).long()}
    if case.head == "seq2seq":
        found["decoder_input_ids"] = torch.randint(1, case.vocabulary, (3, 5), generator=chance)
    return found


def loss_of(model: nn.Module, case: Case, batch: dict[str, Tensor], terms: LossTerms) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    chance = torch.Generator().manual_seed(1)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=chance)
    if labels.ndim == 2:
        labels[0, 2:4] = IGNORED_LABEL
    if case.head in ("causal_lm", "masked_lm", "seq2seq"):
        logits, labels = logits[:, :-1], labels[:, :-1]
    return cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), labels.flatten(), IGNORED_LABEL, terms)


def backward(model: nn.Module, case: Case, batch: dict[str, Tensor], terms: LossTerms = PLAIN) -> Tensor:
    with sharded_logits():
        loss = loss_of(model, case, batch, terms)
        loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    fused = fused_layouts(model)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: full_tensor(grad, fused.get(name)) for name, grad in found.items() if grad is not None}


def distance(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """Relative to the size of what is wanted, or to ``least`` where that is almost nothing."""
    return float((found - wanted).norm() / max(float(wanted.norm()), least))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    assert found.keys() == wanted.keys()
    # keys' biases have no gradient but for rounding: softmax does not see them
    least = 1e-3 * max(float(grad.norm()) for grad in wanted.values())
    return max((distance(found[name], grad, least), name) for name, grad in wanted.items())


class Collectives(TorchDispatchMode):
    """Notes which collectives run, and how many products of matrices DTensor plans."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.planned = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it will come down to plain tensors
            self.planned += func in (
                torch.ops.aten.mm.default,
                torch.ops.aten.addmm.default,
                torch.ops.aten.bmm.default,
            )
            return NotImplemented
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def compare(case: Case, mesh: DeviceMesh, sequence: bool = False, length: int = 7) -> dict[str, Any]:
    model = filled(case)
    cut = deepcopy(model)
    tensor_parallel(cut, plan_for(cut), mesh, sequence)
    assert all(isinstance(parameter, DTensor) for parameter in cut.parameters())
    assert list(dict(cut.named_parameters())) == list(dict(model.named_parameters()))  # tied ones too
    tokens = []
    if sequence:
        checkpoint_activations(cut, "full")
        last = dict(cut.named_modules())[f"{plan_for(cut).sequence_blocks}.1"]
        last.register_forward_pre_hook(lambda module, args: tokens.append(args[0].shape[1]))
    batch = {name: tensor[:, :length] for name, tensor in inputs(case).items()}
    with Collectives() as collectives:
        loss = backward(cut, case, batch)
    wanted_loss = backward(model, case, batch)
    assert not sequence or tokens == [(length + 1) // 2 if dist.get_rank() == 0 else length // 2]
    largest, name = worst(gradients(cut), gradients(model))
    with torch.no_grad():
        logits, wanted = cut.eval()(**batch).logits, model.eval()(**batch).logits
    assert type(logits) is Tensor or not isinstance(logits, DTensor)
    found = {
        "loss": distance(loss, wanted_loss),
        "gradient": largest,
        "worst": name,
        "logits": distance(logits, wanted),
        "planned": collectives.planned,
    }
    if case.family != "glm" and not sequence:  # whose own plan gathers inside its blocks; logits are gathered nowhere
        found["collectives"] = collectives.names
    if case.head in ("causal_lm", "seq2seq") and not sequence:
        found["same text"] = torch.equal(written(cut, batch), written(model, batch))
    return found


def compare_loss_heads(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """The loss computed in the head, of a shard of the vocabulary, beside that of the full logits of one process."""
    model = filled(case)
    cut = deepcopy(model)
    give_loss_head(cut, partial(chunked_cross_entropy, chunk=4, terms=TERMS), ops_after_head(model))
    tensor_parallel(cut, plan_for(cut), mesh)
    batch = inputs(case)
    wanted_loss = backward(model, case, batch, TERMS)
    with sharded_logits():
        loss = cut(**batch, **targets_of_loss(case), use_cache=False).loss
        loss.backward()
    largest, name = worst(gradients(cut), gradients(model))
    with torch.no_grad():
        plain_loss = loss_of(model, case, batch, PLAIN)
        again = cut(**batch, **targets_of_loss(case), use_cache=False).loss
        logits, wanted = cut(**batch).logits, model(**batch).logits
    return {
        "loss": max(distance(loss.detach(), wanted_loss), distance(again, plain_loss)),
        "gradient": largest,
        "worst": name,
        "logits": distance(logits, wanted),
    }


def targets_of_loss(case: Case) -> dict[str, Tensor]:
    """Those of ``loss_of``."""
    chance = torch.Generator().manual_seed(1)
    labels = torch.randint(0, case.vocabulary, (3, 7), generator=chance)
    labels[0, 2:4] = labels[:, -1] = IGNORED_LABEL
    targets = LossTargets.of(labels, IGNORED_LABEL)
    return {"target_positions": targets.positions_N, "target_labels": targets.labels_BL}


def written(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    row = {name: tensor[:1] for name, tensor in batch.items() if name != "decoder_input_ids"}
    return model.generate(**row, max_new_tokens=3, do_sample=False)


def sharded_too(case: Case, mesh: DeviceMesh, dp_rank: int, sequence: bool = False) -> dict[str, Any]:
    """Built without weights, cut, computed again in the backward pass, and sharded: in the engines' order."""
    with parameters_on_meta():
        cut = build(case)
    tensor_parallel(cut, plan_for(cut), mesh["tp"], sequence)
    checkpoint_activations(cut, "full")
    shard(cut, mesh["dp_shard"], ParallelSection(strategy="fsdp"), "fp32")
    materialize(cut, CPU, CPU)
    model = filled(case)
    broadcast_shards(named_tensors(cut), model, fused_layouts(cut), CPU)
    batches = [inputs(case, seed) for seed in range(2)]
    wanted_loss = [backward(model, case, batch) for batch in batches]
    loss = backward(cut, case, batches[dp_rank])
    averaged = {name: grad / 2 for name, grad in gradients(model).items()}
    largest, name = worst(gradients(cut), averaged)
    return {"loss": distance(loss, wanted_loss[dp_rank]), "gradient": largest, "worst": name}


def rank_shards() -> dict[str, Any]:
    dims = ParallelDims(dp_shard=2, tp=2)
    torch.set_num_threads(1)
    found = {}
    place = RankInfo.from_environment()
    with Distributed(place, CPU, timeout=60, dims=dims):
        mesh = build_mesh(dims, CPU)
        for case in SHARDED:
            found[case.name] = sharded_too(case, mesh, dims.dp_rank(place.rank))
        found["cut along the sequence"] = sharded_too(ODD, mesh, dims.dp_rank(place.rank), sequence=True)
    return found


def rank_compares() -> dict[str, Any]:
    dims = ParallelDims(tp=2)
    torch.set_num_threads(1)
    found = {}
    with Distributed(RankInfo.from_environment(), CPU, timeout=60, dims=dims):
        mesh = build_mesh(dims, CPU)["tp"]
        for case in CASES:
            found[case.name] = compare(case, mesh)
        for case in SEQUENCES:
            found[f"{case.name}, cut along the sequence"] = compare(case, mesh, sequence=True)
        for case in LOSS_HEADS:
            found[f"{case.name}, loss in the head"] = compare_loss_heads(case, mesh)
        found["one token for two ranks"] = compare(CLASSIFIER, mesh, sequence=True, length=1)
    return found


def check(results: list[dict[str, Any]], cases: int) -> None:
    for found in results:
        assert len(found) == cases
        for name, result in found.items():
            assert result["loss"] <= 1e-5, (name, result)
            assert result["gradient"] <= 1e-4, (name, result)
            assert result.get("logits", 0.0) <= 1e-5, (name, result)
            assert result.get("same text", True), (name, result)
            assert result.get("collectives", {"all_reduce"}) == {"all_reduce"}, (name, result)
            assert result.get("planned", 0) <= 3, (name, result)  # the head's: forward, and backward for both factors


def test_two_ranks_compute_what_one_computes() -> None:
    check(run_ranks(rank_compares, 2), len(CASES) + len(SEQUENCES) + len(LOSS_HEADS) + 1)


@pytest.mark.exhaustive
def test_four_ranks_that_also_shard_the_parts_compute_what_one_computes() -> None:
    check(run_ranks(rank_shards, 4), len(SHARDED) + 1)


def test_packed_tensors_come_back() -> None:
    logical = torch.arange(2 * 3 * 4 * 5).reshape(2, 60)
    fused = FusedLayout(dim=1, parts=3, degree=4)
    stored = fused.to_sharded(logical)
    # the second rank's part of each of the three layers
    assert torch.equal(
        stored[:, 15:30], torch.cat([logical[:, start + 5 : start + 10] for start in (0, 20, 40)], dim=1)
    )
    assert torch.equal(fused.to_logical(stored), logical)


def test_a_degree_that_divides_not_all_names_those_that_do() -> None:
    with pytest.raises(UserError, match="num_key_value_heads is 6, which 4 tensor-parallel ranks") as caught:
        check_degree({"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}, 4)
    assert caught.value.where == "parallel.tensor"
    assert caught.value.remedy == "set parallel.tensor to 1, 2, 3 or 6"
    check_degree({"num_attention_heads": 12, "num_key_value_heads": 6}, 3)
