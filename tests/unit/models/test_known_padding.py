"""Whether a batch has padding comes with it from the host: no model reads its mask, and none computes other bits."""

import pytest
import torch
from test_packed_models import CASES, build, packed_batch, random_samples
from torch import Tensor

from drawbar.models.heads import Head
from drawbar.models.packed import allow_packing
from drawbar.models.segments import send_padding, use_known_padding
from exhaustive import some
from step_operators import StepOperators

SDPA = [(family, head) for family, head in CASES if family != "gptj"]  # which has eager attention alone


def batch_of(head: Head, has_padding: bool) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 99, (3, 9), generator=chance)
    mask = torch.ones_like(tokens)
    if has_padding:
        mask[1, 7:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    return {**batch, "decoder_input_ids": tokens[:, :5]} if head == "seq2seq" else batch


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(
    ("family", "head"), some({family: (family, head) for family, head in reversed(SDPA)}.values(), 26)
)
def test_the_mask_is_not_read_and_the_bits_are_the_same(family: str, head: Head, has_padding: bool) -> None:
    model, batch = build(family, head), batch_of(head, has_padding)
    with StepOperators() as before:
        wanted = model(**batch).logits
    assert before.reads or family == "mistral"  # its window needs a mask in any case, so transformers does not ask
    use_known_padding(model)
    assert torch.equal(model(**batch).logits, wanted)
    copy = batch["attention_mask"].clone()
    send_padding(copy, batch["attention_mask"])
    with StepOperators() as operators:
        found = model(**{**batch, "attention_mask": copy}).logits
    assert not operators.reads
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("family", "head"), [case for case in SDPA if case[1] == "causal_lm"])
def test_rows_without_a_mask_are_not_read_either(family: str, head: Head) -> None:
    """transformers looks whether their positions restart."""
    model, batch = build(family, head), {"input_ids": batch_of(head, has_padding=False)["input_ids"]}
    with StepOperators() as before:
        wanted = model(**batch, use_cache=False).logits
    assert before.reads
    use_known_padding(model)
    with StepOperators() as operators:
        found = model(**batch, use_cache=False).logits
    assert not operators.reads
    assert torch.equal(found, wanted)


def test_a_mask_that_was_changed_is_read_again() -> None:
    model, batch = build("llama", "causal_lm"), batch_of("causal_lm", has_padding=False)
    use_known_padding(model)
    send_padding(batch["attention_mask"], batch["attention_mask"])
    batch["attention_mask"][1, :4] = 0
    known = model(**batch).logits
    assert torch.equal(known, model(**{**batch, "attention_mask": batch["attention_mask"].clone()}).logits)


def test_packed_rows_are_not_masked_by_what_was_known_before() -> None:
    model, samples = build("llama", "causal_lm"), random_samples([[5, 3]])
    packed = packed_batch("causal_lm", samples, [])
    allow_packing(model, per_sample=False)
    wanted = model(**packed).logits
    use_known_padding(model)
    mask = torch.ones(1, 4, dtype=torch.long)
    send_padding(mask, mask)
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10_000), attention_mask=mask)
    assert torch.equal(model(**packed).logits, wanted)
    padded = torch.tensor([[1, 1, 1, 0]])
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert not torch.equal(model(tokens, attention_mask=padded).logits, model(tokens, attention_mask=mask).logits)
