"""A model on packed rows computes what it computes on each sample alone: logits, gradients, and nothing across."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.heads import HEADS, Head
from drawbar.models.huggingface import build_from_scratch
from drawbar.models.packed import DECODERS, ENCODER_DECODERS, ENCODERS, allow_packing, count_positions
from exhaustive import some

torch.set_num_threads(1)  # tiny tensors

TOKENIZER = train_byte_bpe([], 257)
CLASSES = 3
ROWS = [[5, 1, 9], [7, 4]]
"""Lengths of the samples in each packed row; the second is padded on the right."""
TARGETS = [[2, 6, 3], [8, 5]]
"""Lengths of what the decoder writes; the first is padded on the right."""

BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,  # attention far from uniform: a wrong mask must show
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    "max_position_embeddings": 32,
    "init_std": 0.3,
}
FIELDS: dict[str, dict[str, Any]] = {  # Llama's, for a family that is not here
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 4, "head_dim": 4},
    "qwen3": {**LLAMA, "head_dim": 4},
    "gpt_neox": {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"},
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_bigcode": GPT2,
    "gemma": {**LLAMA, "head_dim": 4},
    "gemma3_text": {**LLAMA, "head_dim": 4, "sliding_window": 4},
    "gpt2": GPT2,
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "camembert": BERT,
    "electra": {**BERT, "embedding_size": 8},
    "distilbert": {
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
    },
    "t5": T5,
    "mt5": T5,
    "bart": BART,
    "mbart": BART,
}
ENCODER_HEADS: list[Head] = ["sequence_classification", "token_classification", "masked_lm"]
CASES: list[tuple[str, Head]] = [
    *((family, "causal_lm") for family in sorted(DECODERS)),
    *((family, "sequence_classification") for family in sorted(DECODERS & HEADS["sequence_classification"].families)),
    *((family, "token_classification") for family in ("llama", "gpt2")),
    *((family, head) for family in sorted(ENCODERS) for head in ENCODER_HEADS),
    *((family, "seq2seq") for family in sorted(ENCODER_DECODERS)),
]


def build(family: str, head: Head, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    labels = {"num_labels": CLASSES} if head.endswith("classification") else {}
    model = build_from_scratch(family, FIELDS.get(family, LLAMA), TOKENIZER, head, **labels)
    model.set_attn_implementation("sdpa" if attention == "masked" else attention)
    for parameter in model.parameters():  # biases and norms too: none may be neutral
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()  # some dropout has no field in the config


def random_samples(lengths: list[list[int]], seed: int = 0) -> list[list[Tensor]]:
    """Random tokens; each sample ends with the end token, which is also the pad token."""
    chance = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(1, len(TOKENIZER), (length,), generator=chance) for length in row] for row in lengths]
    for row in rows:
        for sample in row[:2]:
            sample[-1] = TOKENIZER.eos_token_id
    return rows


def pad(rows: list[Tensor], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def packed_row(samples: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Tokens and segments."""
    numbers = [[torch.full_like(sample, number) for number, sample in enumerate(row)] for row in samples]
    return pad([torch.cat(row) for row in samples], 0), pad([torch.cat(row) for row in numbers], -1)


def packed_batch(head: Head, samples: list[list[Tensor]], targets: list[list[Tensor]]) -> dict[str, Tensor]:
    tokens, segments = packed_row(samples)
    batch = {"input_ids": tokens, "segment_ids": segments, "position_ids": torch.zeros_like(tokens)}
    if head == "seq2seq":
        batch["decoder_input_ids"], batch["decoder_segment_ids"] = packed_row(targets)
    return batch


def of_samples(logits: Tensor, head: Head, lengths: list[list[int]]) -> list[Tensor]:
    """The packed logits, cut into those of each sample."""
    if head == "sequence_classification":
        return list(logits)
    return [part for row, sizes in zip(logits, lengths, strict=True) for part in row[: sum(sizes)].split(sizes)]


def packed_logits(model: nn.Module, head: Head, samples: Any, targets: Any) -> list[Tensor]:
    logits = model(**packed_batch(head, samples, targets)).logits
    return of_samples(logits, head, TARGETS if head == "seq2seq" else ROWS)


def padded_logits(model: nn.Module, head: Head, samples: Any, targets: Any) -> list[Tensor]:
    """Of all samples in one padded batch."""
    flat, written = list(chain(*samples)), list(chain(*targets))
    batch = {"input_ids": pad(flat, 0), "attention_mask": pad([torch.ones_like(sample) for sample in flat], 0)}
    lengths = [len(sample) for sample in flat]
    if head == "seq2seq":
        batch["decoder_input_ids"] = pad(written, 0)
        lengths = [len(target) for target in written]
    logits = model(**batch).logits
    if head == "sequence_classification":
        return list(logits)
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def gradient(model: nn.Module, logits: list[Tensor]) -> Tensor:
    model.zero_grad()
    chance = torch.Generator().manual_seed(1)
    sum((part * torch.randn(part.shape, generator=chance)).sum() for part in logits).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


