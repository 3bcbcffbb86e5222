"""Heads that compute the loss: loss and gradients are those of the model's own logits, whatever it does to them."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models.heads import Head
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.loss_head import LogitOps, UnknownHead, give_loss_head, ops_after_head
from drawbar.parallel.chunked_loss import LossTargets, chunked_cross_entropy
from step_operators import StepOperators

VOCABULARY = 257
TOKENIZER = train_byte_bpe([], VOCABULARY)
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
BERT = {name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    "dropout": 0.0,
}
Family = tuple[str, dict[str, Any], Head, int]
FAMILIES: list[Family] = [  # the last: how many operators follow the head
    ("llama", {**LLAMA, "tie_word_embeddings": False}, "causal_lm", 0),
    ("llama", {**LLAMA, "tie_word_embeddings": True}, "causal_lm", 0),
    ("gpt2", GPT2, "causal_lm", 0),
    ("gemma2", {**LLAMA, "head_dim": 4, "final_logit_softcapping": 2.0}, "causal_lm", 3),
    ("cohere", {**LLAMA, "logit_scale": 0.3}, "causal_lm", 1),
    ("granite", {**LLAMA, "logits_scaling": 3.0}, "causal_lm", 1),
    ("bert", BERT, "masked_lm", 0),
    ("t5", T5, "seq2seq", 0),
    ("t5", {**T5, "tie_word_embeddings": False}, "seq2seq", 0),
    ("bart", BART, "seq2seq", 1),
]


def build(family: Family) -> nn.Module:
    name, fields, head, _ = family
    torch.manual_seed(0)
    model = build_from_scratch(name, {**fields, "vocab_size": VOCABULARY}, TOKENIZER, head).train()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name == "final_logits_bias":  # BART's: it is to matter
            buffer.normal_()
    return model


def with_loss_head(model: nn.Module) -> nn.Module:
    changed = deepcopy(model)
    give_loss_head(changed, partial(chunked_cross_entropy, chunk=4), ops_after_head(model))
    return changed


def inputs(head: Head) -> tuple[dict[str, Tensor], Tensor]:
    """What the model takes, and labels."""
    tokens = {"input_ids": torch.randint(3, VOCABULARY, (3, 7))}
    if head == "seq2seq":
        tokens["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 5))
    labels = torch.randint(VOCABULARY, (3, 5 if head == "seq2seq" else 7))
    labels[0, 2:4] = labels[2] = IGNORED_LABEL
    return tokens, labels


def targets_of(labels: Tensor) -> dict[str, Tensor]:
    positions_N, labels_BL = LossTargets.of(labels, IGNORED_LABEL)
    return {"target_positions": positions_N, "target_labels": labels_BL}


def close(found: Tensor, wanted: Tensor, least: float) -> bool:
    return float((found - wanted).norm()) <= 1e-5 * max(float(wanted.norm()), least)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0]}-{family[1].get('tie_word_embeddings')}")
def test_loss_and_gradients_are_those_of_the_logits(family: Family) -> None:
    model = build(family)
    assert len(ops_after_head(model).ops) == family[-1]
    changed = with_loss_head(model)
    tokens, labels = inputs(family[2])
    logits = model(**tokens).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    found = changed(**tokens, **targets_of(labels)).loss
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, parameter in changed.named_parameters():
        assert close(parameter.grad, wanted[name], 1e-2 * largest), name
    assert torch.equal(changed(**tokens).logits, model(**tokens).logits)  # without targets nothing has changed
    assert changed.state_dict().keys() == model.state_dict().keys()


def test_gradients_of_targets_are_copied_to_their_rows() -> None:
    """Not added up, for which CUDA sorts them."""
    model = with_loss_head(build(FAMILIES[0]))
    _, labels = inputs("causal_lm")
    hidden = torch.randn(3, 7, 16, requires_grad=True)
    model.lm_head.targets = LossTargets.of(labels, IGNORED_LABEL)
    model.lm_head(hidden)
    with StepOperators() as operators:
        model.lm_head.loss.backward()
    assert operators.launches["aten::index_copy_"] == 1
    assert not [name for name in operators.launches if "index_put" in name or "index_add" in name]
    assert torch.equal((hidden.grad != 0).any(-1), labels != IGNORED_LABEL)


def test_a_forward_pass_that_fails_leaves_no_targets_behind() -> None:
    family = FAMILIES[0]
    model = with_loss_head(build(family))
    tokens, labels = inputs(family[2])
    with pytest.raises(IndexError):
        model(input_ids=tokens["input_ids"] + VOCABULARY, **targets_of(labels))
    assert model(**tokens).logits.shape == (3, 7, VOCABULARY)


def test_labels_of_other_positions_are_refused() -> None:
    model = with_loss_head(build(FAMILIES[0]))
    tokens, labels = inputs("causal_lm")
    with pytest.raises(ValueError, match=r"has \[3, 7\] positions, the labels are \[3, 6\]"):
        model(**tokens, **targets_of(labels[:, 1:]))


def test_what_is_recorded_is_never_run_with_weights() -> None:
    """The model's body is left out: it may be large, or not run on the meta device."""
    model = build(FAMILIES[0])
    model.model.layers[0].register_forward_hook(lambda *_: pytest.fail("the body runs"))
    assert ops_after_head(model) == LogitOps([])
    assert "forward" not in vars(model.model)
    assert not model.lm_head._forward_hooks


class Changed(nn.Module):
    """Stands between a model and its logits."""

    def __init__(self, model: nn.Module, change: Any) -> None:
        super().__init__()
        self.change = change
        model.register_forward_hook(self.replace)

    def replace(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        outputs.logits = self.change(outputs.logits)
        return outputs


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits - logits.mean(-1, keepdim=True),
        lambda logits: logits.log_softmax(-1),
        lambda logits: logits[:, 1:],
        lambda logits: logits.roll(1, 1),
        lambda logits: logits.mul_(2),
        lambda logits: (logits[:, :, 3].zero_(), logits)[1],
        lambda logits: logits * torch.ones(VOCABULARY, device=logits.device),
        lambda logits: torch.zeros(1, 2, VOCABULARY, device=logits.device),
    ],
)
def test_what_is_not_elementwise_with_numbers_is_unknown(change: Any) -> None:
    model = build(FAMILIES[0])
    Changed(model, change)
    with pytest.raises(UnknownHead, match="LlamaForCausalLM"):
        ops_after_head(model)


def test_what_is_done_in_training_alone_is_unknown() -> None:
    model = build(FAMILIES[0]).eval()
    Changed(model, lambda logits: logits / 2 if model.training else logits)
    with pytest.raises(UnknownHead, match="is not known"):
        ops_after_head(model)
    assert not any(module.training for module in model.modules())


def test_only_linear_heads_are_known() -> None:
    model = build(FAMILIES[0])
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UnknownHead, match="has no linear layer as its head"):
        ops_after_head(model)
    with pytest.raises(UnknownHead, match="a Linear has no linear layer as its head"):
        ops_after_head(nn.Linear(2, 2))
