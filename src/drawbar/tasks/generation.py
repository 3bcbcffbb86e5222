"""Text from a model inside an evaluation: prompts in a batch, with a key-value cache."""

from typing import Any

import torch
from torch import nn

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.models.heads import longest_input


def generation_options(section: GenerationSection, max_tokens: int | None) -> dict[str, Any]:
    """A generation section as arguments of transformers' ``generate``. ``temperature`` 0 is greedy.

    Args:
        max_tokens: most tokens that may be written, as the model has positions for no more; None for no limit.
    """
    most = section.max_new_tokens if max_tokens is None else min(section.max_new_tokens, max_tokens)
    common: dict[str, Any] = {"max_new_tokens": most, "num_beams": section.beams}
    if section.temperature == 0:
        return {**common, "do_sample": False}
    chance = {"temperature": section.temperature, "top_k": section.top_k, "top_p": section.top_p}
    return {**common, "do_sample": True, **chance}


ONLY_FOR_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
ONLY_FOR_BEAMS = ("length_penalty", "early_stopping")


def generation_defaults(section: GenerationSection, max_tokens: int | None) -> dict[str, Any]:
    """``generation_options`` for a generation config. Fields that have no effect are unset: transformers refuses to
    save them."""
    options = generation_options(section, max_tokens)
    of_chance = () if options["do_sample"] else ONLY_FOR_SAMPLING
    of_beams = ONLY_FOR_BEAMS if section.beams == 1 else ()
    return dict.fromkeys(("max_length", *of_chance, *of_beams)) | options


def left_padded(prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths as ``input_ids`` and ``attention_mask`` (B, L), each ending at the last column."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (longest - len(tokens)) + tokens for tokens in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts]),
    }


def continuations(
    model: nn.Module, tokenizer: Any, prompts: list[list[int]], pad: int, section: GenerationSection
) -> list[str]:
    """What a causal model goes on with after each prompt (lists of tokens), the prompt left out."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in left_padded(prompts, pad).items()}
    length, limit = inputs["input_ids"].shape[1], longest_input(model)
    max_tokens = None if limit is None else limit - length + 1  # the last token that is written is not read again
    out_BL = model.generate(**inputs, pad_token_id=pad, **generation_options(section, max_tokens))
    return tokenizer.batch_decode(out_BL[:, length:], skip_special_tokens=True)


def stop_with(model: nn.Module, tokens: list[int]) -> None:
    """Let a model's texts end with any of these tokens, too: here, and wherever it is exported to."""
    config = model.generation_config
    known = config.eos_token_id
    ends = set(tokens) | set(known if isinstance(known, list) else [] if known is None else [known])
    config.eos_token_id = sorted(ends) or None