MASKED: list[tuple[str, Head]] = [("llama", "causal_lm"), ("bert", "masked_lm"), ("t5", "seq2seq"), ("bart", "seq2seq")]
"""Some of each kind, for the attention of runs that began before samples were attended to by themselves."""


@pytest.mark.parametrize(
    ("family", "head", "attention"),
    some(
        [
            *((*case, attention) for case in CASES for attention in ("sdpa", "eager")),
            *((*case, "masked") for case in MASKED),
        ],
        60,
    ),
)
def test_packed_rows_equal_padded_samples(family: str, head: Head, attention: str) -> None:
    model = build(family, head, attention)
    samples, targets = random_samples(ROWS), random_samples(TARGETS, seed=1)
    before = padded_logits(model, head, samples, targets)
    expected = gradient(model, before)
    allow_packing(model, per_sample=head == "sequence_classification", with_row_mask=attention == "masked")

    packed = packed_logits(model, head, samples, targets)
    assert len(packed) == len(before) == 5
    for found, wanted in zip(packed, before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.detach().abs().max()))
    found_gradient = gradient(model, packed)
    assert found_gradient.isfinite().all()
    assert (found_gradient - expected).norm() <= 1e-5 * expected.norm()

    for found, wanted in zip(padded_logits(model, head, samples, targets), before, strict=True):
        assert torch.equal(found, wanted)  # padded batches are what they were


@pytest.mark.parametrize(("family", "head"), {family: (family, head) for family, head in reversed(CASES)}.values())
def test_a_row_may_be_longer_than_a_sample(family: str, head: Head) -> None:
    """Than any that the model has positions for."""
    model = build(family, head)
    lengths, written = [[9, 20, 3, 14]], [[12, 7, 15, 6]]
    samples, targets = random_samples(lengths), random_samples(written, seed=1)
    wanted = padded_logits(model, head, samples, targets)
    allow_packing(model, per_sample=head == "sequence_classification")
    logits = model(**packed_batch(head, samples, targets)).logits
    for found, one in zip(of_samples(logits, head, written if head == "seq2seq" else lengths), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5 * float(one.detach().abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "head"), some(CASES, 40))
def test_a_sample_does_not_see_its_neighbours(family: str, head: Head, attention: str) -> None:
    model = build(family, head, attention)
    allow_packing(model, per_sample=head == "sequence_classification")
    samples, targets = random_samples(ROWS), random_samples(TARGETS, seed=1)
    with torch.no_grad():
        before = packed_logits(model, head, samples, targets)
        samples[0][0], targets[0][0] = samples[0][0] % 99 + 100, targets[0][0] % 99 + 100
        after = packed_logits(model, head, samples, targets)
    assert (before[0] - after[0]).abs().max() > 1e-3
    for old, new in zip(before[1:], after[1:], strict=True):
        # rounding alone: the rows of a matrix product (an expert's, say) are others, and so is the order of its sums
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "head"), [("bert", "sequence_classification"), ("gpt2", "causal_lm")])
def test_padding_changes_nothing_and_stays_finite(family: str, head: Head) -> None:
    model = build(family, head)
    allow_packing(model, per_sample=head == "sequence_classification")
    samples = random_samples([[3, 2]])
    batch = packed_batch(head, samples, [])
    wider = {
        "input_ids": nn.functional.pad(batch["input_ids"], (0, 9), value=7),
        "segment_ids": nn.functional.pad(batch["segment_ids"], (0, 9), value=-1),
    }
    found, wanted = model(**wider).logits, model(**batch).logits
    assert found.isfinite().all()
    torch.testing.assert_close(found if head != "causal_lm" else found[:, :5], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_may_be_padded_where_the_encoder_is_not(family: str, attention: str) -> None:
    model = build(family, "seq2seq", attention)
    allow_packing(model, per_sample=False)
    masks = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["encoder_attention_mask"])

    model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    batch = packed_batch("seq2seq", random_samples([[4, 4], [5, 3]]), random_samples([[2, 2], [5, 6]]))
    logits = model(**batch).logits
    assert (batch["segment_ids"] >= 0).all()
    (mask,) = masks
    if attention == "eager":  # of a row without any key it makes NaN
        assert (mask == 0).any(dim=-1).all()
    assert logits.isfinite().all()
    assert gradient(model, [logits]).isfinite().all()


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("llama", "sequence_classification"),
        ("bert", "masked_lm"),
        ("roberta", "token_classification"),
        ("t5", "seq2seq"),
        ("bart", "seq2seq"),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(family: str, head: Head, attention: str) -> None:
    model = build(family, head, attention)
    allow_packing(model, per_sample=head == "sequence_classification")
    samples, targets = random_samples(ROWS), random_samples(TARGETS, seed=1)
    exact = packed_logits(model, head, samples, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = packed_logits(model, head, samples, targets)
    assert gradient(model, [part.float() for part in rounded]).isfinite().all()
    for found, wanted in zip(rounded, exact, strict=True):
        assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_positions_begin_again_in_each_sample() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 2]])
    assert count_positions(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5, 0]]


def test_a_decoder_classifies_by_the_last_token_that_is_no_padding() -> None:
    """Samples that end with the pad token, or consist of it, are read as in a padded batch."""
    model = build("llama", "sequence_classification")
    end = TOKENIZER.eos_token_id
    samples = [
        [torch.tensor(tokens) for tokens in row] for row in ([[5, 6, end, end], [end, end], [7]], [[end], [8, end]])
    ]
    expected = padded_logits(model, "sequence_classification", samples, [])
    allow_packing(model, per_sample=True)
    found = packed_logits(model, "sequence_classification", samples, [])
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))


def test_a_forward_that_fails_leaves_the_model_usable() -> None:
    model = build("bert", "sequence_classification")
    allow_packing(model, per_sample=True)
    samples = random_samples(ROWS)
    expected = padded_logits(model, "sequence_classification", samples, [])
    batch = packed_batch("sequence_classification", samples, [])
    with pytest.raises(IndexError):
        model(**{**batch, "input_ids": batch["input_ids"] + len(TOKENIZER)})
    found = padded_logits(model, "sequence_classification", samples, [])
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_hooks_work_inside_ddp() -> None:
    model = build("bert", "sequence_classification")
    allow_packing(model, per_sample=True)
    samples = random_samples(ROWS)
    expected = packed_logits(model, "sequence_classification", samples, [])
    expected_gradient = gradient(model, expected)
    with Distributed(RankInfo(), torch.device("cpu"), timeout=60) as world:
        world.ensure_process_group()
        found = packed_logits(nn.parallel.DistributedDataParallel(model), "sequence_classification", samples, [])
        assert torch.equal(torch.stack(found), torch.stack(expected))
        assert torch.equal(gradient(model, found), expected_gradient)


@pytest.mark.parametrize(
    ("family", "head"),
    [("llama", "sequence_classification"), ("bert", "token_classification"), ("bert", "sequence_classification")],
)
def test_adapters_around_the_model(family: str, head: Head) -> None:
    peft = pytest.importorskip("peft")
    kinds = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
    config = peft.LoraConfig(
        r=2,
        target_modules=["query", "value"] if family == "bert" else ["q_proj"],
        task_type=kinds[head],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(build(family, head), config).eval()
    samples = random_samples(ROWS)
    expected = padded_logits(model, head, samples, [])
    allow_packing(model, per_sample=head == "sequence_classification")
    for found, wanted in zip(packed_logits(model, head, samples, []), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "head"), [("llama", "causal_lm"), ("t5", "seq2seq"), ("bart", "seq2seq")])
def test_generation_is_what_it_was(family: str, head: Head) -> None:
    model: Any = build(family, head)
    tokens = torch.randint(1, len(TOKENIZER), (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    before = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    allow_packing(model, per_sample=False)
    after = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(before, after)


def bart_classifier() -> nn.Module:
    return build("bart", "sequence_classification")


def albert() -> nn.Module:
    fields = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_from_scratch("albert", {**fields, "intermediate_size": 8}, TOKENIZER, "masked_lm")


def bert_as_decoder() -> nn.Module:
    return build_from_scratch("bert", {**BERT, "is_decoder": True}, TOKENIZER)


def without_pad_token() -> nn.Module:
    model = build("llama", "sequence_classification")
    model.config.pad_token_id = None
    return model


def other_attention() -> nn.Module:
    model = build("bert", "masked_lm")
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (bart_classifier, "BartForSequenceClassification cannot take packed rows"),
        (albert, "albert model cannot take packed rows; these families can: bart, bert"),
        (lambda: nn.Linear(2, 2), "Linear model cannot take packed rows"),
        (bert_as_decoder, "as a decoder"),
        (without_pad_token, "no pad_token_id"),
        (other_attention, "flash_attention_2 attention"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        allow_packing(make(), per_sample=True)
    assert caught.value.where == "data.batching"
    assert "data.batching=grouped" in str(caught.value.remedy)


def test_flash_attention_of_several_packed_rows_is_refused() -> None:
    """transformers finds the samples of one row alone, and would attend across them in silence."""
    model = build("llama", "causal_lm")
    allow_packing(model, per_sample=False)
    model.config._attn_implementation = "flash_attention_2"
    segments_RL = torch.tensor([[0, 0, 1], [0, 1, 1]])
    with pytest.raises(UserError, match="one packed row alone, and this one has 2"):
        model(input_ids=torch.ones_like(segments_RL), segment_ids=segments_RL)
